"""The same plan in the simulator: the same instants, the radius kept, and a verdict that sees a planted regression."""

from __future__ import annotations

from dataclasses import replace

import pytest

from api.chaos.plans import load, plan_file, world_of
from api.installation.home import CONFIGS
from orchestrator.chaos.plan import PLANNED
from orchestrator.chaos.runner import ChaosRunner, judge, schedule
from orchestrator.chaos.simulated import run
from orchestrator.core import events as e
from orchestrator.core.messages import CaughtUp
from orchestrator.core.vocabulary import Incarnation
from orchestrator.report import html
from orchestrator.simulation.plan import Capacity, Fault, FaultKind, WorldPlan, sample_policy
from orchestrator.tape.replay import replay
from tests.chaos.plans import RANDOM_KILLS, plan

POLICY = sample_policy(4, steps=1200)
EVEN = WorldPlan(step_s=(0.05,) * 4)
LINKS = (
    {"kind": "cut", "target": {"random": 1}, "every": 11, "duration": 4},
    {"kind": "slow", "target": {"random": 2}, "every": 13, "duration": 6, "bytes_per_second": 50_000},
    {"kind": "corrupt", "target": {"random": 1}, "every": 7, "payloads": 2},
    {"kind": "delay", "target": {"region": "asia"}, "poisson": {"mtbf": 10}, "payloads": 1, "duration": 1},
    {"kind": "drop", "target": {"random": 1}, "every": 8, "payloads": 2},
)
STOPS = {"kind": "stop", "target": {"random": 2}, "every": 9, "duration": 3}


def simulated(asked, world=EVEN, seed=3):
    return run(asked, POLICY, world, seed)


def test_the_simulator_strikes_at_the_instants_that_a_live_run_of_the_same_plan_does():
    others = (
        {"kind": "kill_node", "target": {"random": 1}, "at": 29},
        {"kind": "kill_host", "target": {"random": 1}, "at": 21},
        {"kind": "kill_synchroniser", "at": [14, 33]},
    )
    asked = plan(
        RANDOM_KILLS | {"poisson": {"mtbf": 6}}, STOPS, *LINKS, *others, {"kind": "kill_api", "at": 30}, seed=11
    )
    runner = simulated(asked).runner
    ours = [one.fault for one in runner.decisions]

    live = ChaosRunner(asked, schedule(asked, POLICY.islands))  # as the live driver looks: late, and every half second
    training = {island.island: Incarnation(1) for island in POLICY.islands}
    for tick in range(1000):
        live.look(100.0 + 0.5 * tick, training, dict)
    theirs = [one.fault for one in live.decisions]

    assert {fault.kind for fault in ours} == set(PLANNED)
    assert ours == theirs[: len(ours)]
    assert all(one.at == runner.begun_at + one.fault.at for one in runner.decisions)


def test_links_and_payloads_suffer_in_the_simulator_and_nobody_stands_still_for_it():
    asked = plan(*LINKS, objectives=["bystander_gap_max_s < 0.1"])
    found = simulated(asked, replace(EVEN, payload_bytes=100_000, adoption="rebase"))
    assert found.verdict.passed, found.verdict.plain()["objectives"]
    told = {fault["kind"] for fault in found.verdict.report["faults"]}
    assert told == {"cut", "slow", "corrupt", "delay", "drop"}
    count = sum(
        one.fault.fault.payloads for one in found.runner.decisions if one.fault.kind == "corrupt" and not one.skipped
    )
    unusable = [r.event for r in found.world.sink.records if isinstance(r.event, e.ContributionUnusable)]
    assert 0 < len(unusable) <= count
    assert found.verdict.notes == ()
    assert replay(found.world.tape, ()).exact


def test_a_slow_link_carries_no_more_bytes_than_it_can_and_a_lost_payload_never_comes():
    slow = {"kind": "slow", "target": {"name": "asia"}, "at": 10, "duration": 10, "bytes_per_second": 25_000}
    begun, came = _contributions(plan(slow))
    carried = [at for at in came if begun + 10.5 < at < begun + 20]
    assert 1 <= len(carried) <= 10 / 4 + 1, "100 kB each, and none of what came too late while the first was under way"
    drop = {"kind": "drop", "target": {"name": "asia"}, "at": 10, "payloads": 12}
    begun, came = _contributions(plan(drop))
    assert not [at for at in came if begun + 10.1 < at < begun + 11.5]
    assert [at for at in came if begun + 12.0 < at < begun + 13.0]


def _contributions(asked):
    """When the plan began, and when the bytes of contributions of asia came."""
    found = simulated(asked, replace(EVEN, payload_bytes=100_000))
    arrived = [r.event for r in found.world.sink.records if isinstance(r.event, e.ContributionArrived)]
    came = [event for event in arrived if event.displacement is not None]
    return found.runner.begun_at, [event.at for event in came if event.contribution.island == "asia"]


def test_what_a_simulation_cannot_show_is_said_and_never_counts_as_injected():
    faults = [{"kind": "kill_synchroniser", "at": 5}, {"kind": "kill_api", "at": 6}]
    slow = {"kind": "slow", "target": {"random": 1}, "at": 7, "duration": 5, "bytes_per_second": 10}
    verdict = simulated(plan(*faults, objectives=["loss_gap < 1 %"])).verdict
    assert [one.objective for one in verdict.judged if not one.passed] == ["a fault is injected", "loss_gap < 1 %"]
    assert [(f["kind"], f["spared"]) for f in verdict.conducted] == [
        ("kill_synchroniser", "a simulated job's synchroniser cannot be killed"),
        ("kill_api", "a simulated job has no service"),
    ]
    noted = " ".join(simulated(plan(*faults, slow, objectives=["loss_gap < 1 %"])).verdict.notes)
    for name in ("kill_synchroniser", "kill_api", "payload_bytes", "loss_gap"):
        assert name in noted
    shown = html.render_verdict(verdict.plain(), verdict.report, "")
    assert "What this run does not show" in shown


def test_the_loss_gap_is_measured_against_the_reference_and_one_of_another_length_is_noted():
    runner = ChaosRunner(asked := plan(objectives=["loss_gap < 1 %"]), schedule(asked, POLICY.islands))
    own = simulated(plan()).verdict.report
    better = {**own, "loss_final": own["loss_final"] / 1.02}
    same = judge(runner, own, own)
    assert (same.judged[-1].passed, same.judged[-1].value, same.notes) == (True, 0.0, ())
    (*_, failed) = judge(runner, own, better).judged
    assert not failed.passed
    assert failed.value == pytest.approx(0.02)
    longer = {**own, "policy": {**own["policy"], "token_budget": 2 * own["policy"]["token_budget"]}}
    assert "token_budget" in judge(runner, own, longer).notes[0]
    assert "has no value in this job's report" in judge(runner, own).judged[-1].detail


def test_the_seed_of_the_world_does_not_move_the_faults():
    asked = plan(RANDOM_KILLS, seed=5)
    one, other = (simulated(asked, seed=seed).runner for seed in (1, 2))
    assert [d.fault for d in one.decisions] == [d.fault for d in other.decisions]


def test_never_fewer_islands_train_than_are_kept():
    asked = plan(RANDOM_KILLS | {"poisson": {"mtbf": 0.5}}, blast_radius={"keep": 2})
    found = simulated(asked)
    fewest = min(_training_counts(found.world.sink.records))
    skipped = [one for one in found.runner.decisions if one.skipped]
    assert fewest == 2
    assert skipped
    assert len(skipped) < len(found.runner.decisions)


def _training_counts(records):
    """How many islands are in no trouble, from all of them training on."""
    away, seen = set(), False
    for record in records:
        event = record.event
        if isinstance(event, e.FaultInjected):
            away.add(event.island)
        elif isinstance(e.report_of(event), CaughtUp):
            seen = True
            away.discard(event.island)
        if seen:
            yield len(POLICY.islands) - len(away)


def test_islands_that_do_not_notice_pass_though_every_one_of_them_was_struck():
    asked = plan(RANDOM_KILLS | {"poisson": {"mtbf": 5}}, STOPS, seed=1)
    found = simulated(asked)
    told = found.verdict.plain()
    assert told["passed"], told["objectives"]
    assert {one.fault.island for one in found.runner.decisions if not one.skipped} == {i.island for i in POLICY.islands}
    assert found.verdict.report["survivors"] == []
    assert found.verdict.report["bystander_gap_max_s"] < 0.1
    injected = [one for one in found.runner.decisions if not one.skipped]
    assert len(found.verdict.report["faults"]) == len(injected)
    assert replay(found.world.tape, ()).exact


def test_survivors_that_wait_for_the_dead_fail_and_the_verdict_says_which_objective_and_when():
    """The planted regression: from a kill on, nobody steps for four seconds."""
    objectives = ["bystander_gap_max_s < 1", "survivor_gap_max_s < 1", "uptime_ratio > 90 %"]
    asked = plan({"kind": "kill", "target": {"name": "asia"}, "at": 20}, objectives=objectives)
    began = simulated(asked).runner.begun_at
    others = [island.island for island in POLICY.islands if island.island != "asia"]
    waiting = [Capacity(began + at, island, ratio) for at, ratio in ((20.0, 0.0), (24.0, 1.0)) for island in others]
    found = simulated(asked, replace(EVEN, capacity=tuple(waiting)))
    failed, of_survivors = [one for one in found.verdict.judged if not one.passed]
    assert failed.objective == "bystander_gap_max_s < 1"
    assert of_survivors.objective == "survivor_gap_max_s < 1"
    assert (of_survivors.value, of_survivors.at) == (failed.value, failed.at)
    assert failed.value == pytest.approx(4.0, abs=0.2)
    assert failed.margin == pytest.approx(-3.0, abs=0.2)
    assert failed.at == pytest.approx(began + 24.0, abs=1.0)
    assert "s after the kill of asia" in failed.detail
    shown = html.render_verdict(found.verdict.plain(), found.verdict.report, "name: waiting")
    assert failed.detail in shown
    assert 'class="badge bad">failed' in shown
    assert "<script" not in shown
    assert "http://" not in shown.replace("http://www.w3.org/2000/svg", "")


def test_a_plan_whose_every_fault_was_skipped_proves_nothing():
    asked = plan({"kind": "kill", "target": {"name": "asia"}, "at": 20})
    began = simulated(asked).runner.begun_at
    crash = Fault(began + 19.9, FaultKind.CRASH, POLICY.islands[3].island)
    found = simulated(asked, replace(EVEN, faults=(crash,)))
    assert [one.skipped for one in found.runner.decisions] == ["asia does not train"]
    assert [one.objective for one in found.verdict.judged if not one.passed] == ["a fault is injected"]


def test_an_objective_without_a_value_fails():
    quiet = plan(objectives=["recovery_s.total < 60"])
    (failed,) = [one for one in simulated(quiet).verdict.judged if not one.passed]
    assert "has no value in this job's report" in failed.detail


def test_an_aborted_plan_fails():
    asked = plan(RANDOM_KILLS, abort=["uptime_ratio <= 100 %"])
    found = simulated(asked)
    assert found.runner.decisions == []
    assert [one.objective for one in found.verdict.judged if not one.passed] == ["the plan is not aborted"]


@pytest.mark.parametrize("pull_s", [(0.002, 0.02), (1.0, 1.5)], ids=["in time", "late"])
def test_shipped_attrition_fails_where_most_work_is_thrown_away_though_nobody_waits(pull_s):
    """The planted regression: the paper's adoption, and bytes that come after their round's window, when all is lost."""
    policy, world = world_of(CONFIGS / "demo.yaml")
    starting = {"place_s": (1.0, 2.0), "start_s": (5.0, 8.0)}  # as on two busy cores
    world = replace(world, step_s=(0.2, 0.206, 0.212, 0.22), adoption="replace", pull_s=pull_s, **starting)
    found = run(load(plan_file("attrition")), policy, world, seed=3)
    assert len(found.runner.decisions) >= 3
    failed = [one.objective for one in found.verdict.judged if not one.passed]
    if pull_s[0] < world.step_s[0]:
        assert failed == []
        assert found.verdict.report["goodput_ratio"] > 0.75, "there is a margin"
    else:
        assert failed == ["goodput_ratio > 60 %"]
        assert found.verdict.report["goodput_ratio"] < 0.3
