"""Standard output and error of the command line, on any terminal, disk or pipe they may lead to.

Responsible for: characters that an encoding lacks, an output that takes no more, and a terminal that was closed. It does not
know what is printed.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any

from orchestrator.system import printable

CANNOT_REPLACE = ("strict", "surrogateescape")
"""Python's own rules for characters that an encoding lacks; it takes the second one in the locales C, POSIX and C.UTF-8."""


class _Output(io.FileIO):
    """Standard output, which remembers the error by which it refused to be written."""

    refusal: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            type(self).refusal = error
            raise


def prepare() -> None:
    """Replace characters that an encoding lacks, here and in Pythons that this process starts; watch standard output."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in CANNOT_REPLACE:
            stream.reconfigure(errors=printable.ENCODING_ERRORS)
    encoding, _, errors = os.environ.get("PYTHONIOENCODING", "").partition(":")
    if errors in ("", "strict"):
        encoding = encoding or getattr(sys.stdout, "encoding", None) or "utf-8"  # None: of a stream that is none
        os.environ["PYTHONIOENCODING"] = f"{encoding}:replace"
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and out.fileno() == 1:
        out.flush()
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(_Output(1, "w", closefd=False)),
            encoding=out.encoding,
            errors=out.errors,
            line_buffering=out.line_buffering,
            write_through=out.write_through,
        )


def finish() -> None:
    """All that was printed is written. Raises OSError, where Python would end with a traceback and exit code 120."""
    if sys.stdout is not None:
        sys.stdout.flush()


def refusal() -> OSError | None:
    """Why standard output was not written, if it was not."""
    return _Output.refusal


def drop(descriptor: int) -> None:
    """What is written to this standard stream goes nowhere from here on, also what Python writes as it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
