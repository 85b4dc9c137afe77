"""The same plan in the simulator: the same instants, the radius kept, and a verdict that sees a planted regression."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.chaos.conduct import Conduct
from orchestrator.chaos.schedule import schedule
from orchestrator.chaos.simulated import run
from orchestrator.core import events as e
from orchestrator.core.vocabulary import Incarnation
from orchestrator.report import chaos as page
from orchestrator.simulation.plan import Capacity, Fault, FaultKind, WorldPlan, sample_policy
from orchestrator.tape.replay import replay
from tests.chaos.plans import RANDOM_KILLS, plan

POLICY = sample_policy(4, steps=1200)
EVEN = WorldPlan(step_s=(0.05,) * 4)
STOPS = {"kind": "stop", "target": {"random": 2}, "every": 9, "duration": 3}


def simulated(asked, world=EVEN, seed=3):
    return run(asked, POLICY, world, seed)


def test_the_simulator_strikes_at_the_instants_that_a_live_run_of_the_same_plan_does():
    asked = plan(RANDOM_KILLS | {"poisson": {"mtbf": 6}}, STOPS, seed=11)
    conduct = simulated(asked).conduct
    ours = [(one.fault.at, one.fault.kind, one.fault.island) for one in conduct.decisions]

    live = Conduct(asked, schedule(asked, POLICY.islands))  # as the live driver looks: late, and every half second
    training = {island.island: Incarnation(1) for island in POLICY.islands}
    for tick in range(1000):
        live.look(100.0 + 0.5 * tick, training, dict)
    theirs = [(one.fault.at, one.fault.kind, one.fault.island) for one in live.decisions]

    assert len(ours) > 10
    assert ours == theirs[: len(ours)]
    assert all(one.at == conduct.begun_at + one.fault.at for one in conduct.decisions)


def test_the_seed_of_the_world_does_not_move_the_faults():
    asked = plan(RANDOM_KILLS, seed=5)
    one, other = (simulated(asked, seed=seed).conduct for seed in (1, 2))
    assert [d.fault for d in one.decisions] == [d.fault for d in other.decisions]


def test_never_fewer_islands_train_than_are_kept():
    asked = plan(RANDOM_KILLS | {"poisson": {"mtbf": 0.5}}, blast_radius={"keep": 2})
    found = simulated(asked)
    fewest = min(_training_counts(found.world.sink.records))
    spared = [one for one in found.conduct.decisions if one.spared]
    assert fewest == 2
    assert spared
    assert len(spared) < len(found.conduct.decisions)


def _training_counts(records):
    """How many islands are in no trouble, from all of them training on."""
    away, seen = set(), False
    for record in records:
        event = record.event
        if isinstance(event, e.FaultInjected):
            away.add(event.island)
        elif isinstance(event, e.IslandCaughtUp):
            seen = True
            away.discard(event.island)
        if seen:
            yield len(POLICY.islands) - len(away)


def test_islands_that_do_not_notice_pass_though_every_one_of_them_was_struck():
    asked = plan(RANDOM_KILLS | {"poisson": {"mtbf": 5}}, STOPS, seed=1)
    found = simulated(asked)
    told = found.verdict.plain()
    assert told["passed"], told["objectives"]
    assert {one.fault.island for one in found.conduct.decisions if not one.spared} == {i.island for i in POLICY.islands}
    assert found.verdict.report["survivors"] == []
    assert found.verdict.report["bystander_gap_max_s"] < 0.1
    struck = [one for one in found.conduct.decisions if not one.spared]
    assert len(found.verdict.report["faults"]) == len(struck)
    assert replay(found.world.tape, ()).exact


def test_survivors_that_wait_for_the_dead_fail_and_the_verdict_says_which_objective_and_when():
    """The planted regression: from a kill on, nobody steps for four seconds."""
    objectives = ["bystander_gap_max_s < 1", "survivor_gap_max_s < 1", "uptime_ratio > 90 %"]
    asked = plan({"kind": "kill", "target": {"name": "asia"}, "at": 20}, objectives=objectives)
    began = simulated(asked).conduct.begun_at
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
    shown = page.render(found.verdict.plain(), found.verdict.report, "name: waiting")
    assert failed.detail in shown
    assert 'class="badge bad">failed' in shown
    assert "<script" not in shown
    assert "http://" not in shown.replace("http://www.w3.org/2000/svg", "")


def test_a_plan_whose_every_fault_was_spared_proves_nothing():
    asked = plan({"kind": "kill", "target": {"name": "asia"}, "at": 20})
    began = simulated(asked).conduct.begun_at
    crash = Fault(began + 19.9, FaultKind.CRASH, POLICY.islands[3].island)
    found = simulated(asked, replace(EVEN, faults=(crash,)))
    assert [one.spared for one in found.conduct.decisions] == ["asia does not train"]
    assert [one.objective for one in found.verdict.judged if not one.passed] == ["a fault strikes"]


def test_an_objective_without_a_value_fails():
    quiet = plan(objectives=["recovery_s.total < 60"])
    (failed,) = [one for one in simulated(quiet).verdict.judged if not one.passed]
    assert "was not measured" in failed.detail


def test_an_aborted_plan_fails():
    asked = plan(RANDOM_KILLS, abort=["uptime_ratio <= 100 %"])
    found = simulated(asked)
    assert found.conduct.decisions == []
    assert [one.objective for one in found.verdict.judged if not one.passed] == ["the plan is not aborted"]
