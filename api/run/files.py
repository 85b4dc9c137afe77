"""Files below a run's folder, opened as what they should be: regular files of that folder, and nothing else.

A job's processes write there, and code that a job named runs in them. What lies there is therefore never trusted to be
what its name says: a symbolic link could lead to any file of the service's user, a FIFO would hold the reader for ever, a
file without end would fill the memory. Responsible for such a thing being refused with the reason. Refuses to know what
files say.
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
    """Something else lies where a regular file should."""


def open_below(folder: Path, name: str) -> BinaryIO:
    """The regular file ``name`` below ``folder``, with no symbolic link on the way from there.

    Raises FileNotFoundError, and OSError for anything else that cannot be opened so. Never waits.
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
                raise NotRegular(errno.EINVAL, "it is no regular file", str(path))
            descriptor = os.open(last, _FILE, dir_fd=place)
        finally:
            os.close(place)
    except ValueError as error:  # a NUL in the name
        raise NotRegular(errno.EINVAL, str(error), str(path)) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # it was exchanged in between
        os.close(descriptor)
        raise NotRegular(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(descriptor, "rb")


def is_there(folder: Path, name: str) -> bool:
    """Whether there is such a file, which can be opened."""
    with suppress(OSError), open_below(folder, name):
        return True
    return False


def read_below(folder: Path, name: str, bytes_max: int) -> bytes:
    """All of the file. Raises FileNotFoundError where nothing is there, DataError for what cannot be read or is too long."""
    path = folder / name
    try:
        with open_below(folder, name) as file:
            content = file.read(bytes_max + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DataError(detail=f"{path} cannot be read: {error.strerror}.") from error
    if len(content) > bytes_max:
        raise DataError(detail=f"{path} has more than the {bytes_max >> 20} MiB that such a file may have.")
    return content


def parsed(content: bytes, path: Path) -> dict[str, Any]:
    """The JSON object that the content is. Raises DataError for anything else, however it is broken."""
    try:
        return _OBJECT.validate_json(content, strict=True)
    except ValueError as error:
        raise DataError(detail=f"{path} is no JSON object: {_first_reason(error)}.") from error


def _first_reason(error: ValueError) -> str:
    reasons: list[dict[str, Any]] = getattr(error, "errors", list)()
    return str(reasons[0]["msg"]).rstrip(".") if reasons else type(error).__name__
