"""The codecs: float32, bfloat16, and four that code blocks of values with a common scale.

float32     4 bytes a value, little-endian, without loss. Decoding returns a view of the data, without a copy.

bfloat16    The upper half of a float32, rounded to nearest even when encoded and widened when decoded. Source:
            ``ml_dtypes``. Decoupled DiLoCo, arXiv:2604.21428, sends outer gradients in bfloat16 and measures no loss from
            it; this service encodes parameters, whose rounding error is larger relative to a displacement.

int8        Steps of 1/127 of the scale; 8.125 bits a value.

int4        Steps of 1/7 of the scale; 4.125 bits a value. A nibble is a number from −7 to 7 in two's complement. −8 is never
            written; it decodes to −8 steps.

e3m0        A sign and three bits of exponent; 4.125 bits a value. A nibble is a sign (8) and e: 0 is zero, 1 to 7 are
            2^(e − 7) of the scale. Values are rounded to the nearest of these. Source: Streaming DiLoCo, arXiv:2501.18512,
            section 3.3 (outer gradients in E3M0).

int2        A sign and one bit of magnitude; 2.125 bits a value. A code is a sign (2) and m: 0 is 3 scales, 1 is 10 scales.
            There is no zero, and values beyond 10 scales are clipped. Alone the codec is coarse; with error feedback what it
            loses comes with the next payloads. Source: 3 and 10 have the ratio of the two magnitudes with which a normal
            distribution loses least (Max, 1960: 0.4528 and 1.5104 standard deviations, divided at 0.9816); two bits with
            error feedback for DiLoCo: MuLoCo, arXiv:2505.23725.

The data of a tensor of n values in blocks is ⌈n/128⌉ scales (bfloat16, little-endian), then the codes of all values.

A scale is the largest magnitude of its block, divided by the largest magnitude of a code and rounded *up* to bfloat16, so
that no value is clipped. It adds 16 bits to each block. A scale is NaN if a value of the block is not finite, which the
receiver then sees, and 0 if it would be below ``SCALE_MIN``: such a block decodes to zeros.

In int2 a magnitude is 10 if it is above 1.2303 times the mean magnitude of its block, where a normal distribution is
divided. The scale is the one with the least squared error, Σ|x|q / Σq² with q of 3 and 10, rounded to nearest. So a block's
residue is shorter than the block, whatever is in it. Sums have ``SUM_LANES``, added in order.

Every step is one float32 operation that IEEE 754 defines, so bytes and values are the same on every machine.

Source: blockwise absolute maximum, as in Streaming DiLoCo, arXiv:2501.18512, section 3.3, and QLoRA, arXiv:2305.14314.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from orchestrator.parameters.codec.registry import Codec, CodecName
from orchestrator.parameters.tensors import Array, raw_bytes

Codes = NDArray[np.uint8]

BLOCK_VALUES = 128
SCALE_MIN = np.float32(2.0**-100)
"""The reciprocal of a smaller scale comes close to the largest float32."""
SUM_LANES = 16
_SCALE_BYTES = 2
_NOT_A_NUMBER = np.uint16(0x7FC0)
_FLOAT32: np.dtype[Any] = np.dtype("<f4")
_BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
_INT8_MAX, _INT4_MAX = 127, 7
_INT2_THRESHOLD = np.float32(0.9816 / 0.79788456)
"""In mean magnitudes: a normal distribution has a mean magnitude of √(2/π) standard deviations."""
_INT2_SMALL, _INT2_LARGE = np.float32(3), np.float32(10)
_INT2_VALUES = np.array([3, 10, -3, -10], np.float32)
"""The value of each code."""
_INT4_VALUES = np.array([*range(8), *range(-8, 0)], np.float32)
"""The value of each nibble."""
_E3M0_MAGNITUDES = np.array([0.0, *(2.0 ** (e - 7) for e in range(1, 8))], np.float32)
_E3M0_VALUES = np.concatenate([_E3M0_MAGNITUDES, -_E3M0_MAGNITUDES])
"""The value of each nibble."""
_E3M0_THRESHOLDS = (_E3M0_MAGNITUDES[:-1] + _E3M0_MAGNITUDES[1:]) / np.float32(2)
"""The smallest magnitudes that are nearer to the next code."""


class FloatCodec:
    """Codes each value by itself, as a floating-point number of this type."""

    unit_values = 1

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self.unit_bytes = (dtype.itemsize,)

    def data_bytes(self, value_count: int) -> int:
        return value_count * self._dtype.itemsize

    def encode(self, values: Array) -> Sequence[memoryview]:
        return (raw_bytes(values, self._dtype),)

    def decode(self, data: memoryview, value_count: int) -> Array:
        return np.frombuffer(data, self._dtype, value_count).astype(np.float32, copy=False)


Stored = NDArray[np.uint16]


class BlockCodec:
    """Codes blocks of 128 values with a common scale.

    encode_blocks  (blocks, 128) float32, and the number of values in each → scales as they are stored, and as many codes
                   as values, one a byte. Values behind the last one of a tensor are 0
    decode_codes   codes → float32 values in units of the scale
    codes_a_byte   1, 2 or 4, the first value in the lowest bits
    """

    unit_values = BLOCK_VALUES

    def __init__(
        self,
        encode_blocks: Callable[[Array, Array], tuple[Stored, Codes]],
        decode_codes: Callable[[Codes], Array],
        codes_a_byte: int,
    ) -> None:
        self._encode_blocks, self._decode_codes, self._codes_a_byte = encode_blocks, decode_codes, codes_a_byte
        self.unit_bytes = (_SCALE_BYTES, BLOCK_VALUES // codes_a_byte)

    def data_bytes(self, value_count: int) -> int:
        return _SCALE_BYTES * _block_count(value_count) + self._code_bytes(value_count)

    def encode(self, values: Array) -> Sequence[memoryview]:
        flat = np.ravel(values).astype(np.float32, copy=False)
        blocks = np.zeros((_block_count(flat.size), BLOCK_VALUES), np.float32)
        blocks.reshape(-1)[: flat.size] = flat
        sizes = np.full(len(blocks), BLOCK_VALUES, np.float32)
        sizes[-1:] = flat.size - BLOCK_VALUES * (len(blocks) - 1)
        stored, codes = self._encode_blocks(blocks, sizes)
        codes = codes.reshape(-1)[: flat.size]
        if (several := self._codes_a_byte) > 1:
            filled = np.zeros(several * self._code_bytes(flat.size), np.uint8)
            filled[: flat.size] = codes
            shifts = np.arange(0, 8, 8 // several, dtype=np.uint8)
            codes = np.bitwise_or.reduce(np.left_shift(filled.reshape(-1, several), shifts, dtype=np.uint8), axis=1)
        return stored.astype("<u2", copy=False).view(np.uint8).data, codes.data

    def decode(self, data: memoryview, value_count: int) -> Array:
        block_count = _block_count(value_count)
        stored = np.frombuffer(data, "<u2", block_count)
        scales = (stored.astype(np.uint32) << 16).view(np.float32)
        codes = np.frombuffer(data, np.uint8, self._code_bytes(value_count), _SCALE_BYTES * block_count)
        if (several := self._codes_a_byte) > 1:
            shifts = np.arange(0, 8, 8 // several, dtype=np.uint8)
            apart = np.bitwise_and(codes[:, None] >> shifts, (1 << 8 // several) - 1, dtype=np.uint8)
            codes = apart.reshape(-1)[:value_count]
        blocks = np.zeros((block_count, BLOCK_VALUES), np.float32)
        blocks.reshape(-1)[:value_count] = self._decode_codes(codes)
        blocks *= scales[:, None]
        return blocks.reshape(-1)[:value_count]

    def _code_bytes(self, value_count: int) -> int:
        return -(-value_count // self._codes_a_byte)


def _block_count(value_count: int) -> int:
    return -(-value_count // BLOCK_VALUES)


def _scales(largest: Array, magnitude_max: np.float32) -> tuple[Array, NDArray[np.uint16]]:
    """Return the scales of blocks with these largest magnitudes, as float32 and as they are stored."""
    bits = (largest / magnitude_max).astype(np.float32, copy=False).view(np.uint32)
    finite = np.isfinite(largest)
    stored = ((np.where(finite, bits, np.uint32(0)) + np.uint32(0xFFFF)) >> 16).astype(np.uint16)
    scales = (stored.astype(np.uint32) << 16).view(np.float32)
    stored = np.where(scales < SCALE_MIN, np.uint16(0), stored)
    stored = np.where(finite, stored, _NOT_A_NUMBER)
    return (stored.astype(np.uint32) << 16).view(np.float32), stored


def _scaled(
    magnitude_max: float, encode_codes: Callable[[Array], Codes], blocks: Array, _: Array
) -> tuple[Stored, Codes]:
    """Code blocks in units of a scale by which no value is above ``magnitude_max``."""
    scales, stored = _scales(np.abs(blocks).max(axis=1, initial=0.0), np.float32(magnitude_max))
    usable = np.isfinite(scales) & (scales > 0)
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=usable)
    with np.errstate(invalid="ignore"):
        return stored, encode_codes(np.where(usable[:, None], blocks * inverse[:, None], np.float32(0)))


def _encode_int2(blocks: Array, sizes: Array) -> tuple[Stored, Codes]:
    magnitudes = np.abs(blocks)
    with np.errstate(invalid="ignore", over="ignore"):
        thresholds = _summed(magnitudes) * (_INT2_THRESHOLD / sizes)
        is_large = magnitudes > thresholds[:, None]
        total = _summed(magnitudes * np.where(is_large, _INT2_LARGE, _INT2_SMALL))
        large = is_large.sum(axis=1).astype(np.float32)
        scales = total / (np.float32(9) * (sizes - large) + np.float32(100) * large)
        bits = scales.view(np.uint32)
        stored = ((bits + np.uint32(0x7FFF) + (bits >> 16 & np.uint32(1))) >> 16).astype(np.uint16)
    stored = np.where((stored.astype(np.uint32) << 16).view(np.float32) < SCALE_MIN, np.uint16(0), stored)
    stored = np.where(np.isfinite(scales), stored, _NOT_A_NUMBER)
    codes = np.bitwise_or(is_large, np.signbit(blocks).astype(np.uint8) << 1, dtype=np.uint8)
    return stored, np.where(((stored == 0) | (stored == _NOT_A_NUMBER))[:, None], np.uint8(0), codes)


def _summed(blocks: Array) -> Array:
    """Return the sum of each block: its lanes first, then these in order, all in float32."""
    lanes = np.add.reduce(blocks.reshape(len(blocks), BLOCK_VALUES // SUM_LANES, SUM_LANES), axis=1)
    total = np.zeros(len(blocks), np.float32)
    for lane in range(SUM_LANES):
        total += lanes[:, lane]
    return total


def _decode_int2(codes: Codes) -> Array:
    return _INT2_VALUES[codes]


def _encode_int8(units: Array) -> Codes:
    return np.clip(np.rint(units), -_INT8_MAX, _INT8_MAX).astype(np.int8).view(np.uint8)


def _decode_int8(codes: Codes) -> Array:
    return codes.view(np.int8).astype(np.float32)


def _encode_int4(units: Array) -> Codes:
    codes = np.clip(np.rint(units), -_INT4_MAX, _INT4_MAX).astype(np.int8).view(np.uint8)
    return np.bitwise_and(codes, 0xF, dtype=np.uint8)


def _decode_int4(codes: Codes) -> Array:
    return _INT4_VALUES[codes]


def _encode_e3m0(units: Array) -> Codes:
    magnitudes = np.searchsorted(_E3M0_THRESHOLDS, np.abs(units).reshape(-1), side="right").reshape(units.shape)
    signs = np.where((units < 0) & (magnitudes > 0), np.uint8(8), np.uint8(0))
    return np.bitwise_or(magnitudes.astype(np.uint8), signs, dtype=np.uint8)


def _decode_e3m0(codes: Codes) -> Array:
    return _E3M0_VALUES[codes]


CODECS: Mapping[CodecName, Codec] = {
    "float32": FloatCodec(_FLOAT32),
    "bfloat16": FloatCodec(_BFLOAT16),
    "int8": BlockCodec(partial(_scaled, _INT8_MAX, _encode_int8), _decode_int8, codes_a_byte=1),
    "int4": BlockCodec(partial(_scaled, _INT4_MAX, _encode_int4), _decode_int4, codes_a_byte=2),
    "e3m0": BlockCodec(partial(_scaled, 1.0, _encode_e3m0), _decode_e3m0, codes_a_byte=2),
    "int2": BlockCodec(_encode_int2, _decode_int2, codes_a_byte=4),
}
