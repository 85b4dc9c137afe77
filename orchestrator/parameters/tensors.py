"""Named float32 tensors, as every part of the data plane hands them around, and their digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
ByteArray = NDArray[np.uint8]
"""A payload as calls between processes carry it: without a copy where ``bytes`` would be copied under Python's lock."""
Tensors = Mapping[str, Array]
"""Tensors by name."""


def digest(tensors: Tensors) -> str:
    """Names these tensors, bit for bit, whatever order they come in: 32 hexadecimal digits."""
    state = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        array = tensors[name]
        state.update(json.dumps([name, array.dtype.str, list(array.shape)]).encode())
        state.update(raw_bytes(array, array.dtype))
    return state.hexdigest()


def byte_array(payload: memoryview) -> ByteArray:
    """The same memory."""
    return np.frombuffer(payload, np.uint8)


def shapes(tensors: Tensors) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in tensors.items()}


def raw_bytes(array: Array, dtype: np.dtype[Any]) -> memoryview:
    """The values as ``dtype``, row-major, without a copy where dtype and layout allow it."""
    return np.ravel(array).astype(dtype, copy=False).view(np.uint8).data
