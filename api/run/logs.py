"""Read the logs of a job's processes from the run's folder: the last lines, then what is added.

Follows a logbook while it is written and rotated, and then the island's next incarnation. ``read`` returns what is there
now and does not wait. Of logs on other machines' disks, the copies of their last parts are read (``runtime.head_copies``).
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from api.run.folder import Run, open_below
from api.schemas import Log
from orchestrator.errors import NotFound
from orchestrator.system.logbook import Logbook, logbooks
from orchestrator.system.run_folder import ISLAND_LOGS, LOGS

CHUNK_BYTES = 256 * 1024
TAIL_BYTES_MAX = 8 << 20
"""How many bytes of each half of a log are read at most: more than logbooks let them grow."""


def logs_of(run: Run) -> list[Log]:
    """Return all logs of the job, islands first."""
    listed = []
    for book in logbooks(run.folder):
        with suppress(OSError):  # it was just removed or rotated, or is not a log at all
            with opened(book, book.path) as file:
                about = os.fstat(file.fileno())
            older = 0
            with suppress(OSError), opened(book, book.older) as file:
                older = os.fstat(file.fileno()).st_size
            size = about.st_size + older
            listed.append(Log(source=book.source, incarnation=book.number, bytes=size, written_at=about.st_mtime))
    return listed


def newest(run: Run, source: str, incarnation: int | None = None) -> Logbook:
    """Return the logbook of this source, by default of the newest incarnation. Raises NotFound with the existing ones."""
    books = logbooks(run.folder)
    of_source = [book for book in books if book.source == source]
    # an island may have the name of a helper; the helper takes precedence
    of_source = [book for book in of_source if not book.of_island] or of_source
    matches = [book for book in of_source if incarnation in (None, book.number)]
    if matches:
        return matches[-1]
    there = ", ".join(f"{book.source} {book.number}" for book in books)
    folder = run.folder / LOGS / ISLAND_LOGS
    which = source if incarnation is None else f"{source}, incarnation {incarnation},"
    raise NotFound(
        detail=f"Job {run.job} has no log of {which} here.",
        remedy=f"{f'There are {there}. ' if there else ''}An island writes its log to {folder} on its own machine when it "
        f"starts, and the job copies the last part here. `atoll islands {run.job} -o wide` names the machine.",
    )


class LogReader:
    """Reads the last ``tail`` lines of a logbook, and then what is added, also across a rotation."""

    def __init__(self, book: Logbook, tail: int) -> None:
        self.book = book
        self._tail: int | None = tail
        try:
            self._file: BinaryIO = opened(book, book.path)
        except FileNotFoundError:
            raise
        except OSError as error:
            detail = f"The log {book.path} cannot be read: {error.strerror}."
            raise NotFound(
                detail=detail, remedy="There is something else in place of the log: check that path."
            ) from error

    def read(self) -> bytes:
        """Return the bytes that were added since the last read."""
        if self._tail is not None:
            self._file.seek(max(0, os.fstat(self._file.fileno()).st_size - TAIL_BYTES_MAX))
            lines = (self._older() + self._file.read(2 * TAIL_BYTES_MAX)).split(b"\n")
            first_kept = max(0, len(lines) - self._tail - (lines[-1] == b""))
            self._tail = None
            return b"\n".join(lines[first_kept:])
        if more := self._file.read(CHUNK_BYTES):
            return more
        if self._is_the_one_at(self.book.path):
            return b""
        # It was rotated: read what was written to it until then before the new one.
        if more := self._file.read(CHUNK_BYTES):
            return more
        with suppress(OSError):
            fresh = opened(self.book, self.book.path)
            self._file.close()
            self._file = fresh
        return self._file.read(CHUNK_BYTES)

    def close(self) -> None:
        self._file.close()

    def _older(self) -> bytes:
        if self._is_the_one_at(self.book.older):
            return b""  # it was rotated between the two reads
        with suppress(OSError), opened(self.book, self.book.older) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES_MAX))
            return file.read(TAIL_BYTES_MAX)
        return b""

    def _is_the_one_at(self, path: Path) -> bool:
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), path.lstat())
        except OSError:
            return False


def opened(book: Logbook, path: Path) -> BinaryIO:
    """Open one half of a logbook safely, from its run's folder. Raises OSError."""
    folder = path.parents[2 if book.of_island else 1]
    return open_below(folder, str(path.relative_to(folder)))
