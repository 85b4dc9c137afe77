"""Numbers of any length, seven bits a byte, the lowest first: as protobuf and Thrift's compact protocol write them.

Source: Protocol Buffers, "Encoding", base 128 varints.
"""

from __future__ import annotations


def read_varint(content: bytes | memoryview, at: int) -> tuple[int, int]:
    """Return the number that begins at byte ``at``, and where the next byte is.

    Raises ValueError for one of more than 64 bits, IndexError where the content ends within it.
    """
    value = shift = 0
    while True:
        byte = content[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("a number does not end")
