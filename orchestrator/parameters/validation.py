"""Validation of payloads: which may enter a merge, and how far they are from Θ.

   too many bytes ▸ sizes ▸ names and shapes ▸ in one pass: the checksum, every value a number, the update norm

A wrong checksum is reported before anything else that is wrong. The result is facts; ``core.fragment_round`` decides how far
is too far.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from orchestrator.core.vocabulary import RefusalReason, Version
from orchestrator.parameters import kernels, parts, wire_format
from orchestrator.parameters.codec.registry import EXACT
from orchestrator.parameters.parts import Bounds
from orchestrator.parameters.tensors import Tensors, shapes
from orchestrator.parameters.wire_format import EncodedTensor, EncodedTensors, InvalidPayload, displacement, encoded

MAGNITUDE_MAX = 1e15
"""Parameters and displacements beyond this have diverged, and are refused like infinities: the merge sums squares of
displacements in float32, which ends at 3.4e38."""
HEADER_BYTES_MAX = 1 << 20
"""More than the header of any fragment. A payload may have this many bytes besides its values, which no codec makes larger
than float32."""


def validated(payload: bytes | memoryview, anchor: Tensors, version: Version) -> tuple[EncodedTensors, float]:
    """Return the displacement in these bytes, of a contribution to the fragment ``anchor``, Θ_p at ``version``; and its
    norm.

    A difference stays in its codec; values become a float32 difference from ``anchor``.

    Raises InvalidPayload, with the reason for a refusal, if these bytes may not enter a merge.
    """
    expected = sum(array.nbytes for array in anchor.values())
    if len(payload) > expected + HEADER_BYTES_MAX:
        raise InvalidPayload(detail=f"{len(payload)} bytes arrived for a fragment of {expected}.")
    try:
        content, checksum = wire_format.unverified(payload)
        if (problem := check_shapes(content.shapes(), shapes(anchor))) is not None:
            raise InvalidPayload(detail=problem, reason=RefusalReason.WRONG_SHAPE)
        square_norm, checksum = _examined(content, checksum)
    except InvalidPayload:
        wire_format.verify(payload)  # report damage before blaming the content
        raise
    wire_format.require_checksum(payload, checksum)
    if content.base is None:
        content = displacement(anchor, content.all_decoded(), version)
        square_norm, _ = _examined(content)
    return content, math.sqrt(square_norm)


def validated_parts(
    payloads: Sequence[bytes | memoryview], anchor: Tensors, version: Version
) -> tuple[EncodedTensors, float]:
    """Do the same as ``validated`` for a contribution of several payloads, each with parts of the fragment's tensors.

    Together they must be each of its tensors once. Parts between a codec's units are joined as they are, and stay in
    their codec; others are joined as values. Raises as ``validated``.
    """
    expected = sum(array.nbytes for array in anchor.values())
    if sum(map(len, payloads)) > expected + HEADER_BYTES_MAX * len(payloads):
        raise InvalidPayload(detail=f"{sum(map(len, payloads))} bytes arrived for a fragment of {expected}.")
    if len(payloads) == 1:
        return validated(payloads[0], anchor, version)
    contents = [content for payload in payloads if (content := wire_format.parse(payload)).tensors]
    content = contents[0] if len(contents) == 1 and not _has_parts(contents[0]) else _put_together(contents, anchor)
    if (problem := check_shapes(content.shapes(), shapes(anchor))) is not None:
        raise InvalidPayload(detail=problem, reason=RefusalReason.WRONG_SHAPE)
    if content.base is None:
        _examined(content)
        content = displacement(anchor, content.all_decoded(), version)
    square_norm, _ = _examined(content)
    return content, math.sqrt(square_norm)


def _has_parts(content: EncodedTensors) -> bool:
    return any(tensor.part is not None for tensor in content.tensors.values())


def _put_together(contents: Sequence[EncodedTensors], anchor: Tensors) -> EncodedTensors:
    """Join every tensor of ``anchor`` from its parts, in their codec if possible, else in float32."""
    if len({(content.codec, content.base) for content in contents}) != 1:
        raise InvalidPayload(detail="The payloads of one contribution differ in their codec or base.")
    codec_name, base = contents[0].codec, contents[0].base
    by_name: dict[str, list[tuple[Bounds, EncodedTensor, EncodedTensors]]] = {name: [] for name in anchor}
    for content in contents:
        for name, tensor in content.tensors.items():
            if name not in anchor:
                raise InvalidPayload(
                    detail=f"The tensors {name} are not of this fragment.", reason=RefusalReason.WRONG_SHAPE
                )
            by_name[name].append((parts.whole(tensor.shape) if tensor.part is None else tensor.part, tensor, content))
    for name, own in by_name.items():
        if not parts.tiles([bounds for bounds, _, _ in own], anchor[name].shape):
            raise InvalidPayload(
                detail=f"The parts of {name} that arrived, {[bounds for bounds, _, _ in own]}, are not all of it once.",
                reason=RefusalReason.WRONG_SHAPE,
            )
    coded = {
        name: parts.joined(codec_name, [(bounds, tensor.data) for bounds, tensor, _ in own], anchor[name].shape)
        for name, own in by_name.items()
    }
    if all(data is not None for data in coded.values()):
        whole = {name: EncodedTensor(anchor[name].shape, data) for name, data in coded.items() if data is not None}
        return EncodedTensors(codec_name, base, whole)
    values = {
        name: parts.assembled([(bounds, content.decoded(name)) for bounds, _, content in own], anchor[name].shape)
        for name, own in by_name.items()
    }
    return encoded(values, EXACT, base)


def check_shapes(actual: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> str | None:
    """Return why tensors of these shapes are not the fragment's; None if they are."""
    if missing := sorted(wanted.keys() - actual.keys()):
        return f"The tensors {', '.join(missing)} are missing."
    if unknown := sorted(actual.keys() - wanted.keys()):
        return f"The tensors {', '.join(unknown)} are not of this fragment."
    for name, shape in wanted.items():
        if actual[name] != tuple(shape):
            return f"{name} has the shape {list(actual[name])}, but {list(shape)} in this fragment."
    return None


def check_numbers(tensors: Tensors) -> str | None:
    """Return why these values may not enter a merge; None if they may."""
    for name, values in encoded(tensors, EXACT).named_values():
        if (problem := check_magnitude(name, kernels.examine(values).largest)) is not None:
            return problem
    return None


def check_magnitude(name: str, largest: float) -> str | None:
    """Return why values of this largest magnitude may not enter a merge; None if they may."""
    if largest <= MAGNITUDE_MAX:  # false for NaN
        return None
    if math.isfinite(largest):
        return f"{name} contains {largest:.3g}, and beyond {MAGNITUDE_MAX:.0e} training has diverged"
    return f"{name} contains {'an infinite value' if math.isinf(largest) else 'a value that is not a number'}"


def _examined(content: EncodedTensors, checksum: int = 0) -> tuple[float, int]:
    """Return the sum of squares of all values, and the checksum continued over their data, in one pass.

    Raises InvalidPayload if a value is not a number, or too large.
    """
    squares = []
    for name, values in content.named_values():
        largest, square_norm, after = kernels.examine(values, checksum)
        if (problem := check_magnitude(name, largest)) is not None:
            raise InvalidPayload(detail=problem, reason=RefusalReason.NON_FINITE)
        squares.append(square_norm)
        checksum = checksum if after is None else after
    return math.fsum(squares), checksum
