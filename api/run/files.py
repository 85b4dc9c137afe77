"""Open files below a run's folder safely: only regular files of that folder, and nothing else.

A job's processes write there, and they run code that a job named. So nothing there is trusted to be what its name says: a
symbolic link could lead to any file of the service's user, a FIFO would block the reader for ever, and an endless file would
fill the memory. All of these are refused with the reason.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import TypeAdapter

from orchestrator.errors import DataError

_OBJECT: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any])
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


class NotRegular(OSError):
    """There is something other than a regular file at this path."""


def open_below(folder: Path, name: str) -> BinaryIO:
    """Open the regular file ``name`` below ``folder``, following no symbolic link.

    Raises FileNotFoundError, or OSError for anything else. Never blocks.
    """
    *between, last = Path(name).parts
    path = folder / name
    try:
        place = os.open(folder, _FOLDER)
        try:
            for part in between:
                inner = os.open(part, _FOLDER, dir_fd=place)
                os.close(place)
                place = inner
            if not stat.S_ISREG(os.stat(last, dir_fd=place, follow_symlinks=False).st_mode):
                raise NotRegular(errno.EINVAL, "it is not a regular file", str(path))
            descriptor = os.open(last, _FILE, dir_fd=place)
        finally:
            os.close(place)
    except ValueError as error:  # a NUL in the name
        raise NotRegular(errno.EINVAL, str(error), str(path)) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # it was replaced in between
        os.close(descriptor)
        raise NotRegular(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def is_there(folder: Path, name: str) -> bool:
    """Return whether there is such a file, and it can be opened."""
    with suppress(OSError), open_below(folder, name):
        return True
    return False


def read_below(folder: Path, name: str, bytes_max: int) -> bytes:
    """Return the whole file. Raises FileNotFoundError if it is missing, DataError if it is unreadable or too long."""
    path = folder / name
    try:
        with open_below(folder, name) as file:
            content = file.read(bytes_max + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DataError(detail=f"{path} cannot be read: {error.strerror}.") from error
    if len(content) > bytes_max:
        raise DataError(detail=f"{path} exceeds the limit of {bytes_max >> 20} MiB.")
    return content


def parsed(content: bytes, path: Path) -> dict[str, Any]:
    """Return the JSON object in the content. Raises DataError for anything else."""
    try:
        return _OBJECT.validate_json(content, strict=True)
    except ValueError as error:
        raise DataError(detail=f"{path} is not a JSON object: {_first_reason(error)}.") from error


def _first_reason(error: ValueError) -> str:
    reasons: list[dict[str, Any]] = getattr(error, "errors", list)()
    return str(reasons[0]["msg"]).rstrip(".") if reasons else type(error).__name__
