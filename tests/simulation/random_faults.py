"""Faults drawn from a seed."""

from __future__ import annotations

from random import Random

from orchestrator.core.vocabulary import Instant, JobPolicy
from orchestrator.simulation.plan import Fault, FaultKind

SILENCE_MAX_S = 8.0
"""Longest freeze or cut of ``random_faults``."""


def random_faults(seed: int, policy: JobPolicy, until: Instant, count: int) -> tuple[Fault, ...]:
    """``count`` faults before ``until``, of every kind but cancelling.

    Whoever is kept away is re-added once the last silence is over: not before, because an island cannot be re-added
    while the kill that ends its former process has not reached it.
    """
    random = Random(seed)
    kinds = (FaultKind.CRASH, FaultKind.KILL, FaultKind.KILL_AND_KEEP_AWAY, FaultKind.FREEZE, FaultKind.CUT)
    faults = []
    for _ in range(count):
        kind, island = random.choice(kinds), random.choice(policy.islands).island
        at, duration = random.uniform(0.0, until), random.uniform(0.1, SILENCE_MAX_S)
        faults.append(Fault(at, kind, island, duration))
    readds = [Fault(until + SILENCE_MAX_S, FaultKind.READD, plan.island) for plan in policy.islands]
    return tuple(sorted([*faults, *readds], key=lambda fault: (fault.at, fault.island, fault.kind)))
