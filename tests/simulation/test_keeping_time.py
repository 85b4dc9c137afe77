"""An island that fell behind catches up with the others' clock, not only with their parameters; and no clock runs away.

Before clocks were raised to where the first island is, one that came out of a stall was raised to the last merge's step,
came to each round after its window, and merged an interval late for ever, while all rounds waited their window out for it.
"""

from __future__ import annotations

from typing import TypeVar

import pytest

from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.messages import Progress
from orchestrator.core.vocabulary import CloseReason, IslandId
from orchestrator.simulation import protocol
from orchestrator.simulation.plan import Capacity
from orchestrator.simulation.world import World
from tests.harness.reports import of_kind

BACK, UNTIL = 73.4, 300.0
Effect = TypeVar("Effect")
STALL = (Capacity(60.0, IslandId("learner-3"), 0.0), Capacity(BACK, IslandId("learner-3"), 1.0))
SLOW = {"letter_s": (0.05, 0.05), "pull_s": (0.1, 0.1), "delivery_s": (0.05, 0.05)}


def _world(fragments: int, interval: int, overlap: int, **plan: object) -> World:
    policy = protocol.policy(
        4, fragments=fragments, interval_steps=interval, overlap_steps=overlap, grace_cap_steps=2.0
    )
    return World(policy, protocol.plan(**{"step_s": (1.0,) * 4, **plan}), seed=1, checked=False).run(UNTIL)


@pytest.mark.parametrize(("fragments", "interval", "overlap"), [(6, 6, 3), (24, 24, 2), (8, 24, 2), (4, 12, 6)])
def test_an_island_that_stood_still_is_in_time_for_every_round_after(fragments, interval, overlap):
    """Of islands in step, where no chance helps it."""
    world = _world(fragments, interval, overlap, capacity=STALL, **SLOW)
    merges = _effects(world, f.MergeFragment, BACK + 2 * interval)
    assert len(merges) > 3 * fragments
    assert {x.reason for x in merges} == {CloseReason.EVERYONE_IN}
    assert {len(x.inputs) for x in merges} == {4}
    assert max(_steps_behind(world, merges)) <= 1
    assert not _effects(world, f.RefuseContribution, BACK + 2 * interval)


def test_of_islands_a_third_apart_in_speed_nearly_all_are_in_time_with_grace():
    """P = H: the slow ones' clocks can be raised at every step. Before, only the fastest ever was."""
    world = _world(24, 24, 2, step_s=(0.9, 1.0, 1.1, 1.2))
    merges = _effects(world, f.MergeFragment, 60.0)
    in_time = sum(behind < 12 for behind in _steps_behind(world, merges))
    assert in_time > 0.8 * 4 * len(merges)


@pytest.mark.parametrize("links", [{}, SLOW], ids=["quick", "slow"])
@pytest.mark.parametrize(("fragments", "interval", "overlap"), [(6, 6, 3), (24, 24, 2), (4, 12, 6)])
def test_clocks_of_islands_of_one_speed_show_the_steps_they_take(fragments, interval, overlap, links):
    """Each raises the others' clock; that must not be a wheel that only turns forward."""
    world = _world(fragments, interval, overlap, step_jitter_ratio=0.05, capacity=STALL, **links)
    told = of_kind((r.event for r in world.sink.records), Progress)
    assert max(report.step for report in told) <= max(report.steps_total for report in told) + 2


def _effects(world: World, kind: type[Effect], since: float) -> list[Effect]:
    return [x for r in world.sink.records if r.event.at > since for x in r.effects if isinstance(x, kind)]


def _steps_behind(world: World, merges: list[f.MergeFragment]) -> list[int]:
    """Of each merged contribution: how many steps before its merge's it was made."""
    offers = [r.event.contribution for r in world.sink.records if isinstance(r.event, e.ContributionArrived)]
    step_of = {c.payload: c.step for c in offers}
    return [merge.step - step_of[item.payload] for merge in merges for item in merge.inputs]
