"""A holding: the part of the pieces that one process has. It receives exactly that part of publications.

   sender     part_of(content) ─▶ the parts of encoded tensors, between their codec's units, each with its bounds
   receiver   own_values, added_to ─▶ the values of its part; digest_of shows that they are the published ones

If a process's part does not end at a codec's units, a little more is sent, and cropped after decoding: values are bit for
bit those of the whole tensor. Processes with the same part receive the same bytes.

Who holds what, and why, is decided in ``learners.shards``. Nothing here knows how bytes travel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.parameters import kernels, parts, tensors, wire_format
from orchestrator.parameters.codec.registry import EXACT
from orchestrator.parameters.parts import Bounds
from orchestrator.parameters.tensors import Array, Tensors
from orchestrator.parameters.wire_format import EncodedTensor, EncodedTensors, InvalidPayload


@dataclass(frozen=True, slots=True)
class Holding:
    """The part of the model that a process has.

    ``parts`` are the pieces that it lacks in part, with the bounds of the rest.
    """

    parts: tuple[tuple[str, Bounds], ...] = ()

    def bounds(self) -> dict[str, Bounds]:
        """Return the bounds of the pieces that the process has only in part."""
        return dict(self.parts)

    def part_of(self, content: EncodedTensors) -> EncodedTensors:
        """Return the part of these whole encoded tensors that a process with this holding needs."""
        if not self.parts:
            return content
        bounds, own = self.bounds(), {}
        for name, tensor in content.tensors.items():
            if name not in bounds:
                own[name] = tensor
            elif not _is_empty(bounds[name]):
                part = parts.between_units(content.codec, bounds[name], tensor.shape)
                data = parts.cut(content.codec, tensor.data, part, tensor.shape)
                own[name] = EncodedTensor(parts.shape_of(part), data, part)
        return EncodedTensors(content.codec, content.base, own)

    def values_of(self, arrays: Tensors) -> dict[str, Array]:
        """Return the part of these whole tensors that a process with this holding has, as views."""
        bounds = self.bounds()
        return {
            name: array[parts.index_of(bounds[name])] if name in bounds else array
            for name, array in arrays.items()
            if name not in bounds or not _is_empty(bounds[name])
        }

    def digest_of(self, arrays: Tensors) -> str:
        """Return the digest of the part of these whole tensors that a process with this holding has."""
        return tensors.digest(self.values_of(arrays))

    def own_values(self, content: EncodedTensors, names: Iterable[str]) -> dict[str, Array]:
        """Return this process's part of the tensors with these names, from whole ones or parts that contain it.

        Raises InvalidPayload if something is missing.
        """
        bounds = self.bounds()
        return {name: _cropped(content, name, bounds.get(name)) for name in _in(content, names)}

    def added_to(self, base: Tensors, content: EncodedTensors) -> dict[str, Array]:
        """Add the update to ``base``, this process's part. Raises InvalidPayload if a part of the update is missing."""
        bounds, added = self.bounds(), {}
        for name in _in(content, base):
            array = base[name]
            if content.tensors[name].part == bounds.get(name) and array.shape == content.tensors[name].shape:
                added[name] = kernels.decode(content.values(name), array).reshape(array.shape)
            else:
                added[name] = array + _cropped(content, name, bounds.get(name))
        return added


EVERYTHING = Holding()


def _in(content: EncodedTensors, names: Iterable[str]) -> list[str]:
    wanted = list(names)
    if missing := [name for name in wanted if name not in content.tensors]:
        raise InvalidPayload(detail=f"The payload lacks {', '.join(missing[:3])}, of which this process has a part.")
    return wanted


def _cropped(content: EncodedTensors, name: str, own: Bounds | None) -> Array:
    """Return the values within ``own`` (None: all) of a received tensor."""
    tensor, values = content.tensors[name], content.decoded(name)
    came = parts.whole(tensor.shape) if tensor.part is None else tensor.part
    if own is None:
        if tensor.part is not None:
            raise InvalidPayload(detail=f"The payload has the part {came} of {name}, but this process has all of it.")
        return values
    if len(own) != len(came) or parts.intersection(own, came) != own:
        raise InvalidPayload(detail=f"The payload has the part {came} of {name}, but this process has {own}.")
    return values[parts.index_of(parts.within(own, came))]


def _is_empty(bounds: Bounds) -> bool:
    return math.prod(parts.shape_of(bounds)) == 0


def encoded_part(values: Tensors, holding: Holding) -> memoryview:
    """Return the payload of these values for a process with this holding, without loss."""
    return wire_format.written(holding.part_of(wire_format.encoded(values, EXACT)))
