"""The queue's decision: which queued jobs start now, and why the others wait. Pure: jobs and node groups in, a decision out.

The order is strict: higher priority first, then first come, first served. No job overtakes another: the first job that does
not fit blocks all behind it, even those that would fit, so that small jobs never starve a large one.

A job fits while fewer than ``jobs_max`` jobs run and every node group that it names has, beyond what the running jobs want
there, what its islands ask for. What jobs want counts, not what happens to be free, because a lost island comes back. A
group counts as a whole, cordoned or not. Whether a single node has room for an island turns out when it is placed; until
there is room, the island waits in its job.

Source: Slurm's builtin scheduler (strict priority order, no backfill).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.specification.sections import IslandsSection
from orchestrator.status import NodeGroupRecord

UNNOTICED = 1e-6
"""CPUs are fractions, whose sums are rounded."""


@dataclass(frozen=True, slots=True)
class Resources:
    """CPUs and accelerators: what islands ask for, or what a node group has."""

    cpus: float = 0.0
    accelerators: float = 0

    def plus(self, more: Resources) -> Resources:
        return Resources(self.cpus + more.cpus, self.accelerators + more.accelerators)

    def minus(self, less: Resources) -> Resources:
        return Resources(self.cpus - less.cpus, self.accelerators - less.accelerators)

    def lacks(self, wanted: Resources) -> str | None:
        """Return the first kind of resource of which there is less than wanted, or None."""
        if wanted.cpus > self.cpus + UNNOTICED:
            return "cpus"
        return "accelerators" if wanted.accelerators > self.accelerators else None


Wants = Mapping[str, Resources]
"""The resources that a job asks for, by node group."""


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """``number`` rises with the order in which jobs came."""

    job: str
    priority: int
    number: int
    wants: Wants


@dataclass(frozen=True, slots=True)
class Decision:
    """``waits``: the reason for each waiting job, in order. ``unschedulable``: the first needs more than the fleet has."""

    starts: tuple[str, ...]
    waits: Mapping[str, str]
    unschedulable: bool


NOTHING_QUEUED = Decision((), {}, unschedulable=False)


def decide(
    queued: Iterable[QueuedJob], running: Sequence[Wants], groups: Iterable[NodeGroupRecord], jobs_max: int
) -> Decision:
    """Return which jobs start now, given what the running jobs want."""
    fleet = {group["name"]: Resources(group["cpus"], group["accelerators"]) for group in groups if group["nodes"]}
    free = dict(fleet)
    for wants in running:
        free = _without(free, wants)
    starts: list[str] = []
    waits: dict[str, str] = {}
    unschedulable = False
    for job in sorted(queued, key=lambda job: (-job.priority, job.number)):
        if waits:
            first, why = next(iter(waits.items()))
            waits[job.job] = behind(first, why)
        elif missing := _missing(fleet, job.wants):
            waits[job.job], unschedulable = missing, True
        elif lacks := _too_little(free, fleet, job.wants):
            waits[job.job] = lacks
        elif len(running) + len(starts) >= jobs_max:
            waits[job.job] = f"{jobs_max} jobs are running, the limit of the service"
        else:
            starts.append(job.job)
            free = _without(free, job.wants)
    return Decision(tuple(starts), waits, unschedulable)


def behind(first: str, why: str) -> str:
    """Return the reason why a job behind the first one waits."""
    return f"behind {first}: {why}"


def wants_of(sections: Iterable[IslandsSection]) -> Wants:
    """Return the resources of one island for each of these sections, by node group. A section may occur several times."""
    wants: dict[str, Resources] = defaultdict(Resources)
    for section in sections:
        wants[section.node_group] = wants[section.node_group].plus(Resources(section.cpus, section.accelerators))
    return dict(wants)


def _without(free: Mapping[str, Resources], wants: Wants) -> dict[str, Resources]:
    return {name: resources.minus(wants.get(name, Resources())) for name, resources in free.items()}


def _missing(fleet: Mapping[str, Resources], wants: Wants) -> str | None:
    """Return what the whole fleet lacks, however many jobs end, because nodes were lost since the submission."""
    for name, wanted in sorted(wants.items()):
        if name not in fleet:
            return f"node group {name} has no nodes"
        if kind := fleet[name].lacks(wanted):
            needed, has = getattr(wanted, kind), getattr(fleet[name], kind)
            return f"it asks for {needed:g} {kind} on {name}, which now has {has:g} in total"
    return None


def _too_little(free: Mapping[str, Resources], fleet: Mapping[str, Resources], wants: Wants) -> str | None:
    """Return what running jobs currently leave too little of."""
    for name, wanted in sorted(wants.items()):
        if kind := free[name].lacks(wanted):
            needed, left, has = (getattr(resources, kind) for resources in (wanted, free[name], fleet[name]))
            return f"it asks for {needed:g} {kind} on {name}, where running jobs leave {max(0, left):g} of {has:g}"
    return None
