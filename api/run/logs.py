"""The logs of a job's processes, read from the run's folder: the last lines, then whatever is added.

Responsible for following a logbook while it is written and cut short, and an island's next incarnation after the last one.
It refuses to watch: ``read`` returns what is there now. A log that lies on another machine's disk is not there for it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from pydantic import Field

from api.run.files import open_below
from api.run.folder import Run
from api.schemas import Answer
from orchestrator.errors import NotFound
from orchestrator.system.logbook import Logbook, logbooks

CHUNK_BYTES = 256 * 1024
TAIL_BYTES_MAX = 8 << 20
"""The most bytes read of each of the two halves of a log: more than logbooks let them become."""


class Log(Answer):
    """What one process of a job said."""

    source: str = Field(description="an island, or synchroniser, controller, evaluator")
    incarnation: int = Field(description="which life of the island, or which process of its kind")
    bytes: int
    written_at: float = Field(description="when its last line was written, unix seconds")


class Logs(Answer):
    logs: list[Log]


def logs_of(run: Run) -> list[Log]:
    """All logs of the job, islands first."""
    listed = []
    for book in logbooks(run.folder):
        with suppress(OSError):  # it is removed, or cut short, just now; or no log at all
            with opened(book, book.path) as file:
                about = os.fstat(file.fileno())
            older = 0
            with suppress(OSError), opened(book, book.older) as file:
                older = os.fstat(file.fileno()).st_size
            size = about.st_size + older
            listed.append(Log(source=book.source, incarnation=book.number, bytes=size, written_at=about.st_mtime))
    return listed


def newest(run: Run, source: str, incarnation: int | None = None) -> Logbook:
    """The logbook of this source, of the newest incarnation if none is given. Raises NotFound with what there is."""
    books = logbooks(run.folder)
    of_source = [book for book in books if book.source == source]
    # an island may bear a service's name; the service goes before it
    of_source = [book for book in of_source if not book.of_island] or of_source
    matches = [book for book in of_source if incarnation in (None, book.number)]
    if matches:
        return matches[-1]
    there = ", ".join(f"{book.source} {book.number}" for book in books)
    which = source if incarnation is None else f"{source}, incarnation {incarnation},"
    raise NotFound(
        detail=f"Job {run.job} has no log of {which} here.",
        remedy=f"There are {there}." if there else "It begins with its process, on the disk of the node that runs it.",
    )


class LogReader:
    """The last ``tail`` lines of a logbook, and then what is added, also when it is cut short meanwhile."""

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
                detail=detail, remedy="Something else lies where the log should: look at it there."
            ) from error

    def read(self) -> bytes:
        """The bytes that came since the last read."""
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
        # It became the older half since: what was written to it until then is read before the new one.
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
            return b""  # it was cut short between the two reads
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
    """One half of a logbook, from its run's folder on. Raises OSError."""
    folder = path.parents[2 if book.of_island else 1]
    return open_below(folder, str(path.relative_to(folder)))
