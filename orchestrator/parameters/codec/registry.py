"""The codecs by name. Only this module lists them; a codec's own module is imported when it is first needed.

So the specification and the command line, which know names only, do not load numpy.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from orchestrator.parameters.codec.interface import Codec

CodecName = Literal["float32", "bfloat16", "int8", "int4", "e3m0"]
"""What a specification's ``synchroniser.wire`` may be. Each is the name of a module beside this one."""
CODEC_NAMES: tuple[CodecName, ...] = get_args(CodecName)
EXACT: CodecName = "float32"
"""Of journal, checkpoints and whole values, which are bit for bit what a merge made. Only this codec loses nothing."""


@cache
def codec(name: CodecName) -> Codec:
    """The codec of this name."""
    registered: Codec = import_module(f"{__package__}.{name}").CODEC
    return registered
