"""Validation of payloads: which may enter a merge, and how far they are from Θ.

    too many bytes ▸ sizes and checksum ▸ names and shapes ▸ every value a number ▸ the update norm

Responsible for facts, which the shard hands on. Refuses to decide how far is too far (``core.health``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from orchestrator.core.vocabulary import RefusalReason, Version
from orchestrator.parameters import wire_format
from orchestrator.parameters.displacement import displacement
from orchestrator.parameters.outer_gradient import blocks
from orchestrator.parameters.tensors import Array, Tensors, shapes
from orchestrator.parameters.wire_format import EncodedTensors, InvalidPayload

MAGNITUDE_MAX = 1e15
"""A parameter, or a displacement, beyond this has diverged, and is refused like an infinity: the merge squares displacements
and sums them in float32, which ends at 3.4e38."""
HEADER_BYTES_MAX = 1 << 20
"""More than any header of a fragment; so much may a payload have besides its values, which no codec makes larger than
float32, before it is looked at."""


def validated(payload: bytes | memoryview, anchor: Tensors, version: Version) -> tuple[EncodedTensors, float]:
    """The displacement that these bytes are, of a contribution to the fragment ``anchor``, Θ_p at ``version``, and its norm.

    What came as a difference stays in its codec; values become a float32 difference from ``anchor``.

    Raises InvalidPayload, with the reason for a refusal, where these bytes may not enter a merge.
    """
    expected = sum(array.nbytes for array in anchor.values())
    if len(payload) > expected + HEADER_BYTES_MAX:
        raise InvalidPayload(detail=f"{len(payload)} bytes came for a fragment of {expected}.")
    content = wire_format.parse(payload)
    if (problem := check_shapes(content.shapes(), shapes(anchor))) is not None:
        raise InvalidPayload(detail=problem, reason=RefusalReason.WRONG_SHAPE)
    if content.base is None:
        values = content.all_decoded()
        _require_numbers(values)
        content = displacement(anchor, values, version)
    squares = []
    for name in content.tensors:
        values = {name: content.decoded(name)}
        _require_numbers(values)
        squares.append(squared_norm(values[name]))
    return content, math.sqrt(math.fsum(squares))


def check_shapes(actual: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> str | None:
    """The reason why tensors of these shapes are not the fragment's; None where they are."""
    if missing := sorted(wanted.keys() - actual.keys()):
        return f"The tensors {', '.join(missing)} are missing."
    if unknown := sorted(actual.keys() - wanted.keys()):
        return f"The tensors {', '.join(unknown)} are not of this fragment."
    for name, shape in wanted.items():
        if actual[name] != tuple(shape):
            return f"{name} has the shape {list(actual[name])}; in this fragment it has {list(shape)}."
    return None


def check_numbers(tensors: Tensors) -> str | None:
    """The reason why these values may not enter a merge; None where they may."""
    for name, array in tensors.items():
        lowest, highest = float(array.min(initial=0.0)), float(array.max(initial=0.0))
        if not (lowest >= -MAGNITUDE_MAX and highest <= MAGNITUDE_MAX):  # written so that NaN fails it
            return f"{name} holds values from {lowest} to {highest}."
    return None


def squared_norm(array: Array) -> float:
    """‖array‖²: float32 within a block, float64 across blocks."""
    return math.fsum(float(np.vdot(block, block)) for _, block in blocks([array.reshape(-1)]))


def _require_numbers(tensors: Tensors) -> None:
    if (problem := check_numbers(tensors)) is not None:
        raise InvalidPayload(detail=problem, reason=RefusalReason.NON_FINITE)
