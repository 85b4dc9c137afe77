"""Bounded memories of long jobs: a thinned series, a histogram, and the epochs and the policy that a fold has seen.

A series keeps every ``stride``-th point and doubles the stride whenever it grows too long. No point is chosen by chance, so
a replayed job gives the same curve. A histogram has Prometheus's shape (a value belongs to the first bound that is not
below it), but each count is of one bucket: an exporter adds them up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from orchestrator.core.commands import Set, settings_applied
from orchestrator.core.effects import Effect, ResolveCommand
from orchestrator.core.events import CommandRequested, Event, SynchroniserRestarted
from orchestrator.core.vocabulary import FIRST_EPOCH, Epoch, JobPolicy

Point = TypeVar("Point")


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


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the middle two; of at least one value."""
    ordered, middle = sorted(values), len(values) // 2
    return ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


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
