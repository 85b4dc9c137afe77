"""The codec e3m0: a sign and three bits of exponent, blocks of 128 values with a scale. 4.125 bits a value.

A nibble is a sign (8) and e: 0 is zero, 1 to 7 are 2^(e − 7) of the scale. Values go to the nearest of these.

Source: Streaming DiLoCo, arXiv:2501.18512, section 3.3 (outer gradients in E3M0).
"""

from __future__ import annotations

import numpy as np

from orchestrator.parameters.codec.blocks import BlockCodec, Codes
from orchestrator.parameters.tensors import Array

_MAGNITUDES = np.array([0.0, *(2.0 ** (e - 7) for e in range(1, 8))], np.float32)
_VALUES = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
"""By nibble."""
_THRESHOLDS = (_MAGNITUDES[:-1] + _MAGNITUDES[1:]) / np.float32(2)
"""From each on a magnitude is nearer to the next code."""


def _encode_codes(units: Array) -> Codes:
    magnitudes = np.searchsorted(_THRESHOLDS, np.abs(units).reshape(-1), side="right").reshape(units.shape)
    signs = np.where((units < 0) & (magnitudes > 0), np.uint8(8), np.uint8(0))
    return np.bitwise_or(magnitudes.astype(np.uint8), signs, dtype=np.uint8)


def _decode_codes(codes: Codes) -> Array:
    return _VALUES[codes]


CODEC = BlockCodec(1, _encode_codes, _decode_codes, codes_a_byte=2)
