"""The wire format: a fragment's tensors as bytes, as they travel between an island and the synchroniser and lie in journals.

    magic       8 bytes   "atollw1\\n"
    sizes       12 bytes  little-endian: header bytes (u32), data bytes (u64)
    header      JSON: {"codec": …, "tensors": [[name, shape], …]}, padded with spaces so that the data is aligned
    data        the tensors one after another, each as its codec writes it (``codec``)
    checksum    4 bytes   CRC-32 of everything before it

Nothing is believed before the sizes agree with the length and the checksum with the bytes: a flipped bit, a cut or a
tail is refused. CRC-32 finds every burst of up to 32 bits, lives in the standard library and is faster than the copy
next to it; it guards against accidents, not against forgers, who are the transport's business.

Decoded arrays are read-only, and may be views of the payload, which then lives as long as they do. Whether they are the
arrays that somebody wanted is another question (``validation``).

Knows nothing of fragments, versions or transports. Source: ours.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from dataclasses import dataclass

from orchestrator.core.vocabulary import RefusalReason
from orchestrator.errors import DataError
from orchestrator.parameters.codec.registry import CODEC_NAMES, CodecName, codec
from orchestrator.parameters.tensors import Array, Tensors

_MAGIC = b"atollw1\n"
_PREFIX = struct.Struct("<8sIQ")
_CHECKSUM = struct.Struct("<I")
_ALIGNMENT_BYTES = 64


@dataclass(eq=False, kw_only=True)
class InvalidPayload(DataError):
    """These bytes are not a payload as it was sent. ``reason`` is what a refusal of the contribution will say."""

    reason: RefusalReason = RefusalReason.CORRUPT


def encode(tensors: Tensors, codec_name: CodecName = "float32") -> bytes:
    """Write the tensors, in their order, as one payload. Values are not judged; the receiver does that (``validation``)."""
    layout = [[name, list(array.shape)] for name, array in tensors.items()]
    header = json.dumps({"codec": codec_name, "tensors": layout}, separators=(",", ":")).encode()
    header += b" " * (-(_PREFIX.size + len(header)) % _ALIGNMENT_BYTES)
    data = [part for array in tensors.values() for part in codec(codec_name).encode(array)]
    parts: list[bytes | memoryview] = [
        _PREFIX.pack(_MAGIC, len(header), sum(part.nbytes for part in data)),
        header,
        *data,
    ]
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return b"".join([*parts, _CHECKSUM.pack(checksum)])


def decode(payload: bytes | bytearray | memoryview) -> dict[str, Array]:
    """Read a payload back into float32 arrays, in the order they were written. Raises InvalidPayload for anything else."""
    view = memoryview(payload).cast("B")
    header, data = _verified(view)
    codec_name, layout = _parsed(header)
    coder = codec(codec_name)
    counts = [math.prod(shape) for _, shape in layout]
    if (stated := sum(map(coder.data_bytes, counts))) != len(data):
        raise InvalidPayload(
            detail=f"The header announces tensors of {stated} bytes, but {len(data)} bytes of data follow."
        )
    arrays: dict[str, Array] = {}
    start = 0
    for (name, shape), count in zip(layout, counts, strict=True):
        end = start + coder.data_bytes(count)
        values = coder.decode(data[start:end], count)
        values.flags.writeable = False
        try:
            arrays[name] = values.reshape(shape)
        except ValueError as error:  # no elements, but extents beyond what an array can have
            raise InvalidPayload(detail=f"{name} has an impossible shape: {error}") from error
        start = end
    return arrays


def _verified(view: memoryview) -> tuple[memoryview, memoryview]:
    """Header and data, once length and checksum agree."""
    if len(view) < _PREFIX.size + _CHECKSUM.size:
        raise InvalidPayload(detail=f"{len(view)} bytes are too few to be a payload; it was cut short or never one.")
    magic, header_bytes, data_bytes = _PREFIX.unpack_from(view)
    if magic != _MAGIC:
        raise InvalidPayload(detail=f"A payload begins with {_MAGIC!r}, this one with {magic!r}.")
    announced = _PREFIX.size + header_bytes + data_bytes + _CHECKSUM.size
    if announced != len(view):
        raise InvalidPayload(detail=f"The payload announces {announced} bytes and has {len(view)}.")
    body, (stated,) = view[: -_CHECKSUM.size], _CHECKSUM.unpack(view[-_CHECKSUM.size :])
    if (actual := zlib.crc32(body)) != stated:
        raise InvalidPayload(
            detail=f"The checksum should be {stated:08x} and is {actual:08x}: bytes changed on the way."
        )
    return body[_PREFIX.size :][:header_bytes], body[_PREFIX.size + header_bytes :]


def _parsed(header: memoryview) -> tuple[CodecName, list[tuple[str, tuple[int, ...]]]]:
    """Codec, names and shapes. The checksum held, so a fault here is a sender that speaks another dialect."""
    try:
        document = json.loads(bytes(header))
        codec_name = document["codec"]
        layout = [(name, tuple(shape)) for name, shape in document["tensors"]]
        names = {name for name, _ in layout}
        sound = codec_name in CODEC_NAMES and len(names) == len(layout) and all(isinstance(name, str) for name in names)
        sound = sound and all(type(extent) is int and extent >= 0 for _, shape in layout for extent in shape)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidPayload(detail=f"The header is not the one of a payload: {error!r}.") from error
    if not sound:
        raise InvalidPayload(
            detail=f"The header names an unknown codec, a tensor twice or an impossible shape: {document}."
        )
    return codec_name, layout
