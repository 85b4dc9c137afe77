"""A holding: what of the pieces one process has, so that of what is published it is sent that and no more.

    sender     part_of(content) ─▶ the parts of encoded tensors, between their codec's units, each with its bounds
    receiver   own_values, added_to ─▶ the values of what it has; digest_of shows that they are the published ones

Where a codec's units do not end where a process's part does, a little more is sent, and cropped after it is decoded: values
are bit for bit those of the whole tensor. Processes that have the same are sent the same bytes.

Refuses to know who has what and why (``learners.shards``), and how bytes travel.
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
    """``parts`` are the pieces of which not all is there, by name, each with the bounds of what is: perhaps nothing."""

    parts: tuple[tuple[str, Bounds], ...] = ()

    def bounds(self) -> dict[str, Bounds]:
        """Of the pieces of which not all is there."""
        return dict(self.parts)

    def part_of(self, content: EncodedTensors) -> EncodedTensors:
        """What somebody with this holding needs of these whole tensors, in their codec."""
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
        """What somebody with this holding has of these whole tensors: views."""
        bounds = self.bounds()
        return {
            name: array[parts.index_of(bounds[name])] if name in bounds else array
            for name, array in arrays.items()
            if name not in bounds or not _is_empty(bounds[name])
        }

    def digest_of(self, arrays: Tensors) -> str:
        """The name of what somebody with this holding has of these whole tensors, bit for bit."""
        return tensors.digest(self.values_of(arrays))

    def own_values(self, content: EncodedTensors, names: Iterable[str]) -> dict[str, Array]:
        """What is here of the tensors with these names, from whole ones or parts that contain it.

        Raises InvalidPayload where something is missing.
        """
        bounds = self.bounds()
        return {name: _cropped(content, name, bounds.get(name)) for name in _in(content, names)}

    def added_to(self, base: Tensors, content: EncodedTensors) -> dict[str, Array]:
        """``base``, which is what is here, with this update of it added. Raises InvalidPayload where some is missing."""
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
        raise InvalidPayload(detail=f"Nothing came of {', '.join(missing[:3])}, of which this process has a part.")
    return wanted


def _cropped(content: EncodedTensors, name: str, own: Bounds | None) -> Array:
    """The values within ``own``, None for all, of what came of a tensor."""
    tensor, values = content.tensors[name], content.decoded(name)
    came = parts.whole(tensor.shape) if tensor.part is None else tensor.part
    if own is None:
        if tensor.part is not None:
            raise InvalidPayload(detail=f"The part {came} came of {name}, of which this process has all.")
        return values
    if len(own) != len(came) or parts.intersection(own, came) != own:
        raise InvalidPayload(detail=f"The part {came} came of {name}, of which this process has {own}.")
    return values[parts.index_of(parts.within(own, came))]


def _is_empty(bounds: Bounds) -> bool:
    return math.prod(parts.shape_of(bounds)) == 0


def encoded_part(values: Tensors, holding: Holding) -> memoryview:
    """What somebody with this holding is sent of these values, exactly."""
    return wire_format.written(holding.part_of(wire_format.encoded(values, EXACT)))
