"""Draws standbys for a drawn job, and faults on them, by a generator of their own."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from orchestrator.core.vocabulary import Duration, Instant, IslandId, JobPolicy
from orchestrator.simulation.plan import Fault, FaultKind, WorldPlan

KINDS = (FaultKind.CRASH, FaultKind.CRASH, FaultKind.KILL, FaultKind.FREEZE, FaultKind.CUT)
"""Crashes are the reason for standbys, so they are the most likely."""


def with_standbys(
    policy: JobPolicy, plan: WorldPlan, random: Random, until: Instant, silence_max_s: Duration
) -> tuple[JobPolicy, WorldPlan]:
    """Add one or two standbys for some of the islands, and faults before ``until`` on the standbys and those islands."""
    chosen = [island for island in policy.islands if random.random() < 0.6]
    standbys = tuple(
        replace(island, island=IslandId(f"{island.island}-standby-{number}"))
        for island in chosen
        for number in range(random.randint(1, 2))
    )
    whom = [island.island for island in (*standbys, *chosen)]
    more = tuple(
        Fault(random.uniform(0.0, until), random.choice(KINDS), random.choice(whom), random.uniform(0.1, silence_max_s))
        for _ in range(random.randint(1, 6) if whom else 0)
    )
    faults = tuple(sorted((*plan.faults, *more), key=lambda fault: (fault.at, fault.island, fault.kind)))
    return replace(policy, standbys=standbys), replace(plan, faults=faults)
