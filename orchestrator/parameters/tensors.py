"""Named float32 tensors, as the data plane passes them around, and their digest."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

Array = NDArray[np.float32]
Tensors = Mapping[str, Array]
"""Tensors by name."""


_hash_threads = blake3.AUTO


def _hash_alone() -> None:
    """Hash in the calling thread from now on: hashing threads do not survive a fork."""
    global _hash_threads
    _hash_threads = 1


os.register_at_fork(after_in_child=_hash_alone)


def digest(tensors: Tensors) -> str:
    """Return 32 hexadecimal digits that identify these tensors bit for bit, in any order."""
    state = blake3(max_threads=_hash_threads)
    for name in sorted(tensors):
        array = tensors[name]
        state.update(json.dumps([name, array.dtype.str, list(array.shape)]).encode())
        state.update(raw_bytes(array, array.dtype))
    return state.hexdigest(length=16)


def shapes(tensors: Tensors) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in tensors.items()}


def raw_bytes(array: Array, dtype: np.dtype[Any]) -> memoryview:
    """Return the values as ``dtype``, row-major, without a copy if dtype and layout allow it."""
    return np.ravel(array).astype(dtype, copy=False).view(np.uint8).data
