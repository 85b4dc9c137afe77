"""Tapes and snapshots on disk, the only module of this package that touches files.

A long tape is a chain of segments (``sealing``), of which the newest is plain and has the tape's path. Sealing goes in two
steps, and a death before, between or after them loses nothing:

    seal    writes the plain segment up to a mark, compressed, beside the tape: nobody reads it yet
    cut     replaces the plain segment by one that continues the sealed one with the records behind the mark

Responsible for: a record being in the file when ``append`` returns (with the operating system, so it survives the process;
after ``sync`` the machine's power, too), one writer at a time, a failed append leaving nothing behind, a failed sync being
made good, and going on where a writer died. Refuses to interpret (what the bytes say, ``reading`` does).
"""

from __future__ import annotations

import errno
import gzip
import threading
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from hashlib import blake2b
from itertools import takewhile
from pathlib import Path

from orchestrator import accounting, core, tape
from orchestrator.errors import DataError, InfrastructureError
from orchestrator.system.disk import Disk, HeldFile, LocalDisk
from orchestrator.tape.reading import TapePrefix, begin, parse, up_to
from orchestrator.tape.schema import (
    CHECKSUM_AT_END,
    SEGMENT_BYTES_MAX,
    Continuation,
    Digest,
    FleetHeader,
    Footer,
    Header,
    Mark,
    Record,
    Tape,
    encode_footer,
    encode_header,
    encode_record,
    with_checksum,
    without_checksum,
)
from orchestrator.tape.sealing import chained, seal
from orchestrator.tape.snapshot import BYTES_MAX, Snapshot, decode

GZIP = b"\x1f\x8b"
CHUNK_BYTES = 1 << 24


class TapeWriter:
    """Writes one tape; a ``Sink``. Close it to end it with its digest. ``sync`` and ``seal`` are for any thread, the rest
    for one.

    ``count`` is the number of the last record, ``synced_count`` that of the last one known to survive a loss of power.
    """

    count: int
    synced_count: int
    _size: int
    _synced_size: int
    _sync_failed: bool
    _ended: bool
    _segment: int
    _file: HeldFile
    _digest: Digest
    _bytes: Digest
    _syncing: threading.Lock

    def __init__(self, path: Path, header: Header | FleetHeader, disk: Disk | None = None) -> None:
        """Begin a new tape. Raises FileExistsError when there is one."""
        self._hold(path, disk or LocalDisk(), new=True)
        self._header = header
        line = encode_header(header)
        written = with_checksum(line) if isinstance(header, Header) else line
        try:
            self._write(f"{written}\n".encode())
        except OSError:
            self.let_go()
            raise
        self._digest.add(line)

    @classmethod
    def reopen(cls, path: Path, disk: Disk | None = None, mark: Mark | None = None) -> tuple[TapeWriter, Tape]:
        """Return a writer that goes on where the last one died, and the tape.

        A torn end is cut off; a sealed tape stays closed. With a ``mark`` that fits, only what comes behind it is decoded,
        and ``Tape.before`` says so. Raises InfrastructureError while the writer before lives, and as ``read_tape``.
        """
        writer, disk = cls.__new__(cls), disk or LocalDisk()
        writer._hold(path, disk, new=False)
        try:
            prefix, tape = _read_for_writer(path, disk, mark)  # under the lock
            if tape.footer is not None:
                writer.let_go()
                return writer, tape
            writer._file.truncate(prefix.size)
        except Exception:
            writer.let_go()
            raise
        writer._header, writer._segment = prefix.header, prefix.continuation.segment if prefix.continuation else 1
        writer._digest, writer._bytes = prefix.lines, prefix.raw
        writer._size, writer.count = prefix.size, tape.count
        return writer, tape

    def append(self, record: Record) -> None:
        """Raises OSError when it cannot be written. Nothing of it is in the file then, and it may be asked again."""
        line = encode_record(record)
        self._write(f"{with_checksum(line)}\n".encode())
        self._digest.add(line)
        self.count = record.n

    def append_lines(self, lines: bytes, count: int) -> None:
        """Records already encoded, each with its newline; ``count`` is the number of the last one."""
        self._write(lines)
        self._digest.add_all(lines)
        self.count = count

    def sync(self) -> None:
        """Make what was appended survive a loss of power; ``synced_count`` is then the last such record.

        Raises OSError, and may be asked again: what it could not sync is then written anew, for the system counts it as
        written.
        """
        with self._syncing:
            count, size = self.count, self._size
            if self._sync_failed:
                self._file.rewrite(self._synced_size, self._read_back(self._synced_size, size))
            try:
                self._file.sync()
            except OSError:
                self._sync_failed = True
                raise
            self._sync_failed = False
            self.synced_count, self._synced_size = max(self.synced_count, count), max(self._synced_size, size)

    @property
    def mark(self) -> Mark:
        """The place behind the last record, in the plain segment. For the thread that writes."""
        return Mark(self.count, self._size, self._bytes.hex())

    def seal(self, mark: Mark) -> None:
        """Write the plain segment up to ``mark``, compressed, to its place beside the tape, for ``cut``. Raises OSError."""
        lines = self._disk.read(self.path, 0, mark.size)
        if blake2b(lines, digest_size=16).hexdigest() != mark.digest:
            raise OSError(errno.EIO, "the tape cannot be read back as it was written", str(self.path))
        path = sealed_path(self.path, self._segment)
        self._disk.files(path.parent)  # makes the folder
        self._disk.replace(path, seal(lines))

    def cut(self, mark: Mark) -> None:
        """Begin the next segment with what was appended behind ``mark``, up to which the plain one was sealed.

        Raises OSError, and the tape goes on as it was. Does nothing where a sync failed or the tape was ended meanwhile.
        """
        assert isinstance(self._header, Header)
        with self._syncing:
            if self._sync_failed or self._ended or self._file.closed:
                return
            rest = self._read_back(mark.size, self._size)
            line = encode_header(self._header, Continuation(self._segment + 1, mark))
            begin = f"{with_checksum(line)}\n".encode()
            file = self._disk.replace_held(self.path, begin + rest)
            self._file.close()
            self._file, self._segment = file, self._segment + 1
            self._size, self._synced_size = len(begin) + len(rest), 0
            self._digest, self._bytes = Digest(), Digest()
            self._digest.add(line)
            self._digest.add_all(CHECKSUM_AT_END.sub(b"}\n", rest))
            self._bytes.add_all(begin + rest)

    @property
    def digest(self) -> str:
        """The digest that a footer would have now."""
        return self._digest.hex()

    def close(self) -> None:
        """End the tape with its footer, durably. Safe to call twice. Raises OSError, and may be asked again."""
        if self._file.closed:
            return
        if not self._ended:
            footer = Footer(self.count, self._digest.hex())
            self._write(f"{encode_footer(footer)}\n".encode())
            self._ended = True
        self.sync()
        self._file.close()

    def let_go(self) -> None:
        """Stop writing without a footer: another goes on. Safe to call twice."""
        self._file.close()

    def _hold(self, path: Path, disk: Disk, *, new: bool) -> None:
        self.path, self._disk = path, disk
        self._digest, self._bytes = Digest(), Digest()  # of lines, as in the footer; of bytes, as in the file
        self.count = self.synced_count = self._size = self._synced_size = 0
        self._sync_failed = self._ended = False
        self._segment, self._syncing = 1, threading.Lock()
        try:
            self._file = disk.hold(path, new=new)
        except BlockingIOError as error:
            detail = f"the tape {path} is being written by another process."
            raise InfrastructureError(detail=detail, remedy="Wait until it ends, or end it.") from error

    def _write(self, lines: bytes) -> None:
        try:
            self._file.append(lines)
        except OSError:
            self._file.truncate(self._size)
            raise
        self._size += len(lines)
        self._bytes.add_all(lines)

    def _read_back(self, start: int, end: int) -> bytes:
        """The bytes appended between the two, as the system still has them."""
        lines = self._disk.read(self.path, start, end - start)
        try:
            for line in lines.decode().splitlines():
                without_checksum(line)
        except (DataError, UnicodeDecodeError) as error:
            raise OSError(errno.EIO, f"what was appended cannot be read back: {error}") from error
        return lines

    def __enter__(self) -> TapeWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_tape(path: Path, disk: Disk | None = None) -> Tape:
    """Read a tape, also one that is still being written, or whose last line was torn by a crash (``Tape.torn``), or a gzip.

    Sealed segments beside it are read first; the footer is then that of one file with all lines. Raises DataError when a
    file is missing, damaged or no tape, a record in its middle is damaged or out of order, or a footer's digest does not
    fit.
    """
    raw = _load(path, disk or LocalDisk())
    if raw.startswith(GZIP):
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(
                detail=f"{path} cannot be unpacked: {error}. Check that it was copied completely."
            ) from error
    return _whole(path, raw, disk or LocalDisk())[1]


def sealed_path(tape: Path, number: int) -> Path:
    """Return where the tape at this path has its sealed segment with this number."""
    return tape.with_name(f"{tape.stem}.sealed") / f"{number:08d}.zst"


def sealed_lines(path: Path, newest: Continuation, disk: Disk | None = None) -> Iterator[tuple[str, bytes]]:
    """Yield path and lines of each sealed segment of the tape at ``path``, whose plain one is ``newest``, oldest first.

    Raises DataError, with the segment's path, where one is missing, damaged or of another tape.
    """

    def load(number: int) -> tuple[str, bytes]:
        sealed = sealed_path(path, number)
        try:
            return str(sealed), _load(sealed, disk or LocalDisk(), 0, SEGMENT_BYTES_MAX)
        except DataError as error:
            detail = f"{path} continues segments that are sealed beside it: {error} Copy the whole folder."
            raise DataError(detail=detail) from error

    return chained(newest, load)


def beginning(path: Path, disk: Disk, size: int = 1 << 15) -> bytes:
    """The beginning of a file, with at least its first line if it has one."""
    raw = disk.read(path, 0, size)
    return raw if b"\n" in raw[:-1] or len(raw) < size else beginning(path, disk, 2 * size)


def _whole(path: Path, raw: bytes, disk: Disk, *, after_power_loss: bool = False) -> tuple[TapePrefix, Tape]:
    """The prefix of the plain segment, whose bytes are ``raw``, and the tape."""
    prefix = begin(str(path), raw)
    if prefix.continuation is None:
        return prefix, parse(str(path), prefix, raw[prefix.size :], after_power_loss=after_power_loss)
    records, digest, rest = list[Record](), Digest(), raw[prefix.size :]
    for sealed, lines in sealed_lines(path, prefix.continuation, disk):
        part = begin(sealed, lines)
        start = part.size if records else 0
        if part.header != prefix.header or part.count != len(records):
            raise DataError(detail=f"{sealed} is of another tape than {path}. Put it back from a copy.")
        tape = parse(sealed, part, lines[part.size :])
        if tape.footer is not None or tape.torn is not None:
            raise DataError(detail=f"{sealed} is damaged: {tape.torn or 'it has a footer, and another continues it'}.")
        digest.add_all(CHECKSUM_AT_END.sub(b"}\n", lines[start:]))
        records += tape.records
    if len(records) != prefix.first:
        raise DataError(detail=f"{path} continues {prefix.first} records, but {len(records)} are sealed beside it.")
    tape = parse(str(path), prefix, rest, after_power_loss=after_power_loss, sealed=records)
    if tape.footer is not None:
        digest.add_all(CHECKSUM_AT_END.sub(b"}\n", rest[: rest.rfind(b"\n", 0, -1) + 1]))
        tape = replace(tape, footer=Footer(tape.footer.end, digest.hex()))
    return prefix, tape


def _read_for_writer(path: Path, disk: Disk, mark: Mark | None) -> tuple[TapePrefix, Tape]:
    """The tape that a writer left; a loss of power may have damaged its end."""
    if mark is not None and (prefix := _up_to(path, disk, mark)) is not None:
        with suppress(DataError):  # whether what follows a damaged line was synced, only the whole tape can tell
            return prefix, parse(str(path), prefix, _load(path, disk, prefix.size))
    return _whole(path, _load(path, disk), disk, after_power_loss=True)


def _up_to(path: Path, disk: Disk, mark: Mark) -> TapePrefix | None:
    """The prefix of the plain segment up to the mark, which may be where it begins; ``None`` where it does not fit."""
    with suppress(DataError, OSError):
        prefix = begin(str(path), beginning(path, disk))
        if prefix.continuation is not None and prefix.continuation.after == mark:
            return prefix
    return up_to(mark, _chunks(path, disk, mark.size))


def _load(path: Path, disk: Disk, start: int = 0, count: int = -1) -> bytes:
    try:
        return disk.read(path, start, count)
    except OSError as error:
        raise DataError(detail=f"the tape {path} cannot be read: {error.strerror}. Check the path.") from error


def _chunks(path: Path, disk: Disk, size: int) -> Iterator[bytes]:
    """The first ``size`` bytes, or as many as there are."""
    chunks = (_load(path, disk, start, min(CHUNK_BYTES, size - start)) for start in range(0, size, CHUNK_BYTES))
    return takewhile(bool, chunks)


def write_snapshot(path: Path, raw: bytes, disk: Disk | None = None) -> None:
    """Put an encoded snapshot in the place of the one before, whole or not at all. Raises OSError."""
    (disk or LocalDisk()).replace(path, raw)


def read_snapshot(path: Path, disk: Disk | None = None) -> Snapshot | None:
    """``None`` where there is none. Raises DataError, with the reason, where it is not to be used."""
    try:
        raw = (disk or LocalDisk()).read(path, 0, BYTES_MAX + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(detail=f"the snapshot cannot be read: {error.strerror}.") from error
    return decode(raw, build())


@cache
def build() -> str:
    """A digest of the source of all that a snapshot holds."""
    source = blake2b(digest_size=16)
    for module in (core, accounting, tape):
        for path in sorted(Path(module.__path__[0]).rglob("*.py")):
            source.update(path.read_bytes())
    return source.hexdigest()
