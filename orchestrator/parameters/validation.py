"""Validation of payloads: which may enter a merge, and how far they are from Θ.

    too many bytes ▸ sizes and checksum ▸ names and shapes ▸ every value a number ▸ the update norm

Responsible for facts, which the shard hands on. Refuses to decide how far is too far (``core.health``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from orchestrator.core.vocabulary import RefusalReason
from orchestrator.parameters import wire_format
from orchestrator.parameters.outer_gradient import displacements
from orchestrator.parameters.tensors import Array, Tensors, shapes
from orchestrator.parameters.wire_format import InvalidPayload

MAGNITUDE_MAX = 1e15
"""A parameter beyond this has diverged, and is refused like an infinity: the merge squares displacements and sums them in
float32, which ends at 3.4e38."""
HEADER_BYTES_MAX = 1 << 20
"""More than any header of a fragment; so much may a payload have besides its values, which no codec makes larger than
float32, before it is looked at."""


def validated(payload: bytes, anchor: Tensors) -> tuple[dict[str, Array], float]:
    """The tensors of a contribution to the fragment ``anchor``, Θ_p, and ‖Θ_p − θ‖ over all of it.

    Raises InvalidPayload, with the reason for a refusal, where these bytes may not enter a merge.
    """
    expected = sum(array.nbytes for array in anchor.values())
    if len(payload) > expected + HEADER_BYTES_MAX:
        raise InvalidPayload(detail=f"{len(payload)} bytes came for a fragment of {expected}.")
    tensors = wire_format.decode(payload)
    if (problem := check(tensors, shapes(anchor))) is not None:
        reason, detail = problem
        raise InvalidPayload(detail=detail, reason=reason)
    return tensors, update_norm(anchor, tensors)


def check(tensors: Tensors, wanted: Mapping[str, tuple[int, ...]]) -> tuple[RefusalReason, str] | None:
    """Why these tensors may not enter a merge of tensors of the ``wanted`` shapes, or ``None`` if they may."""
    if missing := sorted(wanted.keys() - tensors.keys()):
        return RefusalReason.WRONG_SHAPE, f"The tensors {', '.join(missing)} are missing."
    if unknown := sorted(tensors.keys() - wanted.keys()):
        return RefusalReason.WRONG_SHAPE, f"The tensors {', '.join(unknown)} are not of this fragment."
    for name, shape in wanted.items():
        array = tensors[name]
        if array.shape != tuple(shape) or array.dtype != np.float32:
            actual = f"{array.dtype}{list(array.shape)}"
            return RefusalReason.WRONG_SHAPE, f"{name} is {actual}; this fragment has float32{list(shape)}."
    for name in wanted:
        lowest, highest = float(tensors[name].min(initial=0.0)), float(tensors[name].max(initial=0.0))
        if not (lowest >= -MAGNITUDE_MAX and highest <= MAGNITUDE_MAX):  # written so that NaN fails it
            return RefusalReason.NON_FINITE, f"{name} holds values from {lowest} to {highest}."
    return None


def update_norm(anchor: Tensors, tensors: Tensors) -> float:
    """‖Θ_p − θ‖, Euclidean, over all tensors of the fragment: float32 within a block, float64 across blocks."""
    squares = [
        float(np.vdot(block, block))
        for name, array in anchor.items()
        for _, block in displacements(array.reshape(-1), [tensors[name].reshape(-1)])
    ]
    return math.sqrt(math.fsum(squares))
