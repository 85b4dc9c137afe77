"""Draining in the simulated world: at whatever instant it is asked for, the island loses nothing, and its data goes on."""

from __future__ import annotations

import pytest

from orchestrator.core import effects as f
from orchestrator.core.vocabulary import IslandState
from orchestrator.simulation.plan import Fault, FaultKind, WorldPlan, sample_policy
from orchestrator.simulation.world import World
from orchestrator.tape.replay import replay

STEP_S = 0.05
READD_AT = 8.0


def drained(asked_at: float, merge_s: float = 0.02) -> World:
    """Four islands; one is drained in the midst, and added again."""
    faults = (Fault(asked_at, FaultKind.DRAIN, "europe"), Fault(READD_AT, FaultKind.READD, "europe"))
    plan = WorldPlan((STEP_S,) * 4, adoption="rebase", faults=faults, merge_s=(merge_s, merge_s))
    return World(sample_policy(4, quorum=2, steps=240), plan, seed=3)


@pytest.mark.parametrize("merge_s", [0.002, 0.2])
@pytest.mark.parametrize("late", range(13))
def test_a_drained_island_loses_no_token(late: int, merge_s: float) -> None:
    """Thirteen instants within an interval of twelve steps: before, at and after every due point and merge."""
    world = drained(3.0 + late * STEP_S, merge_s).run(until=READD_AT - 0.1)
    assert world.core.state.islands["europe"].state is IslandState.DRAINED
    trained = world.goodput.ledger.trained["europe"]
    assert trained > 0
    assert {(a.merged, a.discarded, a.in_flight) for a in world.goodput.ledger.accounts["europe"]} == {(trained, 0, 0)}


def test_its_data_goes_on_where_it_was_when_it_is_added_again() -> None:
    world = drained(3.0).run()
    europe = world.hosts["europe", 1].process
    asked = [x for r in world.sink.records for x in r.effects if isinstance(x, f.BeginCatchUp) and x.island == "europe"]
    assert [x.cursor for x in asked] == [0, europe.replica.steps_total]
    assert world.core.state.islands["europe"].last_merge_at > READD_AT
    assert replay(world.tape).exact


def test_time_drained_is_not_time_that_was_wanted() -> None:
    world = drained(3.0).run()
    spans = [span for span in world.statistics.summary()["timeline"] if span[0] == "europe"]
    assert {"draining", "drained"} <= {state for *_, state in spans}
    seconds = sum(world.goodput.summary()["islands"]["europe"]["seconds"].values())
    assert seconds == pytest.approx(sum(until - since for _, since, until, state in spans if state != "drained"))
