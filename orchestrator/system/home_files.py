"""Read, lock and replace small files of a home folder safely, and check that secret files are private.

Something else in place of such a file must not block, fill the memory, or redirect a write: a pipe would block its reader
for ever, a huge file would be read whole, and a link's target would be truncated. Each of these is an OSError, as for any
unreadable file.

``refuse_unfit`` checks a file with a secret: other users must not be able to read it. A file of root that is readable by
its group is accepted, because Kubernetes and systemd provide secrets that way.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from pathlib import Path
from typing import IO

from orchestrator.errors import ConfigurationError
from orchestrator.system.disk import discarded_on_error


def refuse_unfit(path: Path, what: str, remedy: str) -> None:
    """Raise ConfigurationError if the file is unreadable, empty, or readable by other users.

    ``what`` is the option that names it (``--token-file``), ``remedy`` says how to create it.
    """
    try:
        about = path.stat()
        with open(_opened(path), "rb") as file:
            is_empty = not file.read(1)
    except OSError as error:
        raise ConfigurationError(detail=f"{what} {path}: {error.strerror}. {remedy}") from error
    if not stat.S_ISREG(about.st_mode) or is_empty:
        raise ConfigurationError(detail=f"{what} {path} is empty or not a file. {remedy}")
    given_by_root = about.st_uid == 0 != os.geteuid()
    readable = stat.S_IRWXO | (stat.S_IWGRP if given_by_root else stat.S_IRWXG)
    if about.st_mode & readable:
        mode = stat.S_IMODE(about.st_mode)
        raise ConfigurationError(
            detail=f"{what} {path} has mode {mode:04o}, so other users can read it. Run chmod 600 {path}."
        )


BYTES_MAX = 1 << 20
"""The largest such file is a cluster's, which holds an environment."""


def read(path: Path) -> str:
    """Return the whole text. Raises OSError if it is not a regular file or too long, ValueError if it is not UTF-8."""
    return read_bytes(path).decode()


def read_bytes(path: Path) -> bytes:
    """Return the whole content. Raises OSError if it is not a regular file or too long."""
    with open(_opened(path), "rb") as file:
        _refuse_other_than_regular(file, path)
        content = file.read(BYTES_MAX + 1)
    if len(content) > BYTES_MAX:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return content


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def replace(path: Path, text: str) -> None:
    """Replace the file atomically, readable by its owner only. A folder in its place is moved aside."""
    fresh = path.with_name(f"{path.name}.new")
    _clear(fresh)
    with discarded_on_error(fresh):
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
            file.write(text)
        if path.is_dir() and not path.is_symlink():
            _clear(path)
        os.replace(fresh, path)


def open_lock(path: Path, *, create: bool) -> IO[bytes]:
    """Open a file for locking: with ``create`` to hold and write it, else to check whether it is locked.

    On a read-only disk an existing file is opened for reading, so that running processes can still be stopped. Raises
    OSError if it is not a regular file of this folder.
    """
    careful = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    writable = create
    try:
        descriptor = os.open(path, (os.O_RDWR | os.O_CREAT if create else os.O_RDONLY) | careful, 0o600)
    except OSError as error:
        if not create or error.errno != errno.EROFS:
            raise
        writable = False
        descriptor = os.open(path, os.O_RDONLY | careful)
    file = os.fdopen(descriptor, "rb+" if writable else "rb", buffering=0)
    try:
        _refuse_other_than_regular(file, path)
    except OSError:
        file.close()
        raise
    return file


def _refuse_other_than_regular(file: IO[bytes], path: Path) -> None:
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def _clear(path: Path) -> None:
    """Remove the file. A folder is renamed instead, because it may hold someone's data."""
    if path.is_dir() and not path.is_symlink():
        os.rename(path, path.with_name(f"{path.name}.damaged-{os.getpid()}-{time.time_ns()}"))
    else:
        path.unlink(missing_ok=True)
