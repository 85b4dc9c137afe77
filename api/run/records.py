"""A job's tape as the service reads it: forward, in whole lines, from any record on, while the job still writes.

Responsible for finding a place in the file and for not reading anything twice. It refuses to know what records mean, and
to watch: ``read`` returns what is there now, and whoever follows decides when to ask again. A last line without its end is
not there yet; it may be the next write, or all that a crash left.
"""

from __future__ import annotations

import re
import zlib
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from api.run.files import open_below

CHUNK_BYTES = 256 * 1024
"""The most that one ``read`` takes from the disk: a few hundred records, so that nobody waits for a long tape."""

LINE_BYTES_MAX = 16 << 20
"""The longest record. What goes on for longer without an end is no line, and nothing behind it is looked for."""
_NUMBER = re.compile(rb'\{"n":(\d{1,18}),')
_CHECKSUM = re.compile(rb',"crc":"([0-9a-f]{8})"\}$')
_CONTROL = re.compile(rb"[\x00-\x1f]")
_FOOTER = b'{"end":'


class TapeReader:
    """Reads the tape at ``path``: from its header on, or only the records after number ``after``."""

    def __init__(self, path: Path, after: int = 0) -> None:
        self.path = path
        self.n = after
        """The number of the last record read, or where reading began."""
        self.sealed = False
        """Whether the footer was read: nothing follows it."""
        self._offset: int | None = 0 if after == 0 else None
        self._endless = False

    def read(self) -> list[bytes]:
        """The whole lines that came since, without their ends; none if there is nothing new, or no tape that can be read."""
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
    """The number of the record that this line holds; None for a header or a footer."""
    match = _NUMBER.match(line)
    return int(match[1]) if match else None


def is_sound(line: bytes) -> bool:
    """Whether the line can be what was written: of a line without a checksum, that it is text in one piece."""
    if match := _CHECKSUM.search(line):
        return zlib.crc32(line[: match.start()] + b"}") == int(match[1], 16)
    with suppress(UnicodeDecodeError):
        return line.endswith(b"}") and not _CONTROL.search(line) and bool(line.decode())
    return False


def offset_after(file: BinaryIO, n: int, size: int) -> int:
    """The offset of the first line after record ``n``, found by bisection: records are numbered in order.

    The end of the file's last whole line if no such line is there yet.
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
