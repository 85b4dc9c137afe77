"""The codec bfloat16: the upper half of a float32, rounded to nearest even on the way out and widened on the way in.

Source: ``ml_dtypes``. Decoupled DiLoCo, arXiv:2604.21428, sends outer gradients so and measures no loss from it; what this
service codes so are parameters, whose rounding is larger beside a displacement.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from orchestrator.parameters.tensors import Array, raw_bytes

_DTYPE: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)


class BFloat16:
    unit_values, unit_bytes = 1, (_DTYPE.itemsize,)

    def data_bytes(self, value_count: int) -> int:
        return value_count * _DTYPE.itemsize

    def encode(self, values: Array) -> Sequence[memoryview]:
        return (raw_bytes(values, _DTYPE),)

    def decode(self, data: memoryview, value_count: int) -> Array:
        return np.frombuffer(data, _DTYPE, value_count).astype(np.float32)


CODEC = BFloat16()
