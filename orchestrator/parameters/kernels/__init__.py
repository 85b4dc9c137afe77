"""Kernels: arithmetic on encoded values, each in one pass over memory, on all cores, without the GIL.

``native`` is C behind Cython, built with the package; ``twin`` is NumPy, and defines what each kernel computes. Both give
the same bits, with any number of threads and any instruction set, so islands and shards may use different ones. If
``native`` was not built, or with ``ATOLL_KERNELS=numpy``, the twin is used, a tenth to a fiftieth as fast. ``ATOLL_KERNELS``
may also be ``avx2`` or ``baseline``, which exclude wider instructions.

   python -c "import orchestrator.parameters.kernels as kernels; print(kernels.IMPLEMENTATION)"

This module checks the sizes and layouts of the kernels' arguments. It does not know what is merged, with which weights.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchestrator.errors import InternalError
from orchestrator.parameters.codec.registry import EXACT, CodecName, codec
from orchestrator.parameters.kernels import twin
from orchestrator.parameters.outer_optimizer import OuterOptimizer, count_step, moments_of, state_size
from orchestrator.parameters.tensors import Array

log = logging.getLogger(__name__)

_fastest: ModuleType
try:
    if os.environ.get("ATOLL_KERNELS") == "numpy":
        raise ImportError("ATOLL_KERNELS=numpy")
    from orchestrator.parameters.kernels import native

    _fastest = native
    IMPLEMENTATION = f"native ({native.INSTRUCTIONS})"
except ImportError as error:
    _fastest = twin
    IMPLEMENTATION = "numpy"
    log.warning("Merges are computed by NumPy, many times slower than by the native kernels: %s", error)

Data = NDArray[np.uint8]


class Encoded(NamedTuple):
    """Values as a codec writes them."""

    codec_name: CodecName
    data: bytes | bytearray | memoryview | NDArray[np.uint8]
    value_count: int


class Examination(NamedTuple):
    """``largest`` is the largest magnitude, NaN if a value is not a number. ``square_norm`` is the sum of squares.

    ``checksum`` is the CRC-32C of what precedes the data and of the data, if the first was passed.
    """

    largest: float
    square_norm: float
    checksum: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """The result of an outer step on a piece. All arrays are flat.

    parameters  Θ'
    momentum    the optimizer's next state (empty if it has none)
    residue     what the downlink's codec lost of the update; None if the downlink is float32
    update      Θ' − Θ as the downlink's codec writes it, to the bit; None if the downlink is float32
    largest     the largest magnitude in Θ'; NaN if a value is not a number
    """

    parameters: Array
    momentum: Array
    residue: Array | None
    update: Data | None
    largest: float


def encode(codec_name: CodecName, values: Array, base: Array | None = None, threads: int | None = None) -> Data:
    """Return the data of ``values``, or of ``base − values``; arrays of any shape, row-major."""
    flat = _flat(values)
    data = np.empty(codec(codec_name).data_bytes(flat.size), np.uint8)
    if flat.size:
        _fastest.encode(codec_name, flat, _like(base, flat), data, _threads(threads))
    return data


def decode(encoded: Encoded, base: Array | None = None, threads: int | None = None) -> Array:
    """Return the values, flat, or the sum of ``base`` and the values."""
    values = np.empty(encoded.value_count, np.float32)
    data = _data(encoded)
    if values.size:
        _fastest.decode(encoded.codec_name, data, _like(base, values), values, _threads(threads))
    return values


def examine(encoded: Encoded, checksum: int | None = None, threads: int | None = None) -> Examination:
    """Examine a contribution before it may enter a merge. ``checksum`` is that of what precedes the data."""
    data = _data(encoded)
    if not encoded.value_count:
        return Examination(0.0, 0.0, checksum)
    return Examination(*_fastest.examine(encoded.codec_name, data, encoded.value_count, checksum, _threads(threads)))


def gram(inputs: Sequence[Encoded], matrix_count: int = 1, threads: int | None = None) -> NDArray[np.float64]:
    """Return ⟨Δ_i, Δ_j⟩ for each of the matrices, of one size, one after another: (matrix_count, M, M) float64."""
    data, value_count = _inputs(inputs)
    _require_divisible(value_count, matrix_count)
    if not value_count:
        return np.zeros((matrix_count, len(inputs), len(inputs)), np.float64)
    products: NDArray[np.float64] = _module(inputs).gram(data, value_count, matrix_count, _threads(threads))
    return products


def step(
    anchor: Array,
    momentum: Array,
    residue: Array | None,
    inputs: Sequence[Encoded],
    mixing: Array,
    optimizer: OuterOptimizer,
    down_codec: CodecName = EXACT,
    threads: int | None = None,
) -> Step:
    """Take an outer step on a piece.

    anchor      (n,) Θ
    momentum    the optimizer's state
    residue     (n,) what earlier updates lost, to be made up for; None for nothing
    inputs      M times Δ_m
    mixing      (matrix_count, M) the a_m of each matrix
    """
    data, value_count = _inputs(inputs)
    _require_divisible(value_count, len(mixing))
    lossy = down_codec != EXACT
    if anchor.size != value_count or mixing.shape[1] != len(inputs):
        raise InternalError(detail=f"{len(inputs)} inputs of {value_count} values do not fit their piece.")
    flat = _flat(anchor)
    if momentum.size != (needed := state_size(optimizer, flat.size)):
        raise InternalError(
            detail=f"{momentum.size} values of the optimizer's state are not the {needed} of its piece."
        )
    before, steps_taken = moments_of(optimizer, _flat(momentum))
    next_parameters, next_momentum = np.empty_like(flat), np.empty(needed, np.float32)
    after, _ = moments_of(optimizer, next_momentum)
    count_step(optimizer, next_momentum, steps_taken)
    has_moments = optimizer.moment_count > 0
    next_residue = np.empty_like(flat) if lossy else None
    update = np.empty(codec(down_codec).data_bytes(flat.size), np.uint8) if lossy else None
    largest = 0.0
    if value_count:
        largest = _module(inputs).step(
            data,
            np.ascontiguousarray(mixing, np.float32),
            optimizer.rule(steps_taken),
            down_codec,
            flat,
            before if has_moments else None,
            _like(residue, flat),
            next_parameters,
            after if has_moments else None,
            next_residue,
            update,
            _threads(threads),
        )
    return Step(next_parameters, next_momentum, next_residue, update, largest)


def thread_count() -> int:
    """Return a kernel's default number of threads: the cores of this process, or ``ATOLL_MERGE_THREADS``."""
    return int(os.environ.get("ATOLL_MERGE_THREADS", 0)) or len(os.sched_getaffinity(0))


def _threads(threads: int | None) -> int:
    return thread_count() if threads is None else threads


def _module(inputs: Sequence[Encoded]) -> ModuleType:
    """Return the module for these inputs: the native kernels take only some hundred inputs."""
    return _fastest if _fastest is twin or len(inputs) <= native.INPUT_COUNT_MAX else twin


def _flat(values: Array) -> Array:
    return np.ascontiguousarray(values, np.float32).reshape(-1)


def _like(values: Array | None, flat: Array) -> Array | None:
    if values is None:
        return None
    if values.size != flat.size:
        raise InternalError(detail=f"{values.size} values cannot be combined with {flat.size}.")
    return _flat(values)


def _data(encoded: Encoded) -> Data:
    data = np.frombuffer(encoded.data, np.uint8)
    stated = codec(encoded.codec_name).data_bytes(encoded.value_count)
    if data.size != stated:
        raise InternalError(
            detail=f"{encoded.value_count} values in {encoded.codec_name} are {stated} bytes, not {data.size}."
        )
    return data


def _inputs(inputs: Sequence[Encoded]) -> tuple[list[tuple[CodecName, Data]], int]:
    counts = {each.value_count for each in inputs}
    if len(counts) != 1:
        raise InternalError(
            detail=f"The inputs to a merge have {sorted(counts)} values; all must have the same number."
        )
    return [(each.codec_name, _data(each)) for each in inputs], counts.pop()


def _require_divisible(value_count: int, matrix_count: int) -> None:
    if matrix_count < 1 or value_count % matrix_count:
        raise InternalError(detail=f"{value_count} values are not {matrix_count} matrices of one size.")
