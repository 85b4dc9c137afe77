"""An island that hangs in the simulated world: named, ended, and placed again, as a tape that replays and can be fitted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from orchestrator.core import effects as f
from orchestrator.core.messages import Overdue
from orchestrator.core.vocabulary import IslandId, JobOutcome, StepLimits
from orchestrator.simulation.fit import observe
from orchestrator.simulation.plan import Fault, FaultKind, WorldPlan, sample_policy
from orchestrator.simulation.world import World
from orchestrator.tape.replay import replay
from tests.harness.reports import of_kind

ASIA = IslandId("asia")
LIMIT_S = 4.0


def run(hangs_s: float) -> World:
    policy = replace(sample_policy(quorum=4), step_limits=StepLimits(LIMIT_S, 2.0, LIMIT_S))
    plan = WorldPlan(step_s=(0.1,) * 4, faults=(Fault(3.0, FaultKind.HANG, ASIA, hangs_s),))
    return World(policy, plan, seed=7).run()


def overdue(world: World) -> list[Any]:
    return of_kind((record.event for record in world.tape.records), Overdue)


def stops(world: World) -> list[f.StopIsland]:
    decided = (effect for record in world.tape.records for effect in record.effects)
    return [one for one in decided if isinstance(one, f.StopIsland) and "hangs" in one.reason]


def test_one_that_hangs_for_ever_is_ended_at_its_limit_and_the_job_goes_on_with_its_successor() -> None:
    world = run(hangs_s=1e6)
    assert [one.seconds for one in overdue(world)] == [1.0, 2.0, 4.0]
    assert [(one.island, one.incarnation) for one in stops(world)] == [(ASIA, 1)]
    assert world.finished is not None
    assert world.finished.outcome is JobOutcome.COMPLETED
    assert replay(world.tape).exact
    assert [island for island, _, _ in observe(world.tape).crashes] == [ASIA]


def test_one_whose_step_ends_before_that_is_left_alone() -> None:
    world = run(hangs_s=3.0)
    assert [one.seconds for one in overdue(world)] == [1.0, 2.0]
    assert stops(world) == []
    assert max(incarnation for _, incarnation in world.hosts) == 1
