"""The interface of a codec."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from orchestrator.parameters.tensors import Array


class Codec(Protocol):
    """The codec of one tensor's values. Stateless, and the same on every machine: bytes decode to the same bits.

    What is lost by coding can be fed back by the sender: it is ``values − decode(encode(values))``.
    """

    @property
    def unit_values(self) -> int:
        """How many values are coded together, and by no others."""
        ...

    @property
    def unit_bytes(self) -> Sequence[int]:
        """The bytes of a unit of each kind that is written of it; all units' of the first kind come before the next."""
        ...

    def data_bytes(self, value_count: int) -> int:
        """How many bytes so many values of one tensor take, scales and padding included."""
        ...

    def encode(self, values: Array) -> Sequence[memoryview]:
        """The bytes of a tensor of any shape, row-major, in parts to be written one after another.

        Values are not judged: one that is not finite decodes to one that is not.
        """
        ...

    def decode(self, data: memoryview, value_count: int) -> Array:
        """The values as a flat float32 array; it may be a view of ``data``, which has ``data_bytes(value_count)`` bytes."""
        ...
