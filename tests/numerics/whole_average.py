"""The two averages of whole displacements, as one plain statement; ``outer_state`` does the same by kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from orchestrator.parameters.outer_state import Averaging, coefficients
from orchestrator.parameters.tensors import Array


def average(deltas: Sequence[Array], weights: Sequence[float], averaging: Averaging) -> Array:
    """Merge whole displacements of one tensor.

    deltas   M arrays of one shape, float32: Δ_m = Θ − θ_m, pointing away from the islands
    weights  M positive numbers that sum to one

    mean     Δ = Σ w_m Δ_m
    radial   Δ = (Σ w_m ‖Δ_m‖) · φ(Σ w_m φ(Δ_m)),   φ(x) = x/‖x‖, φ(0) = 0;   the mean where that direction vanishes
    """
    stacked = np.stack([np.ravel(delta) for delta in deltas])
    exact = stacked.astype(np.float64)
    mixed = coefficients(exact @ exact.T, weights, averaging).astype(np.float32) @ stacked
    return mixed.reshape(np.shape(deltas[0]))
