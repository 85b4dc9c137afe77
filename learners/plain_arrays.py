"""An island's arrays in plain safetensors files, of which each of its processes reads the windows that it needs.

   arrays.safetensors, arrays.1.safetensors, …      of rank 0, or of an island of one process
   arrays-RANK.safetensors, …                       of another process
   parts.json                                       in a file, as bytes: the bounds of arrays that are parts of others

Files are kept small, because a store takes a file in one piece. They are read through ``checkpoints.blocks``, so a header is
verified before it is used, and contains only what was written. Types have safetensors' names, and NumPy's for those that it
does not know.

``flattened`` and ``restored`` turn named arrays of any type into one run of bytes with a table, and back, for the wire.
Nothing is converted or parsed: a state has moments, counters and keys of whatever types its optimizer uses. NumPy does the
copying, so other threads run meanwhile.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from learners.contract import Arrays
from orchestrator.checkpoints import blocks
from orchestrator.checkpoints.blocks import SoundFile, Window
from orchestrator.checkpoints.folder import FileTarget
from orchestrator.checkpoints.manifest import File
from orchestrator.errors import DataError, first_line
from orchestrator.parameters.parts import Bounds, index_of, intersection, shape_of, tiles, whole, within
from orchestrator.parameters.pieces import piece_named

ALIGNMENT_BYTES = 64
"""The alignment of each array: a cache line, and more than any type needs."""


class ArrayPlace(NamedTuple):
    """One array's name, type and shape. The arrays follow each other in the table's order, each aligned."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def byte_count(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def padded_byte_count(self) -> int:
        return -(-self.byte_count // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def flattened(arrays: Mapping[str, np.ndarray]) -> tuple[tuple[ArrayPlace, ...], memoryview]:
    """Return the table and the bytes, row-major."""
    table = tuple(ArrayPlace(name, array.dtype, array.shape) for name, array in sorted(arrays.items()))
    content = np.zeros(sum(place.padded_byte_count for place in table), np.uint8)
    at = 0
    for place in table:
        content[at : at + place.byte_count] = np.ravel(arrays[place.name]).view(np.uint8)
        at += place.padded_byte_count
    return table, content.data


def restored(table: tuple[ArrayPlace, ...], content: memoryview) -> Arrays:
    """Return the arrays as views of ``content``. Raises DataError if the table does not fit the bytes."""
    size = sum(place.padded_byte_count for place in table)
    if size != len(content):
        raise DataError(detail=f"arrays of {size:,} bytes are announced, but {len(content):,} bytes arrived.")
    arrays: Arrays = {}
    at = 0
    for place in table:
        part = np.frombuffer(content[at : at + place.byte_count], np.uint8)
        arrays[place.name] = part.view(place.dtype).reshape(place.shape)
        at += place.padded_byte_count
    return arrays


PARTS = "parts.json"
SUFFIX = ".safetensors"
FILE_BYTES_MAX = 1 << 30
"""A file is larger only if a single array is."""
HEADER_BYTES_MAX = 64 << 20
_SIZE_BYTES, _ALIGNMENT_BYTES = 8, 64
_SAFETENSORS_NAMES = {
    **{f"{kind.upper()[0]}{bits}": f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "C64": "complex64", "BOOL": "bool"},
}
_OTHERS = ("complex128", "int4", "uint4", "int2", "uint2", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz")
_TYPES: dict[str, np.dtype[Any]] = {
    code: np.dtype(getattr(ml_dtypes, name, name))
    for code, name in (*_SAFETENSORS_NAMES.items(), *((name, name) for name in _OTHERS))
}
_CODES = {dtype: code for code, dtype in _TYPES.items()}


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array in a file, and where its bytes begin. ``bounds`` is its place in the array with its name."""

    name: str
    file: SoundFile
    start: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    bounds: Bounds


def write(folder: FileTarget, stem: str, arrays: Mapping[str, np.ndarray], bounds: Mapping[str, Bounds]) -> list[File]:
    """Write all of these arrays to files of the folder, at least one. Raises OSError, and DataError for unknown types.

    Besides the arrays it needs only the memory of one array that is not row-major.
    """
    files: list[File] = []
    for number, names in enumerate(_by_file(arrays)):
        name = f"{stem}.{number}{SUFFIX}" if number else f"{stem}{SUFFIX}"
        own = {name: np.asarray(arrays[name]) for name in names}
        if parts := {name: bounds[name] for name in names if name in bounds}:
            own[PARTS] = np.frombuffer(json.dumps(parts).encode(), np.uint8)
        files += blocks.write(folder, name, _chunks(own))
    return files


def stored(file: SoundFile) -> list[StoredArray]:
    """Return the arrays in the file. Raises DataError unless it is a file of arrays."""
    try:
        header_bytes = int.from_bytes(file.read(0, _SIZE_BYTES), "little")
        if header_bytes > HEADER_BYTES_MAX:
            raise ValueError(f"its header claims to have {header_bytes:,} bytes")
        begin = _SIZE_BYTES + header_bytes
        header = json.loads(file.read(_SIZE_BYTES, begin))
        header.pop("__metadata__", None)
        entries = {name: _entry(file, begin, name, entry) for name, entry in header.items()}
        parts = _bounds_in(entries.pop(PARTS, None))
        return [_placed(array, parts.get(name)) for name, array in entries.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(detail=f"{file.name} is not a file of arrays: {first_line(error)}.") from error


def read(arrays: Iterable[StoredArray], wanted: Mapping[str, Window] | None, where: str) -> Arrays:
    """Return what is wanted, by names of whole tensors, in whatever pieces and parts it was written (None: all, as named).

    Only blocks that contain some of it are read, and only what is wanted is held. Raises DataError if parts are missing or
    belong to another model.
    """
    by_name: dict[str, dict[Bounds, StoredArray]] = {}
    for array in arrays:
        name, bounds = (array.name, array.bounds) if wanted is None else _in_tensor(array)
        by_name.setdefault(name, {}).setdefault(bounds, array)
    shapes = {name: _whole_shape(name, own) for name, own in by_name.items()}
    if wanted is None:
        wanted = {name: Window(whole(shape), shape) for name, shape in shapes.items()}
    require_same_names(wanted, shapes, where)
    targets, files = Arrays(), dict[SoundFile, list[tuple[str, Bounds, StoredArray]]]()
    for name, own in by_name.items():
        wanted[name].require_of(name, shapes[name], where)
        targets[name] = np.empty(shape_of(wanted[name].bounds), next(iter(own.values())).dtype)
        for bounds, array in own.items():
            files.setdefault(array.file, []).append((name, bounds, array))
    for file, there in files.items():
        for name, bounds, array in sorted(there, key=lambda each: each[2].start):
            if (common := intersection(bounds, wanted[name].bounds)) is not None:
                at: tuple[Any, ...] = (*index_of(within(common, wanted[name].bounds)), ...)  # a view, also without axes
                file.window(array.start, array.dtype, array.shape, within(common, bounds), targets[name][at])
        file.forget()
    return targets


def require_same_names(wanted: Mapping[str, Any], there: Mapping[str, Any], where: str) -> None:
    """Raise DataError if a state has other arrays than the wanted ones."""
    if differing := sorted(wanted.keys() ^ there.keys()):
        detail = f"the state in {where} does not fit this island's model: only one of them has {differing[:4]}"
        raise DataError(detail=detail)


def _by_file(arrays: Mapping[str, np.ndarray]) -> Iterator[list[str]]:
    names: list[str] = []
    byte_count = 0
    for name, array in arrays.items():
        if names and byte_count + array.nbytes > FILE_BYTES_MAX:
            yield names
            names, byte_count = [], 0
        names.append(name)
        byte_count += array.nbytes
    yield names


def _chunks(arrays: Mapping[str, np.ndarray]) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file, array by array: larger types first, so that each array is aligned."""
    header, at = {}, 0
    names = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))
    for name in names:
        array = arrays[name]
        if array.dtype not in _CODES:
            raise DataError(detail=f"{name} has the type {array.dtype}, which a checkpoint cannot hold.")
        offsets = [at, at + array.nbytes]
        header[name] = {"dtype": _CODES[array.dtype], "shape": list(array.shape), "data_offsets": offsets}
        at += array.nbytes
    document = json.dumps(header, separators=(",", ":")).encode()
    document += b" " * (-(_SIZE_BYTES + len(document)) % _ALIGNMENT_BYTES)
    yield len(document).to_bytes(_SIZE_BYTES, "little") + document
    for name in names:
        yield np.asarray(arrays[name], order="C").reshape(-1).view(np.uint8).data


def _entry(file: SoundFile, begin: int, name: str, entry: Mapping[str, Any]) -> StoredArray:
    dtype, shape, (start, stop) = _TYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
    counts = [*shape, start, stop]
    if any(type(count) is not int or count < 0 for count in counts) or begin + stop > file.size:
        raise ValueError(f"{name} cannot be at {start} to {stop}")
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name} of shape {shape} cannot have {stop - start:,} bytes")
    return StoredArray(name, file, begin + start, dtype, shape, whole(shape))


def _bounds_in(array: StoredArray | None) -> dict[str, Bounds]:
    if array is None:
        return {}
    try:
        document = json.loads(array.file.read(array.start, array.start + math.prod(array.shape)))
        return {name: tuple((int(start), int(stop)) for start, stop in sides) for name, sides in document.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(detail=f"The bounds of parts in a checkpoint cannot be read: {first_line(error)}.") from error


def _placed(array: StoredArray, bounds: Bounds | None) -> StoredArray:
    if bounds is None:
        return array
    if shape_of(bounds) != array.shape:
        raise ValueError(f"{array.name} of shape {array.shape} cannot be the part {bounds}")
    return replace(array, bounds=bounds)


def _in_tensor(array: StoredArray) -> tuple[str, Bounds]:
    """Return the tensor of which this is a piece, or a part of one, and its place there."""
    piece = piece_named(array.name)
    if piece.bounds is None or piece.bounds[0] >= len(array.bounds):
        return array.name, array.bounds
    axis, origin, _ = piece.bounds
    start, stop = array.bounds[axis]
    return piece.tensor, (*array.bounds[:axis], (origin + start, origin + stop), *array.bounds[axis + 1 :])


def _whole_shape(name: str, own: Mapping[Bounds, StoredArray]) -> tuple[int, ...]:
    """Return the shape of the array that these parts form. Raises DataError unless they cover it once, with one type."""
    dimensions, types = ({len(bounds) for bounds in own}, {array.dtype for array in own.values()})
    shape = tuple(max(bounds[axis][1] for bounds in own) for axis in range(min(dimensions)))
    if len(dimensions) > 1 or len(types) > 1 or not tiles(list(own), shape):
        raise DataError(detail=f"The parts of {name} in the checkpoint, {sorted(own)}, do not cover it exactly once.")
    return shape
