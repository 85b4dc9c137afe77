"""The outer gradient: an average of many islands' displacements.

Both averages known here are linear in the displacements, Δ = Σ a_m Δ_m with Δ_m = Θ − θ_m, and differ only in the
coefficients a_m. So a merge has three parts: the Gram matrix ⟨Δ_i, Δ_j⟩ (the only thing the radial average must know
of the arrays), M coefficients from it, and one weighted sum. ``blocks`` gives the arrays in
blocks that stay in the processor's cache, so that memory is read twice however many islands there are.

Knows nothing of fragments, versions, optimizers or who sent what.

Source: Decoupled DiLoCo, arXiv:2604.21428 (radial-directional averaging; embedding-like tensors by plain mean).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from orchestrator.parameters.roles import Role
from orchestrator.parameters.tensors import Array

DIRECTION_MIN = 1e-2
"""A mean direction shorter than this has vanished. Unit vectors that were merely orthogonal would need 10,000 islands to
get there, and float32 sums know the square of this length to within one per cent, but not of a much smaller one."""

SCRATCH_BYTES = 1024 * 1024
"""All M displacements of one block together: what a second-level cache holds. Where this was measured a quarter of it
made a merge a quarter slower, and four times as much gained a twentieth at best."""


class Averaging(StrEnum):
    """The average of displacements. Values as in the job specification."""

    RADIAL = "radial"
    MEAN = "mean"


def averaging_for(role: Role, chosen: Averaging) -> Averaging:
    """The average for tensors of this role: embedding-like ones take the plain mean whatever was ``chosen``."""
    return Averaging.MEAN if role.embedding else chosen


def coefficients(products: NDArray[np.float64], weights: Sequence[float], averaging: Averaging) -> NDArray[np.float64]:
    """The a_m of Δ = Σ a_m Δ_m.

        products  (M, M) float64: ⟨Δ_i, Δ_j⟩
        weights   (M,) summing to one

        mean     Δ = Σ w_m Δ_m
        radial   Δ = (Σ w_m ‖Δ_m‖) · φ(Σ w_m φ(Δ_m)),   φ(x) = x/‖x‖, φ(0) = 0;   the mean where that direction vanishes

    With c_m = w_m/‖Δ_m‖ the mean direction is d = Σ c_m Δ_m and ‖d‖² = cᵀ G c, so the radial average needs no array but
    the Gram matrix: a_m = c_m · (Σ w_m ‖Δ_m‖)/‖d‖.
    """
    w = np.asarray(weights, np.float64)
    if averaging is Averaging.MEAN or len(w) == 1:  # of one displacement both averages are that displacement
        return w
    norms = np.sqrt(np.diag(products))
    c = np.divide(w, norms, out=np.zeros_like(w), where=norms > 0)  # φ(0) = 0
    direction_norm = np.sqrt(max(0.0, float(c @ products @ c)))
    if direction_norm < DIRECTION_MIN:
        return w
    return np.asarray(c * (float(w @ norms) / direction_norm), np.float64)


def gram(blocks: Iterable[Array], count: int) -> NDArray[np.float64]:
    """Sum of D Dᵀ over (count, n) float32 blocks D: (count, count) float64.

    Within a block a product is a float32 dot product, across blocks they add up in float64. Rows of dot products rather
    than one ``block @ block.T``: for so few and so long rows BLAS spends more on packing than on multiplying (a third
    of the speed at M = 4, the same at M = 16).
    """
    total = np.zeros((count, count), np.float64)
    for block in blocks:
        for row in range(count):
            total[row, row:] += np.vecdot(block[row:], block[row])
    return np.asarray(np.triu(total) + np.triu(total, 1).T, np.float64)


def blocks(displacements: Sequence[Array]) -> Iterator[tuple[slice, Array]]:
    """M displacements in blocks: which elements, and an (M, n) float32 block that is overwritten by the next.

    displacements  M times (N,) float32, Δ_m
    """
    size = displacements[0].size
    width = max(1, SCRATCH_BYTES // (displacements[0].itemsize * len(displacements)))
    scratch = np.empty((len(displacements), min(width, size)), np.float32)
    for start in range(0, size, width):
        where = slice(start, min(start + width, size))
        block = scratch[:, : where.stop - start]
        for row, displacement in zip(block, displacements, strict=True):
            row[:] = displacement[where]
        yield where, block
