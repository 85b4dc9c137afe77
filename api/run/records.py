"""Read a job's tape forward in whole lines, from any record on, while the job still writes it.

Finds a place in the file and reads nothing twice. It does not interpret records and does not wait: ``read`` returns what is
there now, and the caller decides when to call again. A last line without its end is ignored; it may still be written, or be
what a crash left.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from api.run.folder import open_below, read_below
from orchestrator.core.vocabulary import FIRST_EPOCH
from orchestrator.errors import DataError
from orchestrator.tape.schema import (
    BEGINNING_BYTES,
    CONTINUATION_BYTES,
    SEGMENT_BYTES_MAX,
    Continuation,
    Mark,
    continuation_at,
    epoch_at,
)
from orchestrator.tape.sealing import begin_of, require_chain, require_link, unsealed
from orchestrator.tape.storage import sealed_path

CHUNK_BYTES = 256 * 1024
"""The most that one ``read`` takes from the disk: a few hundred records, so that a long tape blocks no thread."""

LINE_BYTES_MAX = 16 << 20
"""The longest record. Longer data without a line end is damage, and nothing behind it is read."""
NOWHERE = Mark(0, 0, "")
_NUMBER = re.compile(rb'\{"n":(\d{1,18}),')
_EVENT = re.compile(rb'\{"n":\d{1,18},"event":\{"type":"(\w+)"')
_CHECKSUM = re.compile(rb',"crc":"([0-9a-f]{8})"\}$')
_CONTROL = re.compile(rb"[\x00-\x1f]")
_FOOTER = b'{"end":'


class TapeReader:
    """Reads the tape at ``path``: from its header on, or only the records after number ``after``.

    If a job loses its tape and goes on with another one, the reader goes on at the header of that. ``epoch`` is the one in
    which the tape begins. A tape that took another's place is read from its beginning if it ends before ``after``.
    """

    def __init__(self, path: Path, after: int = 0) -> None:
        self.path = path
        self.n = after
        """The number of the last record read, or the starting point."""
        self.sealed = False
        """Whether the footer was read. Nothing follows it."""
        self.epoch: int | None = None
        self._segment: int | None = 1 if after == 0 else None
        self._offset = 0
        self._behind_header = False
        """Whether ``_offset`` counts from the end of the segment's header, which was not read yet."""
        self._lines: bytes | None = None
        """The sealed segment that is being read."""
        self._seen: tuple[int, int, int] | None = None
        """The plain segment when it had nothing new."""
        self._endless = False

    def read(self) -> list[bytes]:
        """Return the new whole lines without line ends; none if there is nothing new, or no readable tape.

        Raises DataError, with its path, for a sealed segment that is missing or damaged.
        """
        with suppress(OSError):
            about = self.path.lstat()
            state = about.st_ino, about.st_size, about.st_mtime_ns
            if not self._endless and state != self._seen:
                with open_below(self.path.parent, self.path.name) as file:
                    lines = self._read(file, about.st_size)
                self._seen = None if lines else state
                return lines
        return []

    def _read(self, file: BinaryIO, size: int) -> list[bytes]:
        beginning = file.read(BEGINNING_BYTES)
        newest, epoch = continuation_at(beginning), epoch_at(beginning)
        number = newest.segment if newest else 1
        if epoch != self.epoch is not None:
            if epoch is None:
                return []  # the header of the tape that takes its place is not written yet
            self._begin_again()
        self.epoch = epoch
        if self._segment is None and (epoch or 0) > FIRST_EPOCH and number_at_end(self.path) < self.n:
            self._begin_again()
        if self._segment is None:
            self._find(file, size, newest)
        while newest is not None and self._segment is not None and self._segment < number:
            if lines := self._read_sealed(self._segment, newest):
                return self._taken(lines)
        if self._segment != number:
            return []  # there is another tape in its place
        if self._behind_header:
            file.seek(0)
            self._offset, self._behind_header = self._offset + len(file.readline(LINE_BYTES_MAX)), False
        file.seek(self._offset)
        chunk = b""
        while b"\n" not in chunk and len(chunk) < LINE_BYTES_MAX and (more := file.read(CHUNK_BYTES)):
            chunk += more
        self._endless = b"\n" not in chunk and len(chunk) >= LINE_BYTES_MAX
        return self._taken(chunk[: chunk.rfind(b"\n") + 1])

    def _begin_again(self) -> None:
        self.n, self.sealed, self._segment, self._offset, self._behind_header = 0, False, 1, 0, False
        self._lines = None

    def _taken(self, whole: bytes) -> list[bytes]:
        self._offset += len(whole)
        lines = whole.split(b"\n")[:-1]
        for line in lines:
            self.n = max(self.n, number_of(line) or 0)
        self.sealed = self.sealed or any(line.startswith(_FOOTER) for line in lines[-1:])
        return lines

    # ── sealed segments ───────────────────────────────────────────────────────────────────────────────────────────

    def _find(self, file: BinaryIO, size: int, newest: Continuation | None) -> None:
        """Find the first line after record ``n``: its segment by bisection, and its place there likewise."""
        if newest is None or self.n >= newest.after.count:
            self._segment, self._offset = newest.segment if newest else 1, offset_after(file, self.n, size)
            return
        low, high = (
            1,
            newest.segment,
        )  # the segment ``low`` begins before, or with, what is looked for, ``high`` does not
        while high - low > 1:
            middle = (low + high) // 2
            begin = begin_of(*unsealed(middle, self._load))
            low, high = (middle, high) if begin is not None and begin.after.count <= self.n else (low, middle)
        _, lines = unsealed(low, self._load)
        self._segment, self._offset = low, offset_after(BytesIO(lines), self.n, len(lines))

    def _read_sealed(self, number: int, newest: Continuation) -> bytes:
        """Return the next whole lines of the sealed segment; none at its end, and then the next segment is the current."""
        if self._lines is None:
            self._lines = self._checked(number, newest)
        if self._behind_header:
            self._offset, self._behind_header = self._offset + self._lines.find(b"\n") + 1, False
        if self._offset < len(self._lines):
            end = self._lines.rfind(b"\n", self._offset, self._offset + CHUNK_BYTES) + 1
            return self._lines[self._offset : end or self._lines.find(b"\n", self._offset) + 1]
        # what was read of the plain segment behind the place of the cut is the beginning of the next one
        self._segment, self._offset, self._behind_header = number + 1, self._offset - len(self._lines), True
        self._lines = None
        return b""

    def _checked(self, number: int, newest: Continuation) -> bytes:
        """Return the lines of a sealed segment that is the one which its successor continues. Raises DataError."""
        try:
            name, lines = unsealed(number, self._load)
            link = newest if number + 1 == newest.segment else begin_of(*unsealed(number + 1, self._load))
            require_link(name, lines, link.after if link is not None else NOWHERE)
        except DataError:
            require_chain(newest, self._load)
            raise
        return lines

    def _load(self, number: int) -> tuple[str, bytes]:
        path = sealed_path(self.path, number)
        try:
            return str(path), read_below(self.path.parent, str(path.relative_to(self.path.parent)), SEGMENT_BYTES_MAX)
        except FileNotFoundError as error:
            raise DataError(detail=f"{path} is missing, and {self.path} continues it.") from error


def number_of(line: bytes) -> int | None:
    """Return the number of the record in this line; None for a header or a footer."""
    match = _NUMBER.match(line)
    return int(match[1]) if match else None


def event_type(line: bytes) -> str | None:
    """Return the type of the event in this line; None for a header or a footer."""
    match = _EVENT.match(line)
    return match[1].decode() if match else None


def number_at_end(path: Path) -> int:
    """Return the number of the newest whole record on the tape; 0 if there is none, or it cannot be read."""
    with suppress(OSError), open_below(path.parent, path.name) as file:
        newest = continuation_at(file.read(CONTINUATION_BYTES))
        file.seek(max(0, path.lstat().st_size - CHUNK_BYTES))
        numbers = (number_of(line) for line in reversed(file.read().split(b"\n")[:-1]))
        return next((n for n in numbers if n is not None), newest.after.count if newest else 0)
    return 0


def sound_records(lines: Iterable[bytes], without: Collection[str] = ()) -> Iterator[tuple[int, bytes]]:
    """Yield number and line of each record. Skip headers, footers, damaged lines, and events of types ``without``."""
    for line in lines:
        number = number_of(line)
        if number is not None and is_sound(line) and not (without and event_type(line) in without):
            yield number, line


def is_sound(line: bytes) -> bool:
    """Return whether the line's checksum is right, or, for a line without one, whether it looks complete."""
    if match := _CHECKSUM.search(line):
        return zlib.crc32(line[: match.start()] + b"}") == int(match[1], 16)
    with suppress(UnicodeDecodeError):
        return line.endswith(b"}") and not _CONTROL.search(line) and bool(line.decode())
    return False


def offset_after(file: BinaryIO, n: int, size: int) -> int:
    """Return the offset of the first line after record ``n``, by bisection: records are numbered in order.

    Without such a line, return the end of the file's last whole line.
    """
    low, high = 0, size  # lines that begin before ``low`` are not after n, those that begin from ``high`` on are
    while low < high:
        middle = (low + high) // 2
        file.seek(max(0, middle - 1))
        if middle:
            file.readline(LINE_BYTES_MAX)  # to the first beginning of a line at or after the middle
        begin, line = file.tell(), file.readline(LINE_BYTES_MAX)
        if not line.endswith(b"\n") or line.startswith(_FOOTER) or (number_of(line) or 0) > n:
            high = middle
        else:
            low = begin + len(line)
    return low
