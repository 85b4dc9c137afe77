"""A machine that cannot carry what its islands offer: merges become rarer, and not smaller.

The payloads of all islands pass one after the other through a machine that is given twice as much as it can carry, for three
minutes. Source: a job of 128 islands on two cores, whose merges fell to one island of 128 and stayed there
(docs/decisions/0217-a-merge-needs-half-of-the-islands-above-four.md).
"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.core import effects as f
from orchestrator.core.vocabulary import JobPolicy
from orchestrator.simulation import protocol
from orchestrator.specification.sections import GRACE_FLOOR_STEPS, HALF_OF_ISLANDS
from tests.swarm.rough_world import EventFaults, RoughWorld

ISLANDS, FRAGMENTS, INTERVAL = 12, 8, 24
SINCE, UNTIL, RECOVERED, END = 60.0, 240.0, 360.0, 430.0
LOAD = 2.0
PAYLOADS_PER_SECOND = 2 * ISLANDS * FRAGMENTS / INTERVAL  # a step takes a second, and an offer is answered by a version


def _policy(quorum_ratio: float, grace_floor_steps: float) -> JobPolicy:
    policy = protocol.policy(
        ISLANDS, fragments=FRAGMENTS, interval_steps=INTERVAL, overlap_steps=4, grace_cap_steps=3.0
    )
    return replace(policy, quorum_ratio=quorum_ratio, grace_floor_steps=grace_floor_steps)


def _contributors(policy: JobPolicy) -> list[tuple[float, int]]:
    """Return when each merge was ordered, and how many islands were in it."""
    quick = (0.05, 0.06)
    plan = protocol.plan([1.0] * ISLANDS, pull_s=quick, delivery_s=quick, report_every_s=1.0, step_jitter_ratio=0.1)
    overload = (SINCE, UNTIL, LOAD / PAYLOADS_PER_SECOND)
    world = RoughWorld(policy, plan, 1, EventFaults(overload=overload))
    world.run(until=END)
    return [
        (record.event.at, len(effect.inputs))
        for record in world.sink.records
        for effect in record.effects
        if isinstance(effect, f.MergeFragment)
    ]


def test_merges_keep_half_of_the_islands_under_overload_and_nearly_all_two_minutes_after_it() -> None:
    merges = _contributors(_policy(HALF_OF_ISLANDS, GRACE_FLOOR_STEPS))
    overloaded = [count for at, count in merges if SINCE <= at < UNTIL]
    recovered = [count for at, count in merges if at >= RECOVERED]
    assert min(overloaded) >= ISLANDS / 2
    assert min(recovered) >= 0.9 * ISLANDS
    assert min(len(overloaded), len(recovered)) >= 10


def test_without_a_part_as_the_quorum_the_same_load_leaves_one_island_in_a_merge() -> None:
    merges = _contributors(_policy(0.0, 0.0))
    collapsed = [count for at, count in merges if SINCE + 60.0 <= at < UNTIL]
    assert max(collapsed) == 1
