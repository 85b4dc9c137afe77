"""Bounded memories of long jobs: a thinned series, a histogram, counts that decay, and the epochs and policy of a fold.

A series keeps every ``stride``-th point and doubles the stride whenever it grows too long. No point is chosen by chance, so
a replayed job gives the same curve. A histogram has Prometheus's shape (a value belongs to the first bound that is not
below it), but each count is of one bucket: an exporter adds them up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from orchestrator.core.commands import Set, settings_applied
from orchestrator.core.effects import Effect, ResolveCommand
from orchestrator.core.events import CommandRequested, Event, SynchroniserRestarted
from orchestrator.core.vocabulary import FIRST_EPOCH, Duration, Epoch, Instant, JobPolicy

Point = TypeVar("Point")
Name = TypeVar("Name", bound=str)
SPREAD_RATIO_MIN = 0.1
NEWEST = 16
"""So many of the newest payloads show what a line is like now."""


class Series(Generic[Point]):
    """``points`` are at most ``length_max``, evenly spaced in the order they were added; ``last`` is always the latest."""

    points: list[Point]
    last: Point | None
    count: int
    _stride: int
    _length_max: int

    def __init__(self, length_max: int = 512) -> None:
        self.points = []
        self.last = None
        self.count = 0
        self._stride = 1
        self._length_max = length_max

    def add(self, point: Point) -> None:
        if self.count % self._stride == 0:
            self.points.append(point)
        self.count += 1
        self.last = point
        if len(self.points) >= self._length_max:
            self.points = self.points[::2]
            self._stride *= 2

    def all(self) -> list[Point]:
        """The kept points, closed by the latest one."""
        if self.last is None or (self.count - 1) % self._stride == 0:
            return list(self.points)
        return [*self.points, self.last]


class Travels:
    """The times that payloads travelled are kept as points of all, and the newest: a line may have become thin of late."""

    all: Series[Duration]
    newest: deque[Duration]

    def __init__(self) -> None:
        self.all, self.newest = Series(256), deque(maxlen=NEWEST)

    def add(self, took: Duration) -> None:
        self.all.add(took)
        self.newest.append(took)


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the middle two; of at least one value."""
    ordered, middle = sorted(values), len(values) // 2
    return ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def distances(values: Mapping[Name, float], spread_min: float = 0.0) -> dict[Name, float]:
    """Return how many spreads each value is above the median of the others. Empty for fewer than two values.

    The spread is the median absolute deviation of the others times 1.4826 (a normal distribution's standard deviation),
    and at least ``spread_min`` and a tenth of their median.
    """
    result = {}
    for name, value in values.items():
        others = [other for one, other in values.items() if one != name]
        if not others:
            continue
        middle = median(others)
        spread = max(1.4826 * median([abs(other - middle) for other in others]), SPREAD_RATIO_MIN * middle, spread_min)
        result[name] = (value - middle) / spread if spread > 0.0 else 0.0
    return result


class Histogram:
    """``counts[i]`` observations up to ``bounds[i]`` and above the bound before; the last count is beyond all bounds."""

    _bounds: tuple[float, ...]
    _counts: list[int]
    _sum: float

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def summary(self) -> dict[str, Any]:
        return {"bounds": list(self._bounds), "counts": list(self._counts), "sum": self._sum}


class DecayingCounts:
    """Counts by name in which an event is worth 1 when it happens, and half after each ``half_life_s``."""

    def __init__(self, half_life_s: Duration) -> None:
        self._half_life_s = half_life_s
        self._counts: dict[str, tuple[float, Instant]] = {}

    def add(self, name: str, at: Instant) -> None:
        self._counts[name] = (self.count(name, at) + 1.0, at)

    def count(self, name: str, at: Instant) -> float:
        count, since = self._counts.get(name, (0.0, at))
        return count * float(0.5 ** (max(0.0, at - since) / self._half_life_s))

    def all(self, at: Instant) -> dict[str, float]:
        """Return the counts of all names, the highest first."""
        return dict(sorted(((n, self.count(n, at)) for n in self._counts), key=lambda item: (-item[1], item[0])))


class Epochs:
    """The epochs that a fold has seen."""

    _latest: Epoch

    def __init__(self) -> None:
        self._latest = FIRST_EPOCH

    def begins(self, event: Event) -> bool:
        """Return whether a new epoch begins with this event. Call it once for each event, in order."""
        if not isinstance(event, SynchroniserRestarted) or event.epoch <= self._latest:
            return False
        self._latest = event.epoch
        return True


def policy_after(policy: JobPolicy, event: Event, effects: tuple[Effect, ...]) -> JobPolicy:
    """Return the policy after this step: another one if an operator changed settings in it, else the same object."""
    if not isinstance(event, CommandRequested) or not isinstance(event.request, Set):
        return policy
    accepted = any(isinstance(effect, ResolveCommand) and effect.accepted for effect in effects)
    return settings_applied(policy, event.request) if accepted else policy
