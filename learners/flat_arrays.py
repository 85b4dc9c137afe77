"""Named arrays of any type as one run of bytes, and a table that says what lies in it.

Nothing is converted and nothing parsed: a state has moments, counters and keys of whatever types its optimizer chose. Copies
are NumPy's, which lets other threads run meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from learners.contract import Arrays
from orchestrator.errors import DataError

ALIGNMENT_BYTES = 64
"""Of each array's begin: a cache line, and more than any type needs."""


class ArrayPlace(NamedTuple):
    """One array's name, type and shape; the arrays lie behind each other in the table's order, each aligned."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def byte_count(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def padded_byte_count(self) -> int:
        return -(-self.byte_count // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def flattened(arrays: Mapping[str, np.ndarray]) -> tuple[tuple[ArrayPlace, ...], memoryview]:
    """The table, and the bytes, row-major."""
    table = tuple(ArrayPlace(name, array.dtype, array.shape) for name, array in sorted(arrays.items()))
    content = np.zeros(sum(place.padded_byte_count for place in table), np.uint8)
    at = 0
    for place in table:
        content[at : at + place.byte_count] = np.ravel(arrays[place.name]).view(np.uint8)
        at += place.padded_byte_count
    return table, content.data


def restored(table: tuple[ArrayPlace, ...], content: memoryview) -> Arrays:
    """The arrays, as views of ``content``. Raises DataError if the table is of other bytes."""
    size = sum(place.padded_byte_count for place in table)
    if size != len(content):
        raise DataError(detail=f"arrays of {size:,} bytes are announced, and {len(content):,} came.")
    arrays: Arrays = {}
    at = 0
    for place in table:
        part = np.frombuffer(content[at : at + place.byte_count], np.uint8)
        arrays[place.name] = part.view(place.dtype).reshape(place.shape)
        at += place.padded_byte_count
    return arrays
