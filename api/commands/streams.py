"""Standard output and error of the command line, on any terminal, disk or pipe.

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
"""Python's handlers for characters that an encoding lacks; the second is the default in the locales C, POSIX and C.UTF-8."""


class _Output(io.FileIO):
    """Standard output that remembers why writing failed."""

    refusal: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            type(self).refusal = error
            raise


def prepare() -> None:
    """Replace characters that an encoding lacks, here and in child processes, and watch standard output."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in CANNOT_REPLACE:
            stream.reconfigure(errors=printable.ENCODING_ERRORS)
    encoding, _, errors = os.environ.get("PYTHONIOENCODING", "").partition(":")
    if errors in ("", "strict"):
        encoding = encoding or getattr(sys.stdout, "encoding", None) or "utf-8"  # None: not a real stream
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
    """Flush all output. Raises OSError where Python would end with a traceback and exit code 120."""
    if sys.stdout is not None:
        sys.stdout.flush()


def refusal() -> OSError | None:
    """Return the error with which writing standard output failed, or None."""
    return _Output.refusal


def drop(descriptor: int) -> None:
    """Discard everything written to this standard stream from now on, including what Python writes as it exits."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
