"""Histograms: how often a value fell between which bounds, in memory that does not grow.

The shape is Prometheus's (a value belongs to the first bound that is not below it), but counts here are of one bucket
each, not cumulative: whoever exports them adds up.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any


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
