"""The codec float32: every value as it is, little-endian. Decoded arrays are views of the bytes, without a copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from orchestrator.parameters.tensors import Array, raw_bytes

_DTYPE = np.dtype("<f4")


class Float32:
    unit_values, unit_bytes = 1, (_DTYPE.itemsize,)

    def data_bytes(self, value_count: int) -> int:
        return value_count * _DTYPE.itemsize

    def encode(self, values: Array) -> Sequence[memoryview]:
        return (raw_bytes(values, _DTYPE),)

    def decode(self, data: memoryview, value_count: int) -> Array:
        return np.frombuffer(data, _DTYPE, value_count).astype(np.float32, copy=False)


CODEC = Float32()
