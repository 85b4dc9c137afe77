"""Real training over real lines: held-out loss against time. The loss is nano's, in nats per byte.

All methods see the same shards in the same order, from the same initial parameters, with the same schedule. Losses are
measured after the all-reduce methods' runs, on copies; the service measures beside the islands, at the lowest priority.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Curve:
    """``points``: seconds since the first step, and held-out loss."""

    method: str
    megabits: float
    steps: int
    seconds: float
    points: tuple[tuple[float, float], ...]


def time_to(curve: Curve, loss: float) -> float | None:
    """Seconds until the curve first reached ``loss``, between two measurements by a straight line."""
    before: tuple[float, float] | None = None
    for at, value in curve.points:
        if value <= loss:
            if before is None or before[1] == value:
                return at
            share = (before[1] - loss) / (before[1] - value)
            return before[0] + share * (at - before[0])
        before = at, value
    return None
