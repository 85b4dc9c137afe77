"""The norms of a fragment's last update: how far it moved Θ, and how much of it the codec owes.

Refuses to know when they are worth computing: they read all of Θ, Θ before it, and the residue once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from orchestrator.core.vocabulary import Version
from orchestrator.parameters.tensors import Array, Tensors

CHUNK = 1 << 14
"""Values at a time: differences stay in a core's nearest caches, and no second Θ is allocated."""


@dataclass(frozen=True, slots=True)
class StepNorms:
    """Of the step to ``version``: ‖Θ' − Θ‖, and ‖residue'‖, what updates so far lost in their codec and still owe."""

    version: Version
    update_norm: float
    residue_norm: float


def norms_of_update(version: Version, before: Tensors, after: Tensors, residue: Tensors) -> StepNorms:
    """``before`` and ``after`` are Θ and Θ' by piece, all finite; ``residue`` is empty where the codec loses nothing."""
    update = math.fsum(_squared_distance(array, after[name]) for name, array in before.items())
    owed = math.fsum(_squared_distance(array, None) for array in residue.values())
    return StepNorms(version, math.sqrt(update), math.sqrt(owed))


def _squared_distance(one: Array, other: Array | None) -> float:
    """‖other − one‖², and ‖one‖² without another. Chunks are summed in float32, and their sums exactly."""
    flat = one.reshape(-1)
    room = np.empty(min(CHUNK, flat.size), np.float32)
    against = None if other is None else other.reshape(-1)
    sums = []
    for first in range(0, flat.size, CHUNK):
        part = flat[first : first + CHUNK]
        if against is not None:
            part = np.subtract(against[first : first + CHUNK], part, out=room[: part.size])
        sums.append(float(np.dot(part, part)))
    return math.fsum(sums)
