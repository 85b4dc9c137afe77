"""The documents of one piece of a file, read without more of the file than the piece needs.

   Parquet               rows r·i/n up to r·(i+1)/n
   ArrayRecord           records likewise; a record is a text
   JSON Lines, text      the lines that begin in bytes b·i/n up to b·(i+1)/n
   … compressed          the lines that begin in the decompressed content of that range; everything before it in the file
                         must be decompressed as well, so many files are better than large ones

``text.file_kinds`` determines the kind of a file, and refuses a file whose content is of another kind. Every document of a
file is in exactly one of its n pieces, whatever n is. A file of plain text is one document. It is read as blocks of lines,
which end after lines that are chosen by their content, so that a passage gives the same blocks wherever it is. A block
that follows another is a ``Continuation``. Files are untrusted: lines, records and pieces have a maximum size, a
file must have the size with which it was listed, and malformed content, including bytes that are not UTF-8, is counted
(``Unreadable``) up to the job's limit. Compressed text is decompressed as far as it is read, within limits of memory and
size: it may expand thousandfold, have frames that need gigabytes, or end too soon. Nothing here knows of tokens.
"""

from __future__ import annotations

import codecs
import gzip
import io
import logging
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import IO, Any

from orchestrator.core.vocabulary import SourceFlaws
from orchestrator.errors import AtollError, ConfigurationError, UnreadableData, first_line, in_words
from orchestrator.system.roots import AllowedRoots, open_data, shown
from orchestrator.text import file_kinds
from orchestrator.text.file_kinds import (
    UTF8_BOM,
    ZSTD_WINDOW_MAX,
    Compression,
    Format,
    Misfit,
    kind_of,
    window_too_large,
)
from orchestrator.text.parquet_rows import Rows
from orchestrator.text.text_records import CONVERSATION_KINDS, NotText, NotUtf8, plain_line, text_of, utf8

EXPANSION_MAX = 1000
"""The most bytes per stored byte: compressed text has up to a hundred."""
EXPANDED_MIN = 64 << 20
"""The size that any file may have, however small it is stored."""
FRAME_BYTES = 1 << 12
"""Input decompressed at once from a zstd frame: at most 128 MiB of text, if it is malicious."""


class Expanded(io.RawIOBase):
    """Decompressed text, up to a maximum expansion. More is malicious or a mistake."""

    def __init__(self, text: Any, stored_bytes: int) -> None:
        self._text, self._left = text, EXPANDED_MIN + EXPANSION_MAX * stored_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count: int = self._text.readinto(buffer)
        self._left -= count
        if self._left < 0:
            raise ValueError(f"decompressed it is more than {EXPANSION_MAX:,} times its stored size")
        return count


def decompressed(file: IO[bytes], compression: Compression) -> Any:
    """Return the file's text as an unbuffered reader. Raises ConfigurationError if a library is missing."""
    if compression is Compression.GZIP:
        return gzip.GzipFile(fileobj=file)
    try:
        import zstandard
    except ImportError as error:
        detail = "The package zstandard, which .zst needs, is not installed here. Install atoll[text] on every node."
        raise ConfigurationError(detail=detail) from error
    return _Zstandard(file, zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_MAX), zstandard.ZstdError)


class _Zstandard(io.RawIOBase):
    """The text of one zstd frame after another. Raises EOFError if the file ends within a frame.

    The library's own reader would end there as if the text were complete.
    """

    def __init__(self, file: IO[bytes], decompressor: Any, failure: type[Exception]) -> None:
        self._file, self._decompressor, self._failure = file, decompressor, failure
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
            try:
                self._text = memoryview(self._frame.decompress(stored))
            except self._failure as error:
                if "too much memory" in str(error):
                    message, remedy = window_too_large()
                    raise ValueError(f"it {message}. {remedy}") from error
                raise
        count = min(len(buffer), len(self._text))
        buffer[:count] = self._text[:count]
        self._text = self._text[count:]
        return count


DOCUMENT_BYTES_MAX = 1 << 16
"""Longer documents of text are split into several parts, so that a single long file can still be divided."""
LINE_BYTES_MAX = 16 << 20
LONG_LINE = "Break it up; a job may also read the file with source: files"
PIECE_TEXT_MAX = 64 << 20
"""The limit of one piece, decompressed: sixteen times the expected size, and still small enough for memory."""
BLOCK_BYTES = 1 << 20
EXPANDED_BYTES = 16 << 10
"""Bytes decompressed at once. Their lines count as in the same stored bytes, which must be far fewer than a piece's."""
PASSAGE_BYTES = 1 << 13
"""The average size of a block of plain text; the maximum is ``DOCUMENT_BYTES_MAX``."""
RECORDS, RECORDS_BYTES = 256, 32 << 20
"""The limits of a read from an ArrayRecord."""
NO_MEMORY = "it needs more memory than there is. Write the file again with smaller rows or row groups"
ATTEMPTS, PAUSE_S = 3, 2.0
"""Attempts and pause for reading a piece from a store."""

log = logging.getLogger(__name__)


class Continuation(bytes):
    """A part of a document that directly follows the part before it, without a separator."""


class Foreign(ValueError):
    """A file's content is of another kind than its name says."""


def chosen(documents: Iterable[bytes], is_wanted: Callable[[bytes], bool]) -> Iterator[bytes]:
    """Yield the wanted documents. A part whose predecessor is not wanted is no continuation."""
    follows = False
    for document in documents:
        if is_wanted(document):
            yield document if follows or not isinstance(document, Continuation) else bytes(document)
            follows = True
        else:
            follows = False


def parts(document: bytes) -> Iterator[bytes]:
    """Yield the document in parts of at most ``DOCUMENT_BYTES_MAX``, cut between characters."""
    start, part = 0, bytes
    while start < len(document):
        end = _character(document, min(len(document), start + DOCUMENT_BYTES_MAX))
        yield part(document[start:end])
        start, part = end, Continuation


def _character(text: bytes, at: int) -> int:
    """Return where the character with byte ``at`` begins; ``at`` itself if it is not UTF-8."""
    for start in range(at, max(0, at - 4), -1):
        if start == len(text) or text[start] & 0xC0 != 0x80:
            return start
    return at


@dataclass
class Unreadable:
    """Unreadable records and pieces, and pieces that were cut, each counted once, for all threads of an island."""

    most: int
    reasons: dict[tuple[str, int], str] = field(default_factory=dict)
    cut: set[tuple[str, int]] = field(default_factory=set)
    _of_source: dict[str, tuple[int, int]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(
        self, path: str, place: int, what: str, reason: str, source: str = "", *, is_not_utf8: bool = False
    ) -> None:
        """Count a failure. Raises UnreadableData above the job's limit. ``place`` distinguishes failures in one file."""
        reason = reason.rstrip(".")
        with self._lock:
            if (path, place) in self.reasons:
                return
            self.reasons[path, place] = reason
            count = len(self.reasons)
            so_far = self._of_source.get(source, (0, 0))
            self._of_source[source] = so_far[0] + 1, so_far[1] + is_not_utf8
        what_and_why = f"{shown(path)}, {what}: {reason}"
        if count > self.most:
            raise UnreadableData(detail=f"{what_and_why}. This is failure {count:,} of this kind.", most=self.most)
        log.warning("%s; it is skipped, as failure %d of at most %d", what_and_why, count, self.most)

    def by_source(self) -> tuple[SourceFlaws, ...]:
        """Return what could not be read of each source, by its name."""
        with self._lock:
            return tuple(SourceFlaws(name, *counts) for name, counts in sorted(self._of_source.items()))


def place_in(path: str, place: int) -> str:
    """Return the words for a place of ``Unreadable``."""
    if place < 0:
        return f"piece {-place}"
    kind = kind_of(path)
    if kind.has_lines:
        return f"the line at byte {place:,}"
    return f"row {place:,}" if kind.format is Format.PARQUET else f"record {place:,}"


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads pieces of one source's files."""

    roots: AllowedRoots
    text_field: str
    unreadable: Unreadable
    source: str = ""
    _looked_at: set[str] = field(default_factory=set, compare=False, repr=False)

    def documents(self, path: str, number: int, count: int, size: int | None = None) -> list[bytes]:
        """Return the documents of piece ``number`` of ``count`` of a file; none if the piece counts as unreadable.

        A file that no longer has ``size`` bytes is unreadable, because its pieces have moved. Raises UnreadableData, and
        OutsideRoots.
        """
        where, attempts = f"piece {number + 1} of {count}", ATTEMPTS if "://" in path else 1
        for attempt in range(attempts):
            try:
                return list(self._bounded(path, number, self._documents(path, number, count, size)))
            except (UnreadableData, ConfigurationError):
                raise
            except Foreign as error:
                self.unreadable.add(path, -1 - number, where, str(error), self.source)
                break
            except MemoryError:
                self.unreadable.add(path, -1 - number, where, NO_MEMORY, self.source)
                break
            except Exception as error:  # a library or a store may raise anything
                if attempt + 1 < attempts and not isinstance(error, AtollError):
                    time.sleep(PAUSE_S * (attempt + 1))
                    continue
                self.unreadable.add(path, -1 - number, where, in_words(error), self.source)
        return []

    def pieces(self, path: str, count: int, size: int) -> Iterator[tuple[int, list[bytes]]]:
        """Yield all pieces of a file in order, each as from ``documents``. A compressed file is decompressed only once."""
        following = 0
        if kind_of(path).is_compressed:
            try:
                for number, documents in self._in_one_pass(path, count, size):
                    following = number + 1
                    yield number, documents
            except (UnreadableData, ConfigurationError):
                raise
            except Exception as error:  # reading by pieces, below, finds the piece, and whether a retry helps
                log.info("%s is read piece by piece: %s", shown(path), first_line(error))
        for number in range(following, count):
            yield number, self.documents(path, number, count, size)

    def _in_one_pass(self, path: str, count: int, size: int) -> Iterator[tuple[int, list[bytes]]]:
        following = 0
        with open_data(self.roots, path) as file:
            _require_size(file, size)
            self._require_kind(path, file)
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
                log.warning("%s: piece %d has more than %d MiB of text; the rest is skipped", path, number, mebibytes)
                self.unreadable.cut.add((path, number))
                return
            yield document

    def whole(self, path: str, bytes_max: int) -> Iterator[bytes]:
        """Yield every document of a file, plain text as one document: for text that is held in memory anyway.

        A line may have any length. Raises as ``documents``; ConfigurationError for more than ``bytes_max`` of lines; OSError
        if the file is not here.
        """
        with open_data(self.roots, path) as file:
            try:
                self._require_kind(path, file)
                size = file.seek(0, os.SEEK_END)
                file.seek(0)
                kind = kind_of(path)
                if kind.format is Format.PARQUET:
                    yield from self._rows(path, file, 0, 1)
                elif kind.format is Format.ARRAY_RECORD:
                    yield from self._records(path, file, 0, 1)
                else:
                    stored: Any = file
                    text = Expanded(decompressed(file, kind.compression), size) if kind.is_compressed else stored
                    yield from self._whole_text(path, io.BufferedReader(text, BLOCK_BYTES), bytes_max)
            except AtollError:
                raise
            except Foreign as error:
                self.unreadable.add(path, -1, "the file", str(error), self.source)
            except MemoryError:
                self.unreadable.add(path, -1, "the file", NO_MEMORY, self.source)
            except Exception as error:  # a library may raise anything
                reason = f"{type(error).__name__}: {first_line(error)}"
                self.unreadable.add(path, -1, "the file", reason, self.source)

    def _whole_text(self, path: str, text: io.BufferedReader[Any], bytes_max: int) -> Iterator[bytes]:
        if kind_of(path).format is Format.JSON_LINES:
            yield from (line for _, line in self._read(path, _numbered(path, text, bytes_max)))
            return
        content = text.read(bytes_max + 1)
        if len(content) > bytes_max:
            raise _too_much(path, bytes_max)
        if _is_plain(content):
            document = content.removeprefix(UTF8_BOM)
        else:
            lines = _numbered(path, io.BytesIO(content), bytes_max)
            document = b"".join(line for _, line in self._read(path, lines))
        if document:
            yield document

    def _documents(self, path: str, number: int, count: int, size: int | None) -> Iterator[bytes]:
        kind = kind_of(path)
        with open_data(self.roots, path) as file:
            if size is not None:
                _require_size(file, size)
            self._require_kind(path, file)
            file.seek(0)
            if kind.format is Format.PARQUET:
                yield from self._rows(path, file, number, count)
            elif kind.format is Format.ARRAY_RECORD:
                yield from self._records(path, file, number, count)
            else:
                yield from self._texts(path, _lines(file, path, number, count))

    def _require_kind(self, path: str, file: IO[bytes]) -> None:
        """Check a file's name and first bytes before reading it.

        Raises ConfigurationError if files with this name cannot be read, Foreign if the bytes contradict the name.
        """
        if path in self._looked_at:
            return
        if refused := file_kinds.refusal(path):
            raise ConfigurationError(detail=f"data: {shown(path)} {refused.message}. {refused.remedy}")
        try:
            head = file_kinds.look(path, file, self.text_field)
        except file_kinds.DAMAGE:
            return  # reading finds what is damaged, and where
        if isinstance(head, Misfit) and head.is_kind:
            raise Foreign(str(head))
        self._looked_at.add(path)

    def _rows(self, path: str, file: IO[bytes], number: int, count: int) -> Iterator[bytes]:
        rows = Rows(file, self.text_field, look_at_pages="://" not in path)
        if rows.problem:
            detail = f"data: {shown(path)} {rows.problem}. Set text_field to the column that has the text."
            raise ConfigurationError(detail=detail)
        if self.text_field in CONVERSATION_KINDS:
            _, of = CONVERSATION_KINDS[self.text_field]
            for row, record in rows.records(*_range(rows.row_count, number, count)):
                if document := self._checked(path, row, lambda record=record: of(record())):  # type: ignore[misc]
                    yield document
            return
        for row, text in rows.texts(*_range(rows.row_count, number, count)):
            if text and (document := self._utf8(path, row, text)):
                yield document

    def _records(self, path: str, file: IO[bytes], number: int, count: int) -> Iterator[bytes]:
        for record, text in _array_records(file, number, count):
            if text and (document := self._checked(path, record, lambda text=text: self._record(text))):  # type: ignore[misc]
                yield document

    def _record(self, record: bytes) -> bytes | None:
        return text_of(record, self.text_field) if self.text_field in CONVERSATION_KINDS else utf8(record)

    def _utf8(self, path: str, place: int, text: bytes) -> bytes:
        return self._checked(path, place, lambda: utf8(text))

    def _checked(self, path: str, place: int, read: Callable[[], bytes | None]) -> bytes:
        try:
            return read() or b""
        except NotText as error:
            self._pass_over(path, place, place_in(path, place), error)
            return b""

    def _pass_over(self, path: str, place: int, what: str, error: NotText) -> None:
        is_not_utf8 = isinstance(error, NotUtf8)
        self.unreadable.add(path, place, what, f"it {error}", self.source, is_not_utf8=is_not_utf8)

    def _texts(self, path: str, lines: Iterable[tuple[int, bytes | None]]) -> Iterator[bytes]:
        texts = (text for _, text in self._read(path, ((at, place_in(path, at), line) for at, line in lines)))
        return texts if kind_of(path).format is Format.JSON_LINES else _blocks(texts)

    def _read(self, path: str, lines: Iterable[tuple[int, str, bytes | None]]) -> Iterator[tuple[int, bytes]]:
        """Yield the readable texts of lines. Each line has a place, and words for it."""
        is_json = kind_of(path).format is Format.JSON_LINES
        for at, what, line in lines:
            try:
                if line is None:
                    raise NotText(f"is longer than the maximum of {LINE_BYTES_MAX >> 20} MiB. {LONG_LINE}")
                if is_json:
                    text = text_of(line, self.text_field) if line.strip() else None
                else:
                    text = plain_line(line if at else line.removeprefix(UTF8_BOM))
            except NotText as error:
                self._pass_over(path, at, what, error)
                continue
            if text:
                yield at, text


def _numbered(path: str, text: IO[bytes], bytes_max: int) -> Iterator[tuple[int, str, bytes]]:
    left, number = bytes_max, 0
    while line := text.readline(left + 1):
        left -= len(line)
        if left < 0:
            raise _too_much(path, bytes_max)
        yield number, f"line {number + 1:,}", line
        number += 1


def _too_much(path: str, bytes_max: int) -> ConfigurationError:
    detail = (
        f"data.files: {shown(path)} has more than {bytes_max >> 20:,} MiB of text, and each island holds all of it."
    )
    return ConfigurationError(detail=f"{detail} Use source: streamed, which reads parts when needed.")


def _is_plain(content: bytes) -> bool:
    """Return whether it is UTF-8 without a NUL byte.

    It is decoded by parts, because characters take four times the memory.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for start in range(0, len(content), BLOCK_BYTES):
            decoder.decode(content[start : start + BLOCK_BYTES])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return b"\0" not in content


def _range(total: int, number: int, count: int) -> tuple[int, int]:
    return total * number // count, total * (number + 1) // count


def _array_records(file: IO[bytes], number: int, count: int) -> Iterator[tuple[int, bytes]]:
    """Yield records with their numbers. Each read has about ``RECORDS_BYTES``, estimated from the records before."""
    try:
        from array_record.python.array_record_module import ArrayRecordReader
    except ImportError as error:
        detail = "data.sources: the package array_record is not installed here. Install it on every node."
        raise ConfigurationError(detail=detail) from error
    # open it by the descriptor that was opened below a root, because the name may lead elsewhere by now
    reader = ArrayRecordReader(f"/proc/self/fd/{file.fileno()}")
    try:
        at, last = _range(reader.num_records(), number, count)
        step = 1
        while at < last:
            records = reader.read(at, min(last, at + step))
            yield from enumerate(records, at)
            at += step
            largest = max(map(len, records), default=0)
            step = max(1, min(RECORDS, 4 * step, RECORDS_BYTES // max(1, largest)))
    finally:
        reader.close()


def _blocks(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Combine the lines of one text into blocks. A block ends after a line chosen by its checksum: see ``PASSAGE_BYTES``.

    A long line is several blocks, so that text without lines can still be divided. All but the first are continuations.
    """
    part: type[bytes] = bytes
    for block in _joined(lines):
        # a block of twice the maximum is cut, but shorter lines never are
        for one in parts(block) if len(block) >= 2 * DOCUMENT_BYTES_MAX else (block,):
            yield part(one)
            part = Continuation


def _joined(lines: Iterable[bytes]) -> Iterator[bytes]:
    waiting, size = [], 0
    for line in lines:
        waiting.append(line)
        size += len(line)
        if size >= DOCUMENT_BYTES_MAX or zlib.crc32(line) % PASSAGE_BYTES < len(line):
            yield b"".join(waiting)
            waiting, size = [], 0
    if waiting:
        yield b"".join(waiting)


def _require_size(file: IO[bytes], size: int) -> None:
    if (size_now := file.seek(0, os.SEEK_END)) != size:
        raise ValueError(f"it has {size_now:,} bytes, but had {size:,} when the job's text was listed")


def _lines(file: IO[bytes], path: str, number: int, count: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield the lines that begin in the range, each with the byte where it begins, decompressed.

    A line that is too long is None, also if it only covers the range, with its last byte: so each of its pieces reports it.
    """
    size = file.seek(0, os.SEEK_END)
    first, last = _range(size, number, count)
    if kind_of(path).is_compressed:
        for place, at, line in _compressed_lines(file, path, size, last):
            if place >= first or line is None:
                yield at, line
        return
    # of the line that contains byte ``first`` − 1 only the end is read: if that byte ends it, the next begins at ``first``
    at = file.seek(max(0, first - 1))
    stored: Any = file
    text = io.BufferedReader(stored, BLOCK_BYTES)
    if first:
        at += sum(map(len, _pieces_of_line(text)))
        if at >= last and _is_too_long(file, first, at):
            yield at - 1, None
    while at < last:
        line, length = _line(text)
        if not length:
            raise EOFError(f"it ends at byte {at:,}, but should have {size:,} bytes")
        yield (at if line is not None else at + length - 1), line
        at += length


def _is_too_long(file: IO[bytes], within: int, end: int) -> bool:
    """Return whether the line that covers byte ``within`` and ends at ``end`` is too long."""
    start = max(0, end - LINE_BYTES_MAX - 1)
    if start >= within:
        return True
    file.seek(start)
    before = file.read(within - start)
    return end - LINE_BYTES_MAX > 0 and b"\n" not in before


def _compressed_lines(file: IO[bytes], path: str, size: int, last: int) -> Iterator[tuple[int, int, bytes | None]]:
    """Yield the decompressed lines of the first ``last`` bytes: each with its place in these, and as ``_lines``."""
    file.seek(0)
    stored: Any = Expanded(decompressed(file, kind_of(path).compression), size)
    text, at = io.BufferedReader(stored, EXPANDED_BYTES), 0
    while (place := min(file.tell(), size - 1)) < last:
        line, length = _line(text)
        if not length:
            return
        yield place, (at if line is not None else at + length - 1), line
        at += length


def _line(text: io.BufferedReader[Any]) -> tuple[bytes | None, int]:
    """Return the next line and its length; None for a line that is too long."""
    pieces = _pieces_of_line(text)
    line = next(pieces, b"")
    more = sum(map(len, pieces))
    return None if more else line, len(line) + more


def _pieces_of_line(text: io.BufferedReader[Any]) -> Iterator[bytes]:
    """Yield one line up to the maximum length, and then the rest of it."""
    while piece := text.readline(LINE_BYTES_MAX):
        yield piece
        if piece.endswith(b"\n"):
            return
