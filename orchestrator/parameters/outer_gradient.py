"""The outer gradient: an average of many islands' displacements.

Both averages known here are linear in the displacements, Δ = Σ a_m Δ_m with Δ_m = Θ − θ_m, and differ only in the
coefficients a_m. So a merge has three parts: the Gram matrix ⟨Δ_i, Δ_j⟩ (the only thing the radial average must know
of the arrays), M coefficients from it, and one weighted sum. The first and the last are ``kernels``; the second is here.

Knows nothing of fragments, versions, optimizers or who sent what.

Source: Decoupled DiLoCo, arXiv:2604.21428 (radial-directional averaging; embedding-like tensors by plain mean).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from orchestrator.parameters.roles import Role

DIRECTION_MIN = 1e-2
"""A mean direction shorter than this has vanished. Unit vectors that were merely orthogonal would need 10,000 islands to
get there, and float32 sums know the square of this length to within one per cent, but not of a much smaller one."""


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
