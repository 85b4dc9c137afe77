"""Blocks of values that share a scale: what the codecs int8, int4 and e3m0 have in common.

    data of a tensor of n values: ⌈n/128⌉ scales (bfloat16, little-endian), then the codes of all values

A scale is the largest magnitude of its block, divided by the largest that codes can express, and rounded *up* to bfloat16:
so no value is clipped, and a block costs 16 bits more. It is NaN where a value of the block is not finite, which the
receiver then sees, and 0 where it would be below ``SCALE_MIN``: such a block decodes to zeros.

Every step is one float32 operation that IEEE 754 defines, so bytes and values are the same on every machine.

Source: blockwise absolute maximum, as in Streaming DiLoCo, arXiv:2501.18512, section 3.3, and QLoRA, arXiv:2305.14314.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from orchestrator.parameters.tensors import Array

BLOCK_VALUES = 128
SCALE_MIN = np.float32(2.0**-100)
"""Below it a reciprocal comes near the end of float32."""
_SCALE_BYTES = 2
_NOT_A_NUMBER = np.uint16(0x7FC0)

Codes = NDArray[np.uint8]


class BlockCodec:
    """A codec of blocks. ``magnitude_max`` is the largest magnitude of a code.

    encode_codes   (blocks, 128) float32 in units of the scale → as many codes, one a byte
    decode_codes   and back, in units of the scale
    codes_a_byte   1, or 2: nibbles, the first value in the lower one
    """

    unit_values = BLOCK_VALUES

    def __init__(
        self,
        magnitude_max: float,
        encode_codes: Callable[[Array], Codes],
        decode_codes: Callable[[Codes], Array],
        codes_a_byte: int,
    ) -> None:
        self._magnitude_max = np.float32(magnitude_max)
        self._encode_codes, self._decode_codes, self._codes_a_byte = encode_codes, decode_codes, codes_a_byte
        self.unit_bytes = (_SCALE_BYTES, BLOCK_VALUES // codes_a_byte)

    def data_bytes(self, value_count: int) -> int:
        return _SCALE_BYTES * _block_count(value_count) + self._code_bytes(value_count)

    def encode(self, values: Array) -> Sequence[memoryview]:
        flat = np.ravel(values).astype(np.float32, copy=False)
        blocks = np.zeros((_block_count(flat.size), BLOCK_VALUES), np.float32)
        blocks.reshape(-1)[: flat.size] = flat
        scales, stored = _scales(np.abs(blocks).max(axis=1, initial=0.0), self._magnitude_max)
        usable = np.isfinite(scales) & (scales > 0)
        inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=usable)
        with np.errstate(invalid="ignore"):
            units = np.where(usable[:, None], blocks * inverse[:, None], np.float32(0))
        codes = self._encode_codes(units).reshape(-1)[: flat.size]
        if self._codes_a_byte == 2:
            nibbles = np.zeros(2 * self._code_bytes(flat.size), np.uint8)
            nibbles[: flat.size] = codes
            codes = np.bitwise_or(nibbles[0::2], np.left_shift(nibbles[1::2], 4, dtype=np.uint8), dtype=np.uint8)
        return stored.astype("<u2", copy=False).view(np.uint8).data, codes.data

    def decode(self, data: memoryview, value_count: int) -> Array:
        block_count = _block_count(value_count)
        stored = np.frombuffer(data, "<u2", block_count)
        scales = (stored.astype(np.uint32) << 16).view(np.float32)
        codes = np.frombuffer(data, np.uint8, self._code_bytes(value_count), _SCALE_BYTES * block_count)
        if self._codes_a_byte == 2:
            codes = np.stack((codes & 0xF, codes >> 4), axis=1).reshape(-1)[:value_count]
        blocks = np.zeros((block_count, BLOCK_VALUES), np.float32)
        blocks.reshape(-1)[:value_count] = self._decode_codes(codes)
        blocks *= scales[:, None]
        return blocks.reshape(-1)[:value_count]

    def _code_bytes(self, value_count: int) -> int:
        return -(-value_count // self._codes_a_byte)


def _block_count(value_count: int) -> int:
    return -(-value_count // BLOCK_VALUES)


def _scales(largest: Array, magnitude_max: np.float32) -> tuple[Array, NDArray[np.uint16]]:
    """The scales of blocks by their largest magnitudes: as float32, and as they are stored."""
    bits = (largest / magnitude_max).astype(np.float32, copy=False).view(np.uint32)
    finite = np.isfinite(largest)
    stored = ((np.where(finite, bits, np.uint32(0)) + np.uint32(0xFFFF)) >> 16).astype(np.uint16)
    scales = (stored.astype(np.uint32) << 16).view(np.float32)
    stored = np.where(scales < SCALE_MIN, np.uint16(0), stored)
    stored = np.where(finite, stored, _NOT_A_NUMBER)
    return (stored.astype(np.uint32) << 16).view(np.float32), stored
