"""What a payload is worth to a merge: its arrays, and how far they are from Θ; or why it is worth nothing.

    too many bytes ▸ sizes and checksum ▸ names and shapes ▸ every value a number ▸ the displacement

Responsible for facts, which whoever holds the link tells the core. Refuses to decide how far is too far (``core.health``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from orchestrator.core.vocabulary import RefusalReason
from orchestrator.merge import wire
from orchestrator.merge.outer_gradient import Array, displacements

HEADER_BYTES_MAX = 1 << 20
"""More than any header of a fragment; so much may a payload have besides its float32 values before it is looked at."""


def examine(payload: bytes, anchor: Mapping[str, Array]) -> tuple[dict[str, Array], float]:
    """The arrays of a contribution to the fragment ``anchor``, Θ_p, and ‖Θ_p − θ‖ over all of it.

    Raises WireError, with the reason for a refusal, where these bytes may not enter a merge.
    """
    expected = sum(array.nbytes for array in anchor.values())
    if len(payload) > expected + HEADER_BYTES_MAX:
        raise wire.WireError(detail=f"{len(payload)} bytes came for a fragment of {expected}.")
    arrays = wire.decode(payload)
    if (problem := wire.check(arrays, {name: array.shape for name, array in anchor.items()})) is not None:
        reason, detail = problem
        raise wire.WireError(detail=detail, reason=RefusalReason(reason))
    return arrays, displacement(anchor, arrays)


def displacement(anchor: Mapping[str, Array], arrays: Mapping[str, Array]) -> float:
    """‖Θ_p − θ‖, Euclidean, over all tensors of the fragment: float32 within a block, float64 across blocks."""
    squares = [
        float(np.vdot(block, block))
        for name, array in anchor.items()
        for _, block in displacements(array.reshape(-1), [arrays[name].reshape(-1)])
    ]
    return math.sqrt(math.fsum(squares))
