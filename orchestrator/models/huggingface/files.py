"""Safetensors files, read tensor by tensor or part by part, from untrusted sources; and written the same way.

A file is opened for each read and never mapped: if it shrinks meanwhile, that is an error, and not a signal. Its header is
used only if names, types, shapes and offsets agree with each other and with the file's length. Which tensors a model has
is known elsewhere.

Format: eight bytes of length, little-endian; that many bytes of JSON; data. The package ``safetensors`` only reads and
writes whole files, or maps them.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from orchestrator.errors import DataError
from orchestrator.system.roots import shown

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""A model's only file; or the file that says which of several files has which tensor."""
Open = Callable[[], IO[bytes]]

HEADER_BYTES_MAX = 32 << 20
"""The limit for all files of one model together: some 200,000 tensors."""
DIMENSIONS_MAX = 8
SAMPLED_BYTES, SAMPLES = 16 << 20, 16
"""A digest reads all of a tensor up to this size, and this much of a larger one, in so many blocks."""
TYPES: Mapping[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
"""The types that parameters may have."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file, and where its bytes are in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorFile:
    """An open safetensors file. ``entries`` are the tensors by name."""

    open: Open
    entries: Mapping[str, Entry]
    header_bytes: int

    def read(self, name: str, index: tuple[int, ...] = ()) -> NDArray[np.float32]:
        """Return the tensor, or its part at ``index`` along the first axes, as float32. Raises DataError, OSError."""
        entry = self.entries[name]
        shape = entry.shape[len(index) :]
        before = 0
        for number, length in zip(index, entry.shape, strict=False):
            before = before * length + number
        return self._values(name, before * math.prod(shape), shape)

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        """Return ``start`` to ``stop`` along the first axis, as float32. Raises as ``read``."""
        inner = self.entries[name].shape[1:]
        return self._values(name, start * math.prod(inner), (stop - start, *inner))

    def sampled(self, name: str) -> Iterator[bytes]:
        """Yield a tensor's bytes as they are in the file: all of a small one, evenly spaced blocks of a large one."""
        entry = self.entries[name]
        size = math.prod(entry.shape) * np.dtype(TYPES[entry.dtype]).itemsize
        count = SAMPLES if size > SAMPLED_BYTES else 1
        length = SAMPLED_BYTES // SAMPLES if count > 1 else size
        with self.open() as file:
            for number in range(count):
                file.seek(entry.start + (size - length) * number // max(1, count - 1))
                if len(content := file.read(length)) != length:
                    raise DataError(detail=f"the file with {shown(name)} became shorter while it was being read.")
                yield content

    def _values(self, name: str, before: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Return values of a tensor with this shape, after the first ``before`` ones."""
        entry = self.entries[name]
        dtype = np.dtype(TYPES[entry.dtype])
        nbytes = math.prod(shape) * dtype.itemsize
        with self.open() as file:
            file.seek(entry.start + before * dtype.itemsize)
            content = file.read(nbytes)
        if len(content) != nbytes:
            raise DataError(detail=f"the file with {shown(name)} became shorter while it was being read.")
        return np.frombuffer(content, dtype).reshape(shape).astype(np.float32, copy=False)


def read_header(open_file: Open, bytes_max: int = HEADER_BYTES_MAX) -> TensorFile:
    """Return the tensors of a file. Raises DataError if it is not a valid safetensors file; OSError."""
    with open_file() as file:
        prefix, size = file.read(8), os.fstat(file.fileno()).st_size
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(bytes_max, size - 8):
            raise DataError(detail="it is not a safetensors file: its header does not fit in it, or is too large.")
        content = file.read(length)
    try:
        header = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(detail="it is not a safetensors file: its header is not JSON.") from error
    if not isinstance(header, dict):
        raise DataError(detail="it is not a safetensors file: its header is not a mapping.")
    header.pop("__metadata__", None)
    entries = {name: _entry(name, value, 8 + length, size) for name, value in header.items()}
    return TensorFile(open_file, entries, length)


def write(
    file: IO[bytes],
    tensors: Mapping[str, tuple[int, ...]],
    values: Iterable[NDArray[np.float32]],
    dtype: str = "F32",
) -> None:
    """Write tensors with these names and shapes, whose float32 ``values`` come one by one in the same order.

    They are rounded to ``dtype``, one of ``TYPES``. Raises DataError if a value is too large for it.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    stored = np.dtype(TYPES[dtype])
    start = 0
    for name, shape in tensors.items():
        stop = start + stored.itemsize * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    content = json.dumps(header).encode()
    content += b" " * (-len(content) % 8)
    file.write(struct.pack("<Q", len(content)) + content)
    for (name, shape), array in zip(tensors.items(), values, strict=True):
        assert array.shape == shape, f"{name} is {array.shape}, but should be {shape}"
        with np.errstate(over="ignore"):
            rounded = np.ascontiguousarray(array, stored)
        if stored != array.dtype and not np.isfinite(rounded).all() and np.isfinite(array).all():
            largest = np.abs(array).max()
            raise DataError(
                detail=f"{name} has {largest:.3g}, which {stored.name} cannot hold. Export as bfloat16 or float32."
            )
        file.write(rounded.view(np.uint8).data if rounded.size else b"")


def _entry(name: str, value: Any, data_start: int, size: int) -> Entry:
    try:
        dtype, shape, (start, stop) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        whole = len(shape) <= DIMENSIONS_MAX and all(type(n) is int and n >= 0 for n in (*shape, start, stop))
    except (TypeError, KeyError, ValueError) as error:
        raise DataError(detail=f"its header does not describe {shown(name)} as a tensor.") from error
    item = np.dtype(TYPES[dtype]).itemsize if isinstance(dtype, str) and dtype in TYPES else None
    fits = whole and start <= stop and data_start + stop <= size
    if not fits or (item is not None and stop - start != item * math.prod(shape)):
        raise DataError(detail=f"its header gives {shown(name)} a place that does not fit into the file.")
    return Entry(str(dtype)[:16], shape, data_start + start, stop - start)
