"""Checksums of a payload: crc32c of each range, and of all of them one composite.

The composite is the crc32c of the ranges' own checksums, as object stores compute it for uploads in parts: whoever has
verified the ranges, in any order and from several servers, has verified the whole without reading it a second time.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from crc32c import crc32c

MIB = 1 << 20
RANGE_BYTES_MIN = 4 * MIB
RANGE_BYTES_MAX = 16 * MIB
RANGES_WANTED = 64
"""Enough for eight streams of which one is slow; beyond it ranges grow."""


def range_bytes_of(size: int) -> int:
    """The size of a range in a payload of this size, a multiple of 1 MiB."""
    return min(RANGE_BYTES_MAX, max(RANGE_BYTES_MIN, size // RANGES_WANTED // MIB * MIB))


def checksum(content: memoryview, before: int = 0) -> int:
    """The crc32c of these bytes, after those that have the checksum ``before``."""
    return crc32c(content, before)


def range_checksums(content: memoryview, range_bytes: int) -> tuple[int, ...]:
    """Of each range in order; an empty payload has one empty range."""
    return tuple(checksum(content[at : at + range_bytes]) for at in range(0, max(1, len(content)), range_bytes))


def composite(checksums: Sequence[int]) -> int:
    return crc32c(struct.pack(f"!{len(checksums)}I", *checksums))
