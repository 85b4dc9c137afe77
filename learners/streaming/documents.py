"""The documents of one piece of a file: what a file is its name says, and no more of it is read than the piece needs.

    .parquet              rows r·i/n up to r·(i+1)/n
    .arrayrecord          records likewise; a record is a text
    .jsonl, other text    the lines that begin in bytes b·i/n up to b·(i+1)/n
    … behind .gz, .zst    the lines that begin in what the compressed bytes of that range hold; what lies before them in the
                          file must be decompressed as well, so that many files are better than large ones

Every document of a file is in exactly one of its n pieces, whatever n is. Text that is neither records nor JSON has lines
and no documents: lines are put together to blocks, which end behind lines that are chosen by their content, so that a
passage gives the same blocks wherever it is. Files are anybody's: a line, a record and a piece have a largest size, a file
has the size that it was listed with, and what is malformed is counted (``Unreadable``) up to the job's limit. Nothing here
knows of tokens.
"""

from __future__ import annotations

import gzip
import io
import json
import logging
import os
import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import IO, Any

from learners.corpus import DOCUMENT_BYTES_MAX, not_text, texts_of
from orchestrator.errors import AtollError, ConfigurationError, UnreadableData, first_line, in_words
from orchestrator.roots import AllowedRoots, open_data, shown

LINE_BYTES_MAX = 16 << 20
PIECE_TEXT_MAX = 64 << 20
"""Of one piece, decompressed: sixteen times what is to be expected, and still to be held."""
BLOCK_BYTES = 1 << 20
EXPANDED_BYTES = 16 << 10
"""Decompressed at once: lines of these belong to the same stored bytes, which should be far fewer than a piece has."""
PASSAGE_BYTES = 1 << 13
"""Of a block of plain text, on average; at most ``DOCUMENT_BYTES_MAX``."""
EXPANSION_MAX = 1000
"""Bytes for each that is stored: compressed text has up to a hundred."""
ROWS = 256
ZSTD_WINDOW_MAX = 128 << 20
FRAME_BYTES = 1 << 12
"""Of a zstd frame, decompressed at once: at most 128 MiB, if somebody means harm."""
COMPRESSED = (".gz", ".zst")
ATTEMPTS, PAUSE_S = 3, 2.0
"""To read a piece of a store."""

log = logging.getLogger(__name__)


@dataclass
class Unreadable:
    """What could not be read, and pieces that were cut, each counted once, for all threads of an island."""

    most: int
    reasons: dict[tuple[str, int], str] = field(default_factory=dict)
    cut: set[tuple[str, int]] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, path: str, place: int, what: str, reason: str) -> None:
        """Raises UnreadableData when there are more than the job passes over. ``place`` tells apart what is of one file."""
        with self._lock:
            if (path, place) in self.reasons:
                return
            self.reasons[path, place] = reason
            count = len(self.reasons)
        what_and_why = f"{shown(path)}, {what}: {reason}"
        if count > self.most:
            raise UnreadableData(detail=f"{what_and_why}. It is the {count:,}. that cannot be read.", most=self.most)
        log.warning("%s; it is passed over, as %d of at most %d", what_and_why, count, self.most)


@dataclass(frozen=True, slots=True)
class Reader:
    """How to read pieces of one source's files."""

    roots: AllowedRoots
    text_field: str
    unreadable: Unreadable

    def documents(self, path: str, number: int, count: int, size: int | None = None) -> list[bytes]:
        """The documents of piece ``number`` of ``count`` of a file; none, where that is counted as unreadable.

        So it is of a file that has no longer ``size`` bytes: its pieces are others now. Raises UnreadableData, and
        OutsideRoots.
        """
        attempts = ATTEMPTS if "://" in path else 1
        for attempt in range(attempts):
            try:
                return list(self._bounded(path, number, self._documents(path, number, count, size)))
            except (UnreadableData, ConfigurationError):
                raise
            except Exception as error:  # whatever a library or a store says of a file
                if attempt + 1 < attempts and not isinstance(error, AtollError):
                    time.sleep(PAUSE_S * (attempt + 1))
                    continue
                reason = in_words(error)
                self.unreadable.add(path, -1 - number, f"piece {number + 1} of {count}", reason)
        return []

    def pieces(self, path: str, count: int, size: int) -> Iterator[tuple[int, list[bytes]]]:
        """All pieces of a file in turn, each as ``documents`` has it; what is compressed is decompressed only once."""
        following = 0
        if path.endswith(COMPRESSED):
            try:
                for number, documents in self._in_one_pass(path, count, size):
                    following = number + 1
                    yield number, documents
            except (UnreadableData, ConfigurationError):
                raise
            except Exception as error:  # whose pieces it is of, and whether another attempt helps, is seen below
                log.info("%s is read piece by piece: %s", shown(path), first_line(error))
        for number in range(following, count):
            yield number, self.documents(path, number, count, size)

    def _in_one_pass(self, path: str, count: int, size: int) -> Iterator[tuple[int, list[bytes]]]:
        following = 0
        with open_data(self.roots, path) as file:
            _require_size(file, size)
            lines = _compressed_lines(file, path, size, size)
            for number, own in groupby(lines, lambda line: ((line[0] + 1) * count - 1) // size):
                yield from ((empty, []) for empty in range(following, number))
                texts = self._texts(path, ((at, line) for _, at, line in own))
                yield number, list(self._bounded(path, number, texts))
                following = number + 1
        yield from ((empty, []) for empty in range(following, count))

    def _bounded(self, path: str, number: int, documents: Iterable[bytes]) -> Iterator[bytes]:
        total = 0
        for document in documents:
            total += len(document)
            if total > PIECE_TEXT_MAX:
                mebibytes = PIECE_TEXT_MAX >> 20
                log.warning("%s: piece %d has more than %d MiB of text; the rest is left out", path, number, mebibytes)
                self.unreadable.cut.add((path, number))
                return
            yield document

    def _documents(self, path: str, number: int, count: int, size: int | None) -> Iterator[bytes]:
        kind = kind_of(path)
        with open_data(self.roots, path) as file:
            if size is not None:
                _require_size(file, size)
            file.seek(0)
            if kind == ".parquet":
                yield from self._rows(path, file, number, count)
            elif kind == ".arrayrecord":
                yield from _records(path, file, number, count)
            else:
                yield from self._texts(path, _lines(file, path, number, count))

    def _rows(self, path: str, file: IO[bytes], number: int, count: int) -> Iterator[bytes]:
        from pyarrow.parquet import ParquetFile  # here, because it takes 0.1 s and few jobs need it

        parquet = ParquetFile(file, pre_buffer=False, buffer_size=BLOCK_BYTES)
        if problem := not_text(parquet.schema_arrow, self.text_field):
            detail = f"data.sources: {shown(path)} {problem}. Set text_field of its source."
            raise ConfigurationError(detail=detail)
        first, last = _range(parquet.metadata.num_rows, number, count)
        row = 0
        for group in range(parquet.num_row_groups):
            rows = parquet.metadata.row_group(group).num_rows
            if first < row + rows and row < last:
                at = row
                for batch in parquet.iter_batches(ROWS, row_groups=[group], columns=[self.text_field]):
                    wanted = batch.slice(max(0, first - at), max(0, min(last, at + len(batch)) - max(first, at)))
                    yield from texts_of(wanted)
                    at += len(batch)
                    if at >= last:
                        break
            row += rows

    def _texts(self, path: str, lines: Iterable[tuple[int, bytes | None]]) -> Iterator[bytes]:
        whole = self._whole(path, lines)
        return self._objects(path, whole) if kind_of(path) == ".jsonl" else _blocks(whole)

    def _whole(self, path: str, lines: Iterable[tuple[int, bytes | None]]) -> Iterator[tuple[int, bytes]]:
        for at, line in lines:
            if line is None:
                self.unreadable.add(path, at, f"the line at byte {at:,}", f"longer than {LINE_BYTES_MAX >> 20} MiB")
            else:
                yield at, line

    def _objects(self, path: str, lines: Iterable[tuple[int, bytes]]) -> Iterator[bytes]:
        for at, line in lines:
            if not line.strip():
                continue
            try:
                text = json.loads(line)[self.text_field].encode()
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                reason = f"no object with a text field {self.text_field!r} ({type(error).__name__})"
                self.unreadable.add(path, at, f"the line at byte {at:,}", reason)
                continue
            if text:
                yield text


def kind_of(path: str) -> str:
    """The kind of a file, by its name: .parquet, .arrayrecord, .jsonl, or .txt for everything else."""
    stem = os.path.splitext(path)[0] if path.endswith(COMPRESSED) else path
    suffix = os.path.splitext(stem)[1].replace("array_record", "arrayrecord")
    return suffix if suffix in (".jsonl", ".parquet", ".arrayrecord") else ".txt"


def _range(total: int, number: int, count: int) -> tuple[int, int]:
    return total * number // count, total * (number + 1) // count


def _records(path: str, file: IO[bytes], number: int, count: int) -> Iterator[bytes]:
    if "://" in path:
        detail = f"data.sources: {shown(path)} is an arrayrecord in a store, and these are read from disks only."
        raise ConfigurationError(detail=f"{detail} Copy it to the nodes, or use parquet.")
    try:
        from array_record.python.array_record_module import ArrayRecordReader
    except ImportError as error:
        detail = "data.sources: the package array_record is not installed here. Install it on every node."
        raise ConfigurationError(detail=detail) from error
    # by the descriptor that was opened below a root: the name may lead elsewhere by now
    reader = ArrayRecordReader(f"/proc/self/fd/{file.fileno()}")
    try:
        first, last = _range(reader.num_records(), number, count)
        for start in range(first, last, ROWS):
            yield from reader.read(start, min(last, start + ROWS))
    finally:
        reader.close()


def _blocks(lines: Iterable[tuple[int, bytes]]) -> Iterator[bytes]:
    """Lines of plain text, put together. A block ends behind a line whose checksum says so: see ``PASSAGE_BYTES``.

    A long line is several blocks, so that text without lines can still be divided.
    """
    waiting, size = [], 0
    for _, line in lines:
        waiting.append(line)
        size += len(line)
        if size >= DOCUMENT_BYTES_MAX or zlib.crc32(line) % PASSAGE_BYTES < len(line):
            yield from _cut(b"".join(waiting))
            waiting, size = [], 0
    if waiting:
        yield from _cut(b"".join(waiting))


def _cut(block: bytes) -> Iterator[bytes]:
    """The block, cut where it has twice as many bytes as one should have: never in lines that are shorter than that."""
    step = len(block) if len(block) < 2 * DOCUMENT_BYTES_MAX else DOCUMENT_BYTES_MAX
    return (block[start : start + step] for start in range(0, len(block), step))


def _require_size(file: IO[bytes], size: int) -> None:
    if (size_now := file.seek(0, os.SEEK_END)) != size:
        raise ValueError(f"it has {size_now:,} bytes, and had {size:,} when the job's text was listed")


def _lines(file: IO[bytes], path: str, number: int, count: int) -> Iterator[tuple[int, bytes | None]]:
    """The lines that begin in the range, each with the byte where it begins, decompressed; None for one that is too long."""
    size = file.seek(0, os.SEEK_END)
    first, last = _range(size, number, count)
    if path.endswith(COMPRESSED):
        yield from ((at, line) for place, at, line in _compressed_lines(file, path, size, last) if place >= first)
        return
    # of the line that byte ``first`` − 1 is in, only the end is read: if that byte ends it, the next begins at ``first``
    at = file.seek(max(0, first - 1))
    stored: Any = file
    text = io.BufferedReader(stored, BLOCK_BYTES)
    if first:
        at += sum(map(len, _pieces_of_line(text)))
    while at < last:
        line, length = _line(text)
        if not length:
            raise EOFError(f"it ends at byte {at:,}, and should have {size:,}")
        yield at, line
        at += length


def _compressed_lines(file: IO[bytes], path: str, size: int, last: int) -> Iterator[tuple[int, int, bytes | None]]:
    """The lines that are decompressed of the first ``last`` bytes: each with its place in these, and as ``_lines``."""
    file.seek(0)
    stored: Any = _Expanded(_decompressed(file, path), size)
    text, at = io.BufferedReader(stored, EXPANDED_BYTES), 0
    while (place := min(file.tell(), size - 1)) < last:
        line, length = _line(text)
        if not length:
            return
        yield place, at, line
        at += length


def _line(text: io.BufferedReader[Any]) -> tuple[bytes | None, int]:
    """The next line and its length; None for one that is too long."""
    pieces = _pieces_of_line(text)
    line = next(pieces, b"")
    more = sum(map(len, pieces))
    return None if more else line, len(line) + more


def _pieces_of_line(text: io.BufferedReader[Any]) -> Iterator[bytes]:
    """One line, as far as the largest one that is taken, and then what is too much of it."""
    while piece := text.readline(LINE_BYTES_MAX):
        yield piece
        if piece.endswith(b"\n"):
            return


class _Expanded(io.RawIOBase):
    """Decompressed text, as long as it is not thousands of times what is stored: then somebody means harm, or erred."""

    def __init__(self, text: Any, stored_bytes: int) -> None:
        self._text, self._left = text, PIECE_TEXT_MAX + EXPANSION_MAX * stored_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count: int = self._text.readinto(buffer)
        self._left -= count
        if self._left < 0:
            raise ValueError(f"decompressed it is more than {EXPANSION_MAX:,} times its size")
        return count


def _decompressed(file: IO[bytes], path: str) -> Any:
    if path.endswith(".gz"):
        return gzip.GzipFile(fileobj=file)
    try:
        import zstandard
    except ImportError as error:
        detail = "data.sources: the package zstandard is not installed here. Install atoll[text] on every node."
        raise ConfigurationError(detail=detail) from error
    return _Zstandard(file, zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_MAX))


class _Zstandard(io.RawIOBase):
    """The text of one zstd frame after another. Raises EOFError for a file that ends within one.

    The library's own reader ends there too, as if that were the text's end.
    """

    def __init__(self, file: IO[bytes], decompressor: Any) -> None:
        self._file, self._decompressor = file, decompressor
        self._frame: Any = None
        self._text = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._text:
            stored = self._frame.unused_data if self._frame is not None and self._frame.eof else b""
            if stored or self._frame is None or self._frame.eof:
                stored = stored or self._file.read(FRAME_BYTES)
                if not stored:
                    return 0
                self._frame = self._decompressor.decompressobj()
            else:
                stored = self._file.read(FRAME_BYTES)
                if not stored:
                    raise EOFError("it ends within a zstd frame")
            self._text = memoryview(self._frame.decompress(stored))
        count = min(len(buffer), len(self._text))
        buffer[:count] = self._text[:count]
        self._text = self._text[count:]
        return count
