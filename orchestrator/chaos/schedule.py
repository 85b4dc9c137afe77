"""The schedule of a plan's faults: everything that chance has a part in, drawn from the plan's seed and nothing else.

    schedule(plan, islands) == schedule(plan, islands)      live and simulated

Each entry draws from streams of its own, one for instants and one for targets. So an entry that is added or changed leaves
the others as they were, and the instants are the same for every fleet. Refuses to know what becomes of a fault.

Source: a Poisson process by its exponential gaps, cut to whole microseconds as everywhere (``simulation.distributions``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from orchestrator.chaos.kinds import ISLANDLESS, describe
from orchestrator.chaos.plan import ChaosPlan, FaultSection, Target
from orchestrator.core.faults import Fault, Kind, flat
from orchestrator.core.vocabulary import Duration, Instant, IslandId, IslandPlan, NodeGroupId
from orchestrator.simulation.distributions import Exponential


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """A fault and when it is due, in seconds since the plan began. ``island`` is empty for a fault of no island.

    ``beside`` are the islands that may die with one node, this one among them. Only the node group of an island is known
    here, so these are all islands of the group, or none if the island is alone in it.
    """

    at: Instant
    fault: Fault
    beside: tuple[IslandId, ...] = ()

    @property
    def kind(self) -> Kind:
        kind: Kind = self.fault.kind
        return kind

    @property
    def island(self) -> IslandId:
        return flat(self.fault).island

    @property
    def duration(self) -> Duration:
        return flat(self.fault).duration

    def description(self) -> str:
        return describe(self.fault, self.island)


def schedule(plan: ChaosPlan, islands: Sequence[IslandPlan]) -> tuple[PlannedFault, ...]:
    """Every fault of the plan, in time order; at one instant in the order of the entries and of the islands."""
    planned = []
    group_of = {island.island: island.node_group for island in islands}
    members: dict[NodeGroupId, list[IslandId]] = defaultdict(list)
    for island in islands:
        members[island.node_group].append(island.island)
    groups = {
        group: tuple(there) if len(there) > 1 else () for group, there in members.items()
    }  # one for all its faults
    for n, entry in enumerate(plan.faults):
        targets = Random(f"{plan.seed}/{n}/target")
        there = _there(entry.target, islands)
        for at in _instants(entry, plan.duration, Random(f"{plan.seed}/{n}/at")):
            for target in _drawn(entry, there, targets):
                beside = groups[group_of[target]] if entry.kind is Kind.KILL_NODE else ()
                planned.append(PlannedFault(at, entry.fault(target), beside))
    return tuple(sorted(planned, key=lambda fault: fault.at))


def _instants(entry: FaultSection, duration: Duration, random: Random) -> Iterator[Instant]:
    if entry.at:
        yield from entry.at
        return
    until = min(duration, duration if entry.until is None else entry.until)
    at, count = entry.start, 0
    while True:
        count += 1
        if entry.poisson is not None:
            at += Exponential(entry.poisson.mtbf).draw(random)
        else:
            at = entry.start + count * (entry.every or duration)
        if at >= until:
            return
        yield at


def _drawn(entry: FaultSection, there: Sequence[IslandId], random: Random) -> Sequence[IslandId]:
    """Return the islands of one fault, in the order of the job."""
    if entry.kind in ISLANDLESS:
        return [IslandId("")]
    if entry.target.random is None:
        return there
    return [there[n] for n in sorted(random.sample(range(len(there)), entry.target.random))]


def _there(target: Target, islands: Sequence[IslandPlan]) -> list[IslandId]:
    """Return the islands that an entry may target, in the order of the job."""
    if target.name is not None:
        return [IslandId(target.name)]
    return [island.island for island in islands if target.region in (None, island.region)]
