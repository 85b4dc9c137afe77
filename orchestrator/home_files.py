"""Small files of a home folder, read, locked and replaced as what they should be: regular, short, and the folder's own.

Whatever lies in the place of one is no reason to wait, to fill the memory, or to write elsewhere: a pipe would hold its
reader for ever, a file of gigabytes would be read whole, a link would have its target emptied. Responsible for each of these
being an OSError, which whoever asks takes for a file that cannot be read. Refuses to know what the files say.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from pathlib import Path
from typing import IO

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
