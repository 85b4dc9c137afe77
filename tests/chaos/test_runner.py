"""A plan under way keeps its blast radius, aborts when told to, and says why it skips which faults."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.chaos.runner import ChaosRunner, schedule
from orchestrator.core.vocabulary import Incarnation, IslandId
from tests.chaos.plans import FLEET, plan

ALL = {island.island: Incarnation(1) for island in FLEET}
ASIA = IslandId("asia")


def kill(name, at):
    return {"kind": "kill", "target": {"name": name}, "at": at}


def conducting(*faults, **changes):
    asked = plan(*faults, **changes)
    return ChaosRunner(asked, schedule(asked, FLEET))


def nothing():
    return {}


def test_a_plan_begins_once_more_islands_train_than_it_keeps():
    runner = conducting(kill("asia", 0), blast_radius={"keep": 2})
    two = dict(list(ALL.items())[2:])
    assert runner.look(3.0, two, nothing) == []
    assert runner.begun_at is None
    (decision,) = runner.look(4.0, ALL, nothing)
    assert runner.begun_at == decision.at == 4.0
    assert not decision.skipped


def test_an_island_with_a_fault_counts_as_away_before_the_status_shows_it():
    runner = conducting(kill("asia", 1), kill("europe", 1), kill("us-east", 1), blast_radius={"keep": 2})
    runner.look(0.0, ALL, nothing)
    skipped = [decision.skipped for decision in runner.look(1.0, ALL, nothing)]
    assert skipped == ["", "", "only 2 islands train, and 2 are kept"]


def test_an_island_lives_again_as_another_incarnation():
    runner = conducting(kill("asia", [1, 2, 3]))
    runner.look(0.0, ALL, nothing)
    assert [d.skipped for d in runner.look(2.0, ALL, nothing)] == ["", "asia does not train"]
    assert [d.skipped for d in runner.look(3.0, ALL | {ASIA: Incarnation(2)}, nothing)] == [""]


def test_a_stopped_island_lives_again_when_its_time_is_over():
    stop = {"kind": "stop", "target": {"name": "asia"}, "at": [1, 4, 10], "duration": 5}
    runner = conducting(stop)
    runner.look(0.0, ALL, nothing)
    assert [d.skipped for d in runner.look(4.0, ALL, nothing)] == ["", "asia does not train"]
    assert runner.still_stopped(4.0) == ["asia"]
    assert runner.still_stopped(9.5) == []
    assert [d.skipped for d in runner.look(10.0, ALL, nothing)] == [""]


def test_a_cut_off_island_counts_as_away_and_one_with_a_slow_link_does_not():
    cut = {"kind": "cut", "target": {"name": "asia"}, "at": 1, "duration": 5}
    slow = {"kind": "slow", "target": {"name": "europe"}, "at": 1, "duration": 50, "bytes_per_second": 10}
    drop = {"kind": "drop", "target": {"name": "us-west"}, "at": 1, "payloads": 2}
    runner = conducting(cut, slow, drop, kill("europe", 2), kill("us-east", [2, 6]), blast_radius={"keep": 2})
    runner.look(0.0, ALL, nothing)
    assert [d.skipped for d in runner.look(1.0, ALL, nothing)] == ["", "", ""]
    assert [d.skipped for d in runner.look(2.0, ALL, nothing)] == ["", "only 2 islands train, and 2 are kept"]
    assert runner.still_stopped(3.0) == ["asia", "europe", "us-west"]
    assert runner.still_stopped(7.0) == ["europe", "us-west"]
    without_europe = {name: life for name, life in ALL.items() if name != "europe"}
    assert [d.skipped for d in runner.look(6.0, without_europe, nothing)] == [""]


def test_with_a_node_all_islands_of_its_group_may_die_and_the_radius_counts_them():
    fleet = [*FLEET, replace(FLEET[3], island=IslandId("asia-1"))]
    training = {island.island: Incarnation(1) for island in fleet}
    node = {"kind": "kill_node", "target": {"name": "asia"}, "at": 1}
    asked = plan(node, kill("us-east", 2), kill("asia-1", [3, 60]), blast_radius={"keep": 3})
    runner = ChaosRunner(asked, schedule(asked, fleet))
    runner.look(0.0, training, nothing)
    assert [d.skipped for d in runner.look(1.0, training, nothing)] == [""]
    assert [d.skipped for d in runner.look(2.0, training, nothing)] == ["only 3 islands train, and 3 are kept"]
    assert [d.skipped for d in runner.look(3.0, training, nothing)] == ["asia-1 does not train"]
    back = training | {ASIA: Incarnation(2)}
    assert [d.skipped for d in runner.look(60.0, back, nothing)] == [""], (
        "it outlived the node, and can have a fault again"
    )
    tight = plan(node, blast_radius={"keep": 4})
    careful = ChaosRunner(tight, schedule(tight, fleet))
    careful.look(0.0, training, nothing)
    (skipped,) = careful.look(1.0, training, nothing)
    assert skipped.skipped == "only 5 islands train, and 4 are kept, and with the node of asia more may die"


def test_what_strikes_no_island_needs_none_to_train():
    runner = conducting({"kind": "kill_synchroniser", "at": 0}, {"kind": "kill_api", "at": 0}, kill("asia", 0))
    runner.look(0.0, ALL, nothing)
    assert [(d.fault.kind, d.fault.island, d.skipped) for d in runner.decisions] == [
        ("kill_synchroniser", "", ""),
        ("kill_api", "", ""),
        ("kill", "asia", ""),
    ]


def test_a_condition_to_abort_ends_the_plan_before_any_fault():
    runner = conducting(kill("asia", 1), abort=["islands_training < 3"])
    assert runner.look(0.0, ALL, lambda: {"islands_training": 4}) == []
    assert runner.look(1.0, ALL, lambda: {"islands_training": 2}) == []
    assert runner.aborted == "islands_training < 3 (it is 2)"
    assert runner.look(9.0, ALL, lambda: {"islands_training": 4}) == []
    assert runner.over


def test_a_fault_the_job_would_not_take_counts_as_skipped():
    runner = conducting(kill("asia", 0))
    (decision,) = runner.look(0.0, ALL, nothing)
    runner.refused(decision, "asia has no process")
    assert [one.plain()["spared"] for one in runner.decisions] == ["asia has no process"]


def test_faults_whose_time_passed_while_nobody_looked_are_not_made_up_for():
    runner = conducting(kill("asia", [1, 4]), kill("europe", [5, 30]), kill("us-east", 28))
    runner.look(10.0, ALL, nothing)
    missed = [decision.skipped.partition(":")[0] for decision in runner.look(38.5, ALL, nothing)]
    assert missed == ["missed"] * 3 + [""]
    assert [decision.skipped for decision in runner.look(40.5, ALL, nothing)] == [""]
