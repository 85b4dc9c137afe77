"""The disk interface of a job's tape and journal, and the real disk. They touch no file but through it.

A simulation puts another disk in its place, which fails, tears or forgets as disks do (``tests/swarm/disk.py``). Source:
POSIX; a file's own ``fsync`` does not make its name durable, its folder's does; after a failed ``fsync`` the pages may be
gone and count as clean (Linux), so the caller must write anew and not ask again.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Protocol

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class HeldFile(Protocol):
    """A file that only one process at a time writes to. ``close``, or the end of the process, releases it."""

    def append(self, data: bytes) -> None:
        """Append data. Raises OSError, and may leave a part written; ValueError once it is closed."""
        ...

    def rewrite(self, start: int, data: bytes) -> None:
        """Overwrite existing data, so that the next sync has to write it again."""
        ...

    def truncate(self, size: int) -> None: ...

    def sync(self) -> None:
        """Make the file's content and name survive a loss of power."""
        ...

    def close(self) -> None:
        """Release the file. Idempotent."""
        ...

    @property
    def closed(self) -> bool: ...


class Disk(Protocol):
    """The interface. Every method raises OSError if it fails, FileNotFoundError if a file to read is missing."""

    def files(self, folder: Path) -> dict[str, int]:
        """Return names and sizes of a folder's files. A missing folder is created, durably."""
        ...

    def hold(self, path: Path, *, new: bool) -> HeldFile:
        """Open a file exclusively. Raises FileExistsError if a new one exists, BlockingIOError while another holds it."""
        ...

    def append(self, path: Path, parts: Sequence[bytes | memoryview]) -> None:
        """Append data; a missing file is created. A failure may leave a part written."""
        ...

    def read(self, path: Path, start: int = 0, count: int = -1) -> bytes:
        """Return ``count`` bytes from ``start`` on, or all that follow if ``count`` is -1."""
        ...

    def sync(self, path: Path) -> None:
        """Make the file's content and name survive a loss of power."""
        ...

    def truncate(self, path: Path, size: int) -> None: ...

    def replace(self, path: Path, data: bytes) -> None:
        """Replace the file's content durably; after a failure it has its previous content."""
        ...

    def replace_held(self, path: Path, data: bytes) -> HeldFile:
        """Replace a file that this process holds, and hold the new one in its place: at no time can another process hold it.

        After a failure the file has its previous content. Otherwise a loss of power leaves one of the two contents, the
        new one once it is synced; what was appended to the old one and not synced may be gone.
        """
        ...

    def remove(self, path: Path) -> None:
        """Remove the file, if it exists."""
        ...

    def boot(self) -> str:
        """Return an id of the machine's current boot. Within one boot nothing that was appended is lost."""
        ...


@contextmanager
def discarded_on_error(draft: Path) -> Iterator[None]:
    """Remove the draft if it does not become the file: half of it is of no use, and takes the room that others wait for."""
    try:
        yield
    except BaseException:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


class LocalDisk:
    def files(self, folder: Path) -> dict[str, int]:
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            _sync(folder.parent)
        sizes = {}
        for entry in os.scandir(folder):
            try:
                if entry.is_file():
                    sizes[entry.name] = entry.stat().st_size
            except FileNotFoundError:
                continue  # removed meanwhile
            except OSError as error:
                if error.errno != errno.ELOOP:  # a link that leads in a circle is no file
                    raise
        return sizes

    def hold(self, path: Path, *, new: bool) -> HeldFile:
        path.parent.mkdir(parents=True, exist_ok=True)
        return _LocalFile(path, new=new)

    def append(self, path: Path, parts: Sequence[bytes | memoryview]) -> None:
        with path.open("ab", buffering=0) as file:
            for part in parts:
                _write_all(file, part)

    def read(self, path: Path, start: int = 0, count: int = -1) -> bytes:
        with open(path, "rb", opener=_open_file) as file:
            file.seek(start)
            return file.read(count)

    def sync(self, path: Path) -> None:
        for target in (path, path.parent):
            _sync(target)

    def truncate(self, path: Path, size: int) -> None:
        os.truncate(path, size)

    def replace(self, path: Path, data: bytes | memoryview) -> None:
        beside = path.with_name(f"{path.name}.new")
        with discarded_on_error(beside):
            with beside.open("wb", buffering=0) as file:
                _write_all(file, data)
                os.fsync(file.fileno())
            beside.replace(path)
        _sync(path.parent)

    def replace_held(self, path: Path, data: bytes) -> HeldFile:
        beside = path.with_name(f"{path.name}.next")
        beside.unlink(missing_ok=True)  # what a process left that died here
        file = _LocalFile(beside, new=True)
        with discarded_on_error(beside):
            try:
                file.append(data)
                file.sync_content()
                beside.replace(path)
            except BaseException:
                file.close()
                raise
        return file  # its next sync makes the new name durable

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def boot(self) -> str:
        return BOOT_ID.read_text().strip()


class _LocalFile:
    """An open file, which stays writable even if its folder is removed meanwhile."""

    def __init__(self, path: Path, *, new: bool) -> None:
        self._file = open(path, "xb" if new else "r+b", buffering=0, opener=_open_file)  # noqa: SIM115  (see above)
        self._folder, self._named = path.parent, False
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system lets go of it with the process
        except BlockingIOError:
            self._file.close()
            raise
        self._file.seek(0, os.SEEK_END)

    def append(self, data: bytes) -> None:
        _write_all(self._file, data)

    def rewrite(self, start: int, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.pwrite(self._file.fileno(), rest, start + len(data) - len(rest)) :]

    def truncate(self, size: int) -> None:
        self._file.truncate(size)
        self._file.seek(size)

    def sync_content(self) -> None:
        os.fsync(self._file.fileno())

    def sync(self) -> None:
        self.sync_content()
        if not self._named:
            _sync(self._folder)
            self._named = True

    def close(self) -> None:
        self._file.close()

    @property
    def closed(self) -> bool:
        return self._file.closed


def _open_file(path: str, flags: int) -> int:
    """Open a regular file. Anything else is refused: opening a FIFO would block for ever."""
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", path)
    return descriptor


def _write_all(file: FileIO, data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _sync(target: Path) -> None:
    descriptor = os.open(target, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
