"""A second opinion on the merge: the paper's formulas on Python lists of floats, one tensor at a time.

Source: Decoupled DiLoCo, arXiv:2604.21428 (radial-directional averaging); DiLoCo, arXiv:2311.08105, Algorithm 1.
"""

from collections.abc import Sequence
from math import fsum, sqrt

Vector = Sequence[float]


def norm(vector: Vector) -> float:
    return sqrt(fsum(x * x for x in vector))


def unit(vector: Vector) -> list[float]:
    length = norm(vector)
    return [x / length if length else 0.0 for x in vector]


def mean(vectors: Sequence[Vector], weights: Vector) -> list[float]:
    return [fsum(w * x for w, x in zip(weights, column, strict=True)) for column in zip(*vectors, strict=True)]


def mean_direction(vectors: Sequence[Vector], weights: Vector) -> list[float]:
    return mean([unit(vector) for vector in vectors], weights)


def radial(vectors: Sequence[Vector], weights: Vector) -> list[float]:
    """Without the fallback for a vanishing direction."""
    radius = fsum(w * norm(vector) for w, vector in zip(weights, vectors, strict=True))
    return [radius * x for x in unit(mean_direction(vectors, weights))]


def nesterov(
    parameters: Vector, gradient: Vector, momentum: Vector, lr: float, decay: float
) -> tuple[list[float], list[float]]:
    after = [decay * m + g for m, g in zip(momentum, gradient, strict=True)]
    moved = [x - lr * (g + decay * m) for x, g, m in zip(parameters, gradient, after, strict=True)]
    return moved, after
