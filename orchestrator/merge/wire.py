"""A fragment's parameters as bytes: what travels between an island and the synchroniser, both ways.

    magic       8 bytes   "atollw1\\n"
    sizes       12 bytes  little-endian: header bytes (u32), data bytes (u64)
    header      JSON: {"codec": …, "tensors": [[name, shape], …]}, padded with spaces so that the data is aligned
    data        the tensors one after another, little-endian, row-major
    checksum    4 bytes   CRC-32 of everything before it

Nothing is believed before the sizes agree with the length and the checksum with the bytes: a flipped bit, a cut or a
tail is refused. CRC-32 finds every burst of up to 32 bits, lives in the standard library and is faster than the copy
next to it; it guards against accidents, not against forgers, who are the transport's business.

Decoded float32 arrays are read-only views of the payload: no copy, and the payload lives as long as they do. bfloat16
is rounded to nearest even on the way out and widened on the way in; the paper measures no loss from it.

Knows nothing of fragments, versions or transports. Source: ours; bfloat16 on the wire from Decoupled DiLoCo,
arXiv:2604.21428.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from orchestrator.core.vocabulary import RefusalReason
from orchestrator.errors import DataError

Array = NDArray[np.float32]
Codec = Literal["float32", "bfloat16"]

MAGNITUDE_MAX = 1e15
"""A parameter beyond this has diverged, and is refused like an infinity: the merge squares displacements and sums them in
float32, which ends at 3.4e38."""

_MAGIC = b"atollw1\n"
_PREFIX = struct.Struct("<8sIQ")
_CHECKSUM = struct.Struct("<I")
_ALIGNMENT_BYTES = 64
_CODECS: dict[str, np.dtype[Any]] = {"float32": np.dtype("<f4"), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


@dataclass(eq=False, kw_only=True)
class WireError(DataError):
    """These bytes are not a payload as it was sent. ``reason`` is what a refusal of the contribution will say."""

    reason: RefusalReason = RefusalReason.CORRUPT


def encode(arrays: Mapping[str, Array], codec: Codec = "float32") -> bytes:
    """Write the arrays, in their order, as one payload. Values are not judged; the receiver does that (``check``)."""
    tensors = [[name, list(np.shape(array))] for name, array in arrays.items()]
    header = json.dumps({"codec": codec, "tensors": tensors}, separators=(",", ":")).encode()
    header += b" " * (-(_PREFIX.size + len(header)) % _ALIGNMENT_BYTES)
    data = [_bytes_of(array, _CODECS[codec]) for array in arrays.values()]
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
    """Read a payload back into float32 arrays, in the order they were written. Raises WireError for anything else.

    Whether they are the arrays somebody wanted is another question: ``check``.
    """
    view = memoryview(payload).cast("B")
    header, data = _verified(view)
    codec, tensors = _parsed(header)
    dtype = _CODECS[codec]
    if (stated := sum(math.prod(shape) for _, shape in tensors) * dtype.itemsize) != len(data):
        raise WireError(detail=f"The header announces tensors of {stated} bytes, but {len(data)} bytes of data follow.")
    values = np.frombuffer(data, dtype).astype(np.float32, copy=False)
    values.flags.writeable = False
    arrays: dict[str, Array] = {}
    start = 0
    for name, shape in tensors:
        end = start + math.prod(shape)
        try:
            arrays[name] = values[start:end].reshape(shape)
        except ValueError as error:  # no elements, but extents beyond what an array can have
            raise WireError(detail=f"{name} has an impossible shape: {error}") from error
        start = end
    return arrays


def check(arrays: Mapping[str, Array], shapes: Mapping[str, tuple[int, ...]]) -> tuple[RefusalReason, str] | None:
    """Why these arrays may not enter a merge of tensors of these shapes, or ``None`` if they may."""
    if missing := sorted(shapes.keys() - arrays.keys()):
        return RefusalReason.WRONG_SHAPE, f"The tensors {', '.join(missing)} are missing."
    if unknown := sorted(arrays.keys() - shapes.keys()):
        return RefusalReason.WRONG_SHAPE, f"The tensors {', '.join(unknown)} are not of this fragment."
    for name, shape in shapes.items():
        array = arrays[name]
        if array.shape != tuple(shape) or array.dtype != np.float32:
            found = f"{array.dtype}{list(array.shape)}"
            return RefusalReason.WRONG_SHAPE, f"{name} is {found}; this fragment has float32{list(shape)}."
    for name in shapes:
        lowest, highest = float(arrays[name].min(initial=0.0)), float(arrays[name].max(initial=0.0))
        if not (lowest >= -MAGNITUDE_MAX and highest <= MAGNITUDE_MAX):  # written so that NaN fails it
            return RefusalReason.NON_FINITE, f"{name} holds values from {lowest} to {highest}."
    return None


def digest(arrays: Mapping[str, Array]) -> str:
    """Names these tensors, bit for bit, whatever order they come in: 32 hexadecimal digits."""
    state = hashlib.blake2b(digest_size=16)
    for name in sorted(arrays):
        array = arrays[name]
        state.update(json.dumps([name, array.dtype.str, list(array.shape)]).encode())
        state.update(_bytes_of(array, array.dtype))
    return state.hexdigest()


def _bytes_of(array: Array, dtype: np.dtype[Any]) -> memoryview:
    """Row-major, without a copy where dtype and layout allow it."""
    return np.ravel(array).astype(dtype, copy=False).view(np.uint8).data


def _verified(view: memoryview) -> tuple[memoryview, memoryview]:
    """Header and data, once length and checksum agree."""
    if len(view) < _PREFIX.size + _CHECKSUM.size:
        raise WireError(detail=f"{len(view)} bytes are too few to be a payload; it was cut short or never one.")
    magic, header_bytes, data_bytes = _PREFIX.unpack_from(view)
    if magic != _MAGIC:
        raise WireError(detail=f"A payload begins with {_MAGIC!r}, this one with {magic!r}.")
    announced = _PREFIX.size + header_bytes + data_bytes + _CHECKSUM.size
    if announced != len(view):
        raise WireError(detail=f"The payload announces {announced} bytes and has {len(view)}.")
    body, (stated,) = view[: -_CHECKSUM.size], _CHECKSUM.unpack(view[-_CHECKSUM.size :])
    if (found := zlib.crc32(body)) != stated:
        raise WireError(detail=f"The checksum should be {stated:08x} and is {found:08x}: bytes changed on the way.")
    return body[_PREFIX.size :][:header_bytes], body[_PREFIX.size + header_bytes :]


def _parsed(header: memoryview) -> tuple[str, list[tuple[str, tuple[int, ...]]]]:
    """Codec, names and shapes. The checksum held, so a fault here is a sender that speaks another dialect."""
    try:
        document = json.loads(bytes(header))
        codec = document["codec"]
        tensors = [(name, tuple(shape)) for name, shape in document["tensors"]]
        names = {name for name, _ in tensors}
        sound = codec in _CODECS and len(names) == len(tensors) and all(isinstance(name, str) for name in names)
        sound = sound and all(type(extent) is int and extent >= 0 for _, shape in tensors for extent in shape)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WireError(detail=f"The header is not the one of a payload: {error!r}.") from error
    if not sound:
        raise WireError(detail=f"The header names an unknown codec, a tensor twice or an impossible shape: {document}.")
    return codec, tensors
