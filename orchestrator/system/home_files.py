"""Small files of a home folder, read, locked and replaced as what they should be: regular, short, and the folder's own.

Whatever lies in the place of one is no reason to wait, to fill the memory, or to write elsewhere: a pipe would hold its
reader for ever, a file of gigabytes would be read whole, a link would have its target emptied. Responsible for each of these
being an OSError, which whoever asks takes for a file that cannot be read. Refuses to know what the files say.

Files that hold a secret: read only where nobody else of this machine can read them.

A file that root gives to a group on purpose is one, too: Kubernetes and systemd give secrets so. Refuses to know what they
hold.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from pathlib import Path
from typing import IO

from orchestrator.errors import ConfigurationError


def refuse_unfit(path: Path, what: str, remedy: str) -> None:
    """Raises ConfigurationError for what cannot be read, is empty, or can be read by others.

    ``what`` is who names it (``--token-file``), ``remedy`` is how such a file comes there.
    """
    try:
        about = path.stat()
        with path.open("rb") as file:
            is_empty = not file.read(1)
    except OSError as error:
        raise ConfigurationError(detail=f"{what} {path}: {error.strerror}. {remedy}") from error
    if not stat.S_ISREG(about.st_mode) or is_empty:
        raise ConfigurationError(detail=f"{what} {path} is empty, or no file. {remedy}")
    given_by_root = about.st_uid == 0 != os.geteuid()
    readable = stat.S_IRWXO | (stat.S_IWGRP if given_by_root else stat.S_IRWXG)
    if about.st_mode & readable:
        mode = stat.S_IMODE(about.st_mode)
        raise ConfigurationError(
            detail=f"{what} {path} has the mode {mode:04o}: others may read it. Make it 0600 (chmod 600 {path})."
        )


BYTES_MAX = 1 << 20
"""The longest is a cluster's, with an environment."""


def read(path: Path) -> str:
    """All of the text. Raises OSError for what is no regular file or too long, ValueError for what is no UTF-8."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        _refuse_other_than_regular(file, path)
        content = file.read(BYTES_MAX + 1)
    if len(content) > BYTES_MAX:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return content.decode()


def replace(path: Path, text: str) -> None:
    """The file says this, all at once, for its owner alone. Whatever lay there is gone; a folder is put aside."""
    fresh = path.with_name(f"{path.name}.new")
    _clear(fresh)
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
        file.write(text)
    if path.is_dir() and not path.is_symlink():
        _clear(path)
    os.replace(fresh, path)


def open_lock(path: Path, *, create: bool) -> IO[bytes]:
    """The file to be locked: to look whether it is, or made and written to by who holds it.

    On a disk that is read-only it is one that is there and takes nothing, so that what runs can be ended.
    Raises OSError for what is no regular file of this folder.
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
        raise OSError(errno.EINVAL, "it is no regular file", str(path))


def _clear(path: Path) -> None:
    """Nothing is there any more. A folder may hold something of somebody's."""
    if path.is_dir() and not path.is_symlink():
        os.rename(path, path.with_name(f"{path.name}.damaged-{os.getpid()}-{time.time_ns()}"))
    else:
        path.unlink(missing_ok=True)
