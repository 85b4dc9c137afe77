"""What the journal needs of a disk, and the real one. The only place of this package that touches files.

A test puts another disk in its place, which fails, tears or forgets as disks do. Source: POSIX; a file's own ``fsync`` does
not make its name durable, its folder's does; after a failed ``fsync`` the pages may be gone and count as clean (Linux), so
whoever calls must write anew and not ask again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol


class Disk(Protocol):
    """Every method raises OSError when it fails."""

    def files(self, folder: Path) -> dict[str, int]:
        """Names and sizes of a folder's files; the folder is made if it is missing."""
        ...

    def append(self, path: Path, parts: Sequence[bytes]) -> None:
        """Write behind what is there; the file is made if it is missing. A failure may leave a part."""
        ...

    def read(self, path: Path, start: int, count: int) -> bytes: ...

    def sync(self, path: Path) -> None:
        """The file's content, and its name, survive a loss of power."""
        ...

    def truncate(self, path: Path, size: int) -> None: ...

    def remove(self, path: Path) -> None: ...


class LocalDisk:
    def files(self, folder: Path) -> dict[str, int]:
        folder.mkdir(parents=True, exist_ok=True)
        return {entry.name: entry.stat().st_size for entry in os.scandir(folder) if entry.is_file()}

    def append(self, path: Path, parts: Sequence[bytes]) -> None:
        with path.open("ab", buffering=0) as file:
            for part in parts:
                rest = memoryview(part)
                while rest:
                    rest = rest[file.write(rest) :]

    def read(self, path: Path, start: int, count: int) -> bytes:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(count)

    def sync(self, path: Path) -> None:
        for target in (path, path.parent):
            descriptor = os.open(target, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def truncate(self, path: Path, size: int) -> None:
        os.truncate(path, size)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)
