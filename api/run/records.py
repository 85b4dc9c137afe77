"""Read a job's tape forward in whole lines, from any record on, while the job still writes it.

Finds a place in the file and reads nothing twice. It does not interpret records and does not wait: ``read`` returns what is
there now, and the caller decides when to call again. A last line without its end is ignored; it may still be written, or be
what a crash left.
"""

from __future__ import annotations

import re
import zlib
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from api.run.folder import open_below

CHUNK_BYTES = 256 * 1024
"""The most that one ``read`` takes from the disk: a few hundred records, so that a long tape blocks no thread."""

LINE_BYTES_MAX = 16 << 20
"""The longest record. Longer data without a line end is damage, and nothing behind it is read."""
_NUMBER = re.compile(rb'\{"n":(\d{1,18}),')
_CHECKSUM = re.compile(rb',"crc":"([0-9a-f]{8})"\}$')
_CONTROL = re.compile(rb"[\x00-\x1f]")
_FOOTER = b'{"end":'


class TapeReader:
    """Reads the tape at ``path``: from its header on, or only the records after number ``after``."""

    def __init__(self, path: Path, after: int = 0) -> None:
        self.path = path
        self.n = after
        """The number of the last record read, or the starting point."""
        self.sealed = False
        """Whether the footer was read. Nothing follows it."""
        self._offset: int | None = 0 if after == 0 else None
        self._endless = False

    def read(self) -> list[bytes]:
        """Return the new whole lines without line ends; none if there is nothing new, or no readable tape."""
        with suppress(OSError):
            size = self.path.lstat().st_size
            if not self._endless and (self._offset is None or size > self._offset):
                with open_below(self.path.parent, self.path.name) as file:
                    return self._read(file, size)
        return []

    def _read(self, file: BinaryIO, size: int) -> list[bytes]:
        if self._offset is None:
            self._offset = offset_after(file, self.n, size)
        file.seek(self._offset)
        chunk = b""
        while b"\n" not in chunk and len(chunk) < LINE_BYTES_MAX and (more := file.read(CHUNK_BYTES)):
            chunk += more
        self._endless = b"\n" not in chunk and len(chunk) >= LINE_BYTES_MAX
        whole = chunk[: chunk.rfind(b"\n") + 1]
        self._offset += len(whole)
        lines = whole.split(b"\n")[:-1]
        for line in lines:
            self.n = max(self.n, number_of(line) or 0)
        self.sealed = self.sealed or any(line.startswith(_FOOTER) for line in lines[-1:])
        return lines


def number_of(line: bytes) -> int | None:
    """Return the number of the record in this line; None for a header or a footer."""
    match = _NUMBER.match(line)
    return int(match[1]) if match else None


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
