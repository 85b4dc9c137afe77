"""A plan under way keeps its blast radius, aborts when told to, and says why it spared whom."""

from __future__ import annotations

from orchestrator.chaos.conduct import Conduct
from orchestrator.chaos.schedule import schedule
from orchestrator.core.vocabulary import Incarnation, IslandId
from tests.chaos.plans import FLEET, plan

ALL = {island.island: Incarnation(1) for island in FLEET}
ASIA = IslandId("asia")


def kill(name, at):
    return {"kind": "kill", "target": {"name": name}, "at": at}


def conducting(*faults, **changes):
    asked = plan(*faults, **changes)
    return Conduct(asked, schedule(asked, FLEET))


def nothing():
    return {}


def test_a_plan_begins_once_more_islands_train_than_it_keeps():
    conduct = conducting(kill("asia", 0), blast_radius={"keep": 2})
    two = dict(list(ALL.items())[2:])
    assert conduct.look(3.0, two, nothing) == []
    assert conduct.begun_at is None
    (decision,) = conduct.look(4.0, ALL, nothing)
    assert conduct.begun_at == decision.at == 4.0
    assert not decision.spared


def test_a_struck_island_counts_as_away_before_the_picture_shows_it():
    conduct = conducting(kill("asia", 1), kill("europe", 1), kill("us-east", 1), blast_radius={"keep": 2})
    conduct.look(0.0, ALL, nothing)
    spared = [decision.spared for decision in conduct.look(1.0, ALL, nothing)]
    assert spared == ["", "", "only 2 islands train, and 2 are kept"]


def test_an_island_lives_again_as_another_incarnation():
    conduct = conducting(kill("asia", [1, 2, 3]))
    conduct.look(0.0, ALL, nothing)
    assert [d.spared for d in conduct.look(2.0, ALL, nothing)] == ["", "asia does not train"]
    assert [d.spared for d in conduct.look(3.0, ALL | {ASIA: Incarnation(2)}, nothing)] == [""]


def test_a_stopped_island_lives_again_when_its_time_is_over():
    stop = {"kind": "stop", "target": {"name": "asia"}, "at": [1, 4, 10], "duration": 5}
    conduct = conducting(stop)
    conduct.look(0.0, ALL, nothing)
    assert [d.spared for d in conduct.look(4.0, ALL, nothing)] == ["", "asia does not train"]
    assert conduct.still_stopped(4.0) == ["asia"]
    assert conduct.still_stopped(9.5) == []
    assert [d.spared for d in conduct.look(10.0, ALL, nothing)] == [""]


def test_a_condition_to_abort_ends_the_plan_before_anything_strikes():
    conduct = conducting(kill("asia", 1), abort=["islands_training < 3"])
    assert conduct.look(0.0, ALL, lambda: {"islands_training": 4}) == []
    assert conduct.look(1.0, ALL, lambda: {"islands_training": 2}) == []
    assert conduct.aborted == "islands_training < 3 (it is 2)"
    assert conduct.look(9.0, ALL, lambda: {"islands_training": 4}) == []
    assert conduct.over


def test_a_fault_the_job_would_not_take_counts_as_spared():
    conduct = conducting(kill("asia", 0))
    (decision,) = conduct.look(0.0, ALL, nothing)
    conduct.refused(decision, "asia has no process")
    assert [one.plain()["spared"] for one in conduct.decisions] == ["asia has no process"]


def test_faults_whose_time_passed_while_nobody_looked_are_not_made_up_for():
    conduct = conducting(kill("asia", [1, 4]), kill("europe", [5, 30]), kill("us-east", 28))
    conduct.look(10.0, ALL, nothing)
    missed = [decision.spared.partition(":")[0] for decision in conduct.look(38.5, ALL, nothing)]
    assert missed == ["missed"] * 3 + [""]
    assert [decision.spared for decision in conduct.look(40.5, ALL, nothing)] == [""]
