"""A long series kept short: every ``stride``-th point, the stride doubled whenever the series grows too long.

Deterministic (no sampling by chance), so a replayed job gives the same curve; bounded, so a job of a month fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

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
