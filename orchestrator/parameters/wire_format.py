"""The wire format: a fragment's tensors as bytes, as they travel between an island and the synchroniser and are journalled.

   magic       8 bytes   "atollw2\\n"
   sizes       12 bytes  little-endian: header bytes (u32), data bytes (u64)
   header      JSON: {"codec": …, "base": …, "tensors": [[name, shape], …]}, padded with spaces so that the data is aligned.
               For a part of a tensor, [name, shape, [[start, stop], …]]: its own shape, and its bounds along every axis
   data        the tensors one after another, each as its codec writes it (``codec``)
   checksum    4 bytes   CRC-32C of everything before it

Nothing is used before the sizes agree with the length and the checksum with the bytes: a flipped bit, a missing end or
additional bytes are refused. CRC-32C detects every burst of up to 32 bits, and processors have an instruction for it. It
guards against accidents; the transport guards against forgers.

``base`` is the version from which the tensors are a difference, null if they are values. An island sends a displacement from
the version that it has adopted, Δ = Θ_base − θ, or its parameters if it does not hold that version. The synchroniser sends
Θ − Θ_base. A merge reads Δ from the fragment's current version.

Decoded arrays are read-only, and may be views of the payload, which then lives as long as they do. Whether they are the
expected arrays is checked in ``validation``.

Nothing here knows of fragments and transports. Source: ours; the sign of Δ is that of the outer gradient in Decoupled
DiLoCo, arXiv:2604.21428.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from crc32c import crc32c

from orchestrator.core.vocabulary import RefusalReason, Version
from orchestrator.errors import DataError
from orchestrator.parameters import kernels
from orchestrator.parameters.codec.registry import CODEC_NAMES, EXACT, CodecName, codec
from orchestrator.parameters.kernels import Encoded
from orchestrator.parameters.parts import Bounds, shape_of
from orchestrator.parameters.tensors import Array, Tensors, raw_bytes

_MAGIC = b"atollw2\n"
_PREFIX = struct.Struct("<8sIQ")
_CHECKSUM = struct.Struct("<I")
PREFIX_BYTES = _PREFIX.size
_ALIGNMENT_BYTES = 64


@dataclass(eq=False, kw_only=True)
class InvalidPayload(DataError):
    """These bytes are not a payload as it was sent. ``reason`` is the reason for refusing the contribution."""

    reason: RefusalReason = RefusalReason.CORRUPT


@dataclass(frozen=True, slots=True)
class EncodedTensor:
    """A tensor in a codec: its shape, and its values as bytes. ``part`` is the part of a tensor that it is; None: all."""

    shape: tuple[int, ...]
    data: memoryview
    part: Bounds | None = None

    @property
    def value_count(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class EncodedTensors:
    """Tensors in a codec, by name. ``base`` is the version from which they are a difference; None: they are values.

    ``payload`` is the payload of which they are views, if they came in one.
    """

    codec: CodecName
    base: Version | None
    tensors: Mapping[str, EncodedTensor]
    payload: memoryview | None = field(default=None, compare=False, repr=False)

    @property
    def value_bytes(self) -> int:
        return sum(tensor.data.nbytes for tensor in self.tensors.values())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def values(self, name: str) -> Encoded:
        """Return the encoded values of one tensor, for a kernel."""
        tensor = self.tensors[name]
        return Encoded(self.codec, tensor.data, tensor.value_count)

    def named_values(self) -> Iterator[tuple[str, Encoded]]:
        return ((name, self.values(name)) for name in self.tensors)

    def decoded(self, name: str) -> Array:
        """Return the values of one tensor, float32, read-only. Raises InvalidPayload for an impossible shape."""
        tensor = self.tensors[name]
        if self.codec == EXACT:  # a view of the bytes
            values = codec(EXACT).decode(tensor.data, tensor.value_count)
        else:
            values = kernels.decode(self.values(name))
        values.flags.writeable = False
        try:
            return values.reshape(tensor.shape)
        except ValueError as error:  # no elements, but larger extents than an array can have
            raise InvalidPayload(detail=f"{name} has an impossible shape: {error}") from error

    def added_to(self, base: Tensors) -> dict[str, Array]:
        """Return ``base`` with these values added: the result, if they are an update of it."""
        return {name: kernels.decode(self.values(name), array).reshape(array.shape) for name, array in base.items()}

    def all_decoded(self) -> dict[str, Array]:
        """Return every tensor's values, in the order in which they were written."""
        return {name: self.decoded(name) for name in self.tensors}


@dataclass(frozen=True, slots=True)
class Place:
    """One tensor, or part of one, in a payload: its ``size`` bytes begin at ``start``."""

    name: str
    shape: tuple[int, ...]
    part: Bounds | None
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The contents of a payload, and their places."""

    codec: CodecName
    base: Version | None
    places: tuple[Place, ...]


def encoded(tensors: Tensors, codec_name: CodecName, base: Version | None = None) -> EncodedTensors:
    """Encode the tensors. Values are not checked; the receiver does that (``validation``)."""
    return EncodedTensors(
        codec_name,
        base,
        {name: EncodedTensor(array.shape, _coded(array, codec_name)) for name, array in tensors.items()},
    )


def encode(tensors: Tensors, codec_name: CodecName = "float32", base: Version | None = None) -> memoryview:
    """Return the tensors, in their order, as one payload."""
    return written(encoded(tensors, codec_name, base))


def written(content: EncodedTensors) -> memoryview:
    """Return encoded tensors as one payload. What came as one is returned as it is."""
    if content.payload is not None:
        return content.payload
    layout = [
        [name, list(tensor.shape), *([] if tensor.part is None else [tensor.part])]
        for name, tensor in content.tensors.items()
    ]
    document = {"codec": content.codec, "base": content.base, "tensors": layout}
    header = json.dumps(document, separators=(",", ":")).encode()
    header += b" " * (-(_PREFIX.size + len(header)) % _ALIGNMENT_BYTES)
    parts: list[bytes | memoryview] = [_PREFIX.pack(_MAGIC, len(header), content.value_bytes), header]
    parts += [tensor.data for tensor in content.tensors.values()]
    checksum = 0
    for part in parts:
        checksum = crc32c(part, checksum)
    return _joined([*parts, _CHECKSUM.pack(checksum)])


def decode(payload: bytes | bytearray | memoryview) -> dict[str, Array]:
    """Read a payload back into float32 arrays, in the order they were written. Raises InvalidPayload for anything else."""
    return parse(payload).all_decoded()


def parse(payload: bytes | bytearray | memoryview) -> EncodedTensors:
    """Return the tensors of a payload, still encoded, as views of it. Raises InvalidPayload unless it is intact."""
    verify(payload)
    return unverified(payload)[0]


def verify(payload: bytes | bytearray | memoryview) -> None:
    """Raise InvalidPayload unless the payload's length and checksum agree with its bytes."""
    view = _whole(payload)
    require_checksum(payload, crc32c(view[: -_CHECKSUM.size]))


def require_checksum(payload: bytes | bytearray | memoryview, actual: int) -> None:
    """Raise InvalidPayload unless the payload states this checksum."""
    (stated,) = _CHECKSUM.unpack(memoryview(payload)[-_CHECKSUM.size :])
    if actual != stated:
        raise InvalidPayload(
            detail=f"The checksum should be {stated:08x} but is {actual:08x}: bytes changed on the way."
        )


def unverified(payload: bytes | bytearray | memoryview) -> tuple[EncodedTensors, int]:
    """Do the same as ``parse`` without verifying the data. Also returns the checksum of everything before the data.

    For callers that read the data anyway. Raises InvalidPayload if length or header are impossible; damaged bytes may
    cause that, or go unnoticed.
    """
    view = _whole(payload)
    start = head_bytes(view[: _PREFIX.size])
    head = layout(view[:start], len(view))
    tensors = {
        place.name: EncodedTensor(place.shape, view[place.start : place.start + place.size], place.part)
        for place in head.places
    }
    return EncodedTensors(head.codec, head.base, tensors, view), crc32c(view[:start])


def head_bytes(prefix: bytes | memoryview) -> int:
    """Return the bytes before the tensors' data, from the first ``PREFIX_BYTES``. Raises InvalidPayload."""
    magic, header_bytes, _ = _PREFIX.unpack_from(prefix)
    if magic != _MAGIC:
        raise InvalidPayload(detail=f"A payload begins with {_MAGIC!r}, but this one with {magic!r}.")
    return int(_PREFIX.size + header_bytes)


def layout(head: bytes | memoryview, payload_bytes: int) -> Layout:
    """Return the places of the tensors, from everything before their data, to read some of them from a file.

    Raises InvalidPayload if that is impossible in a payload of this size.
    """
    codec_name, base, rows = _parsed(memoryview(head)[_PREFIX.size :])
    places, start = [], len(head)
    for name, shape, part in rows:
        size = codec(codec_name).data_bytes(math.prod(shape))
        places.append(Place(name, shape, part, start, size))
        start += size
    if (data_bytes := payload_bytes - _CHECKSUM.size - len(head)) != start - len(head):
        raise InvalidPayload(
            detail=f"The header announces tensors of {start - len(head)} bytes, but {data_bytes} bytes of data follow."
        )
    return Layout(codec_name, base, tuple(places))


def _coded(array: Array, codec_name: CodecName) -> memoryview:
    return raw_bytes(array, array.dtype) if codec_name == EXACT else kernels.encode(codec_name, array).data


def _joined(parts: Sequence[bytes | memoryview]) -> memoryview:
    """Join the parts. NumPy copies them without Python's lock, which ``bytes.join`` holds."""
    if len(parts) == 1:
        return memoryview(parts[0]).cast("B")
    return np.concatenate([np.frombuffer(part, np.uint8) for part in parts]).data


def _whole(payload: bytes | bytearray | memoryview) -> memoryview:
    """Return the payload's bytes, after checking their length."""
    view = memoryview(payload).cast("B")
    if len(view) < _PREFIX.size + _CHECKSUM.size:
        raise InvalidPayload(
            detail=f"{len(view)} bytes are too few for a payload: it was cut short, or is not a payload."
        )
    _, _, data_bytes = _PREFIX.unpack_from(view)
    announced = head_bytes(view[: _PREFIX.size]) + data_bytes + _CHECKSUM.size
    if announced != len(view):
        raise InvalidPayload(detail=f"The payload announces {announced} bytes but has {len(view)}.")
    return view


Rows = list[tuple[str, tuple[int, ...], Bounds | None]]
"""Names, shapes, and parts."""


def _parsed(header: memoryview) -> tuple[CodecName, Version | None, Rows]:
    """Return codec, base and layout. If the checksum is right, an error here means that the sender is another build."""
    try:
        document = json.loads(bytes(header))
        codec_name, base = document["codec"], document["base"]
        rows: Rows = [
            (name, tuple(shape), tuple((start, stop) for start, stop in part[0]) if part else None)
            for name, shape, *part in document["tensors"]
        ]
        names = {name for name, _, _ in rows}
        sound = codec_name in CODEC_NAMES and len(names) == len(rows) and all(isinstance(name, str) for name in names)
        sound = sound and (base is None or (type(base) is int and base >= 0))
        sound = sound and all(type(extent) is int and extent >= 0 for _, shape, _ in rows for extent in shape)
        sound = sound and all(part is None or _is_of(shape, part) for _, shape, part in rows)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidPayload(detail=f"The header is not that of a payload: {error!r}.") from error
    if not sound:
        raise InvalidPayload(
            detail=f"The header names an unknown codec, a tensor twice, or an impossible base or shape: {document}."
        )
    return codec_name, base, rows


def _is_of(shape: tuple[int, ...], part: Bounds) -> bool:
    """Return whether a part with these bounds has this shape."""
    sides = all(type(start) is int and type(stop) is int and 0 <= start <= stop for start, stop in part)
    return sides and shape_of(part) == shape


def displacement(anchor: Tensors, tensors: Tensors, base: Version, codec_name: CodecName = EXACT) -> EncodedTensors:
    """Return Δ of these tensors from ``anchor``, which is Θ at version ``base``."""
    coded = {
        name: EncodedTensor(array.shape, kernels.encode(codec_name, tensors[name], base=array).data)
        for name, array in anchor.items()
    }
    return EncodedTensors(codec_name, base, coded)


def rebased(content: EncodedTensors, old: Tensors, anchor: Tensors, base: Version) -> EncodedTensors:
    """Return the displacement of the same parameters from ``anchor``, version ``base``: Δ + (Θ − Θ_old)."""
    moved = {name: content.decoded(name) + (anchor[name] - old[name]) for name in content.tensors}
    return encoded(moved, EXACT, base)
