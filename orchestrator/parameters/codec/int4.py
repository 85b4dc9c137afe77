"""The codec int4: blocks of 128 values with a scale, in steps of 1/7 of it. 4.125 bits a value.

A nibble is a number from −7 to 7 in two's complement; −8 is not written, and read as what it says.
"""

from __future__ import annotations

import numpy as np

from orchestrator.parameters.codec.blocks import BlockCodec, Codes
from orchestrator.parameters.tensors import Array

_LARGEST = 7
_VALUES = np.array([*range(8), *range(-8, 0)], np.float32)
"""By nibble."""


def _encode_codes(units: Array) -> Codes:
    codes = np.clip(np.rint(units), -_LARGEST, _LARGEST).astype(np.int8).view(np.uint8)
    return np.bitwise_and(codes, 0xF, dtype=np.uint8)


def _decode_codes(codes: Codes) -> Array:
    return _VALUES[codes]


CODEC = BlockCodec(_LARGEST, _encode_codes, _decode_codes, codes_a_byte=2)
