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

from orchestrator.chaos.kinds import ISLANDLESS, Kind, describe
from orchestrator.chaos.plan import ChaosPlan, FaultSection, Target
from orchestrator.core.vocabulary import Duration, FaultSpec, Instant, IslandId, IslandPlan, NodeGroupId
from orchestrator.simulation.distributions import Exponential


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """``at`` is in seconds since the plan began. ``island`` is empty where the kind strikes none.

    ``beside`` are the islands that may die by one node, this one among them: those of its node group, which is all that is
    known here. Empty where it is alone there.
    """

    at: Instant
    kind: Kind
    island: IslandId
    duration: Duration = 0.0
    bytes_per_second: float = 0.0
    payloads: int = 0
    beside: tuple[IslandId, ...] = ()
    host: int | None = None

    @property
    def dose(self) -> FaultSpec:
        return FaultSpec(self.duration, self.bytes_per_second, self.payloads, self.host)

    def description(self) -> str:
        return describe(self.kind, self.island, self.dose)


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
            for struck in _struck(entry, there, targets):
                beside = groups[group_of[struck]] if entry.kind is Kind.KILL_NODE else ()
                planned.append(_planned(at, entry, struck, beside))
    return tuple(sorted(planned, key=lambda fault: fault.at))


def _planned(at: Instant, entry: FaultSection, island: IslandId, beside: tuple[IslandId, ...]) -> PlannedFault:
    dose = entry.dose
    numbers = (dose.duration, dose.bytes_per_second, dose.payloads)
    return PlannedFault(at, entry.kind, island, *numbers, beside, dose.host)


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


def _struck(entry: FaultSection, there: Sequence[IslandId], random: Random) -> Sequence[IslandId]:
    """The islands of one fault, in the order of the job."""
    if entry.kind in ISLANDLESS:
        return [IslandId("")]
    if entry.target.random is None:
        return there
    return [there[n] for n in sorted(random.sample(range(len(there)), entry.target.random))]


def _there(target: Target, islands: Sequence[IslandPlan]) -> list[IslandId]:
    """The islands that a fault may strike, in the order of the job."""
    if target.name is not None:
        return [IslandId(target.name)]
    return [island.island for island in islands if target.region in (None, island.region)]
