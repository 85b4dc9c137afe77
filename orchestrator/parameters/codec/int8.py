"""The codec int8: blocks of 128 values with a scale, in steps of 1/127 of it. 8.125 bits a value."""

from __future__ import annotations

import numpy as np

from orchestrator.parameters.codec.blocks import BlockCodec, Codes
from orchestrator.parameters.tensors import Array

_LARGEST = 127


def _encode_codes(units: Array) -> Codes:
    return np.clip(np.rint(units), -_LARGEST, _LARGEST).astype(np.int8).view(np.uint8)


def _decode_codes(codes: Codes) -> Array:
    return codes.view(np.int8).astype(np.float32)


CODEC = BlockCodec(_LARGEST, _encode_codes, _decode_codes, codes_a_byte=1)
