"""The kernels in NumPy: what each computes, and in which order it adds. ``native`` gives the same bits.

Sums of products are defined so that they can be computed in parallel and are the same on every machine. A matrix is cut into
chunks of ``CHUNK_VALUES`` from its first value on, wherever in a block of its codec that is. Within a chunk products are
float32, and are distributed over ``LANES`` lanes by their position; each lane adds its products in order, in float32. Then
the lanes of a chunk are added in order in float64, and so are chunks. So a matrix has the same products alone and among
others.

   input   (codec name, data): the values of a piece as that codec writes them, uint8
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from orchestrator.parameters.codec.codecs import BLOCK_VALUES
from orchestrator.parameters.codec.registry import CodecName, codec
from orchestrator.parameters.outer_optimizer import Rule, taken
from orchestrator.parameters.tensors import Array

CHUNK_VALUES = 4096
LANES = 16
_SLAB_VALUES = 64 * CHUNK_VALUES
"""Values decoded at once."""

Data = NDArray[np.uint8]
Input = tuple[CodecName, Data]


def encode(codec_name: CodecName, values: Array, base: Array | None, data: Data, threads: int) -> None:
    """Write ``values``, or ``base − values``, into ``data``."""
    for part in _slabs(values.size):
        own = values[part] if base is None else base[part] - values[part]
        _write(codec_name, data, values.size, part, own)


def decode(codec_name: CodecName, data: Data, base: Array | None, values: Array, threads: int) -> None:
    """Read ``data`` into ``values``, added to ``base`` if there is one."""
    for part in _slabs(values.size):
        own = _read((codec_name, data), values.size, part)
        values[part] = own if base is None else base[part] + own


def examine(
    codec_name: CodecName, data: Data, value_count: int, checksum: int | None, threads: int
) -> tuple[float, float, int | None]:
    """Return the largest magnitude (NaN if a value is not a number), the sum of squares, and the CRC-32C with the data."""
    largest, square_norm = np.uint32(0), 0.0
    for part in _slabs(value_count):
        row = _read((codec_name, data), value_count, part)
        largest = max(largest, _largest_bits(row))
        for partial in _partials(row, row):
            square_norm += float(partial)
    checksum = None if checksum is None else crc32c(data.data, checksum)
    return float(largest.view(np.float32)), square_norm, checksum


def gram(inputs: Sequence[Input], value_count: int, matrix_count: int, threads: int) -> NDArray[np.float64]:
    """Return ⟨Δ_i, Δ_j⟩ of every matrix: (matrix_count, M, M) float64. Matrices follow each other and have one size."""
    products = np.zeros((matrix_count, len(inputs), len(inputs)), np.float64)
    length = value_count // matrix_count
    for matrix in range(matrix_count):
        for part in _slabs(length):
            start = matrix * length + part.start
            before = start % BLOCK_VALUES  # values of the first block that belong to another matrix
            own = slice(start - before, matrix * length + part.stop)
            rows = [_read(each, value_count, own)[before:] for each in inputs]
            for i, left in enumerate(rows):
                for j, right in enumerate(rows[i:], i):
                    for partial in _partials(left, right):
                        products[matrix, i, j] += partial
    return np.triu(products) + np.triu(products, 1).transpose(0, 2, 1)


def step(
    inputs: Sequence[Input],
    mixing: Array,
    rule: Rule,
    down_codec: CodecName,
    anchor: Array,
    moments: Array | None,
    residue: Array | None,
    next_parameters: Array,
    next_moments: Array | None,
    next_residue: Array | None,
    update: Data | None,
    threads: int,
) -> float:
    """Take an outer step and return the largest magnitude of the next parameters; NaN if one is not a number.

    Δ = Σ a_m Δ_m, added in the order of the inputs, a of the value's matrix   (mixing: (matrix_count, M) float32)
    s = the decrement of ``outer_optimizer.taken``  (moments: (moment_count, n), None without)
    Θ' = Θ − s                                      or, if the downlink is lossy (residue e, codec Q),
    u = e − s,   Θ' = Θ + Q⁻¹(Q(u)),   e' = u − Q⁻¹(Q(u));   Q(u) is the update
    """
    largest = np.uint32(0)
    for part in _slabs(anchor.size):
        rows = [_read(each, anchor.size, part) for each in inputs]
        own = np.empty(part.stop - part.start, np.float32)
        with np.errstate(all="ignore"):
            for matrix, start, stop in _matrices(part, anchor.size // len(mixing)):
                where = slice(start - part.start, stop - part.start)
                own[where] = mixing[matrix, 0] * rows[0][where]
                for weight, row in zip(mixing[matrix, 1:], rows[1:], strict=True):
                    own[where] += weight * row[where]
            own, after = taken(rule, own, own[None, :0] if moments is None else moments[:, part])
            if next_moments is not None:
                next_moments[:, part] = after
            lost = np.zeros_like(own) if residue is None else residue[part]
            if next_residue is None or update is None:
                next_parameters[part] = anchor[part] - own
                if residue is not None:
                    next_parameters[part] += lost
            else:
                own = lost - own
                _write(down_codec, update, anchor.size, part, own)
                decoded = _read((down_codec, update), anchor.size, part)
                next_parameters[part] = anchor[part] + decoded
                next_residue[part] = own - decoded
        largest = max(largest, _largest_bits(next_parameters[part]))
    return float(largest.view(np.float32))


def _slabs(value_count: int) -> Iterator[slice]:
    for start in range(0, value_count, _SLAB_VALUES):
        yield slice(start, min(start + _SLAB_VALUES, value_count))


def _matrices(part: slice, length: int) -> Iterator[tuple[int, int, int]]:
    """Yield the matrices that have values in this part, each with its range."""
    for matrix in range(part.start // length, (part.stop - 1) // length + 1):
        yield matrix, max(part.start, matrix * length), min(part.stop, (matrix + 1) * length)


def _places(codec_name: CodecName, value_count: int, part: slice) -> tuple[slice, ...]:
    """Return where the bytes of these values are in all data. The part must begin with a block."""
    coder = codec(codec_name)
    if coder.data_bytes(1) == coder.data_bytes(2) - coder.data_bytes(1):  # only values, without scales
        width = coder.data_bytes(1)
        return (slice(width * part.start, width * part.stop),)
    scale_bytes = 2 * -(-value_count // BLOCK_VALUES)
    first, last = part.start // BLOCK_VALUES, -(-part.stop // BLOCK_VALUES)
    codes_before = coder.data_bytes(part.start) - 2 * first
    codes_through = coder.data_bytes(part.stop) - 2 * last
    return slice(2 * first, 2 * last), slice(scale_bytes + codes_before, scale_bytes + codes_through)


def _read(encoded: Input, value_count: int, part: slice) -> Array:
    codec_name, data = encoded
    own = np.concatenate([data[place] for place in _places(codec_name, value_count, part)])
    with np.errstate(all="ignore"):
        return codec(codec_name).decode(own.data, part.stop - part.start)


def _write(codec_name: CodecName, data: Data, value_count: int, part: slice, values: Array) -> None:
    with np.errstate(all="ignore"):
        parts = codec(codec_name).encode(values)
    for place, written in zip(_places(codec_name, value_count, part), parts, strict=True):
        data[place] = np.frombuffer(written, np.uint8)


def _partials(left: Array, right: Array) -> NDArray[np.float64]:
    """Return the sum of products of each chunk. The arrays must begin with one."""
    products = np.zeros(-(-left.size // CHUNK_VALUES) * CHUNK_VALUES, np.float32)
    with np.errstate(all="ignore"):
        np.multiply(left, right, out=products[: left.size])
        lanes = np.add.reduce(products.reshape(-1, CHUNK_VALUES // LANES, LANES), axis=1).astype(np.float64)
        total = np.zeros(len(lanes), np.float64)
        for lane in range(LANES):
            total += lanes[:, lane]
    return total


def _largest_bits(values: Array) -> np.uint32:
    """Return the largest magnitude as the bits of a float32: NaN is above infinity, which is above all numbers."""
    return np.uint32((values.view(np.uint32) & np.uint32(0x7FFFFFFF)).max(initial=0))
