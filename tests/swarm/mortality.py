"""The deaths of a synchroniser and the faults of its disk, drawn from a seed by a generator of their own.

    a death       at an instant, or at one of the next operations on its disk: before it, after it, or half way
    power loss    loses what was not synced; any other death loses only the process
    a refusal     the disk is full, or its syncs fail, for a few operations

Half of the seeds lose power, half have a disk that refuses, and a quarter sync their merges only from time to time
(durability async). ``tests.swarm.disk`` says what a disk may do.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random

from orchestrator.core.vocabulary import Duration, Instant
from tests.swarm.disk import DiskFault, Operation

OPERATIONS_MAX = 12
"""A death happens within this many operations: two rounds of a small job."""
AWAY_MAX_S = 1.0


@dataclass(frozen=True, slots=True)
class Death:
    """One death. ``operation`` counts from ``at``; 0 is at once. The next life begins ``away_s`` later."""

    at: Instant
    power: bool
    operation: int
    fault: DiskFault
    away_s: Duration


@dataclass(frozen=True, slots=True)
class Refusal:
    """The next ``count`` operations fail."""

    at: Instant
    count: int


@dataclass(frozen=True, slots=True)
class Mortality:
    """All deaths and refusals of one seed. ``merges_max`` is durability's: 0 for sync."""

    deaths: tuple[Death, ...]
    refusals: tuple[Refusal, ...]
    merges_max: int

    @property
    def features(self) -> tuple[str, ...]:
        features = [f"{len(self.deaths)} deaths"]
        features += ["loss of power"] if any(death.power for death in self.deaths) else []
        features += ["refusing disk"] if self.refusals else []
        return (*features, *([f"async {self.merges_max}"] if self.merges_max else []))


class DiskFaults:
    """The faults of the disk operations of one synchroniser after another."""

    def __init__(self) -> None:
        self._death: Death | None = None
        self._operations = self._refusing = 0

    def __call__(self, operation: Operation, _: Path) -> DiskFault | None:
        if self._death is not None:
            self._operations -= 1
            if self._operations == 0:
                torn = operation is not Operation.APPEND and self._death.fault is DiskFault.TORN
                return DiskFault.AFTER if torn else self._death.fault
        if self._refusing:
            self._refusing -= 1
            return DiskFault.ERROR if operation is Operation.SYNC else DiskFault.FULL
        return None

    def arm(self, death: Death) -> bool:
        """Arm a death. Return True if it happens at once."""
        self._death, self._operations = death, death.operation
        return not death.operation

    def refuse(self, refusal: Refusal) -> None:
        self._refusing = refusal.count

    def take_death(self) -> Death:
        """Return the death that was armed, and disarm it for the next synchroniser."""
        death, self._death, self._refusing = self._death, None, 0
        assert death is not None
        return death


def draw_mortality(seed: int, deaths: int, until: Instant) -> Mortality:
    """Draw the deaths and faults of this seed, the same in every build. All begin before ``until``."""
    random = Random(f"atoll swarm {seed} mortality")
    powerless, refusing = random.random() < 0.5, random.random() < 0.5
    merges_max = random.randint(1, 4) if random.random() < 0.25 else 0
    drawn = []
    for _ in range(deaths):
        at, away_s = random.uniform(0.0, until), random.uniform(0.0, AWAY_MAX_S)
        operation = random.choice((0, random.randint(1, OPERATIONS_MAX)))
        fault = random.choice((DiskFault.BEFORE, DiskFault.TORN, DiskFault.AFTER))
        drawn.append(Death(at, powerless and random.random() < 0.5, operation, fault, away_s))
    refusals = [Refusal(random.uniform(0.1, until), random.randint(1, 4)) for _ in range(3 if refusing else 0)]
    return Mortality(tuple(sorted(drawn, key=lambda death: death.at)), tuple(refusals), merges_max)
