"""The names of the codecs, and what a codec is.

A new codec is an entry in ``codecs.CODECS`` and its name in ``CodecName``. The specification's choices, the wire format,
sizes, laboratory and metrics follow from these two, and so do the tests of ``tests/numerics``, which run over all codecs.

This module imports no numpy: the specification and the command line need only names. ``codecs`` is imported when a codec is
first needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Literal, Protocol, get_args

if TYPE_CHECKING:
    from orchestrator.parameters.tensors import Array

CodecName = Literal["float32", "bfloat16", "int8", "int4", "e3m0", "int2"]
"""The values that a specification's ``synchroniser.wire`` may have."""
CODEC_NAMES: tuple[CodecName, ...] = get_args(CodecName)
EXACT: CodecName = "float32"
"""The codec of the journal, checkpoints and whole values, which keep a merge's result bit for bit. Only it is lossless."""


class Codec(Protocol):
    """A codec of one tensor's values. It has no state, and the same bytes decode to the same bits on every machine.

    The sender can feed back what coding loses: ``values − decode(encode(values))``.
    """

    @property
    def unit_values(self) -> int:
        """The number of values in a unit. Values of different units are coded independently."""
        ...

    @property
    def unit_bytes(self) -> Sequence[int]:
        """The bytes of one unit, by kind (scales, codes). Data holds the first kind of all units, then the next."""
        ...

    def data_bytes(self, value_count: int) -> int:
        """Return the size of ``value_count`` encoded values of one tensor, with scales and padding."""
        ...

    def encode(self, values: Array) -> Sequence[memoryview]:
        """Encode a tensor of any shape in row-major order. The caller writes the returned parts one after another.

        Values are not checked. A value that is not finite decodes to one that is not finite.
        """
        ...

    def decode(self, data: memoryview, value_count: int) -> Array:
        """Decode ``data_bytes(value_count)`` bytes into a flat float32 array, which may be a view of ``data``."""
        ...


@cache
def codec(name: CodecName) -> Codec:
    """Return the codec with this name."""
    registered: Codec = import_module(f"{__package__}.codecs").CODECS[name]
    return registered
