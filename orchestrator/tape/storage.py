"""Tapes and snapshots on disk, the only module of this package that touches files.

Responsible for: a record being in the file when ``append`` returns (with the operating system, so it survives the process;
after ``sync`` the machine's power, too), one writer at a time, a failed append leaving nothing behind, a failed sync being
made good, and going on where a writer died. Refuses to interpret (what the bytes say, ``reading`` does).
"""

from __future__ import annotations

import errno
import gzip
import zlib
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from itertools import takewhile
from pathlib import Path

from orchestrator import accounting, core, tape
from orchestrator.errors import DataError, InfrastructureError
from orchestrator.system.disk import Disk, HeldFile, LocalDisk
from orchestrator.tape.reading import TapePrefix, parse, parse_whole, up_to
from orchestrator.tape.schema import (
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
from orchestrator.tape.snapshot import BYTES_MAX, Snapshot, decode

GZIP = b"\x1f\x8b"
CHUNK_BYTES = 1 << 24


class TapeWriter:
    """Writes one tape; a ``Sink``. Close it to seal it with its digest. ``sync`` is for any thread, the rest for one.

    ``count`` is the number of the last record, ``synced_count`` that of the last one known to survive a loss of power.
    """

    count: int
    synced_count: int
    _size: int
    _synced_size: int
    _sync_failed: bool
    _sealed: bool

    def __init__(self, path: Path, header: Header | FleetHeader, disk: Disk | None = None) -> None:
        """Begin a new tape. Raises FileExistsError when there is one."""
        self._hold(path, disk or LocalDisk(), new=True)
        line = encode_header(header)
        written = with_checksum(line) if isinstance(header, Header) else line
        self._write(f"{written}\n".encode())
        self._digest.add(line)

    @classmethod
    def reopen(cls, path: Path, disk: Disk | None = None, mark: Mark | None = None) -> tuple[TapeWriter, Tape]:
        """Return a writer that goes on where the last one died, and the tape.

        A torn end is cut off; a sealed tape stays closed. With a ``mark`` that fits, only what comes behind it is decoded,
        and ``Tape.before`` says so. Raises InfrastructureError while the writer before lives, and as ``read_tape``.
        """
        writer, disk = cls.__new__(cls), disk or LocalDisk()
        writer._hold(path, disk, new=False)
        prefix, tape = _read_for_writer(path, disk, mark)  # under the lock
        if tape.footer is not None:
            writer.let_go()
            return writer, tape
        writer._file.truncate(prefix.size)
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
        count, size = self.count, self._size
        if self._sync_failed:
            self._file.rewrite(self._synced_size, self._read_back(size))
        try:
            self._file.sync()
        except OSError:
            self._sync_failed = True
            raise
        self._sync_failed = False
        self.synced_count, self._synced_size = max(self.synced_count, count), max(self._synced_size, size)

    @property
    def mark(self) -> Mark:
        """The place behind the last record. For the thread that writes."""
        return Mark(self.count, self._size, self._bytes.hex())

    @property
    def digest(self) -> str:
        """The digest that a footer would have now."""
        return self._digest.hex()

    def close(self) -> None:
        """Seal the tape, durably. Safe to call twice. Raises OSError, and may be asked again."""
        if self._file.closed:
            return
        if not self._sealed:
            footer = Footer(self.count, self._digest.hex())
            self._write(f"{encode_footer(footer)}\n".encode())
            self._sealed = True
        self.sync()
        self._file.close()

    def let_go(self) -> None:
        """Stop writing without sealing: another goes on. Safe to call twice."""
        self._file.close()

    def _hold(self, path: Path, disk: Disk, *, new: bool) -> None:
        self.path, self._disk = path, disk
        self._digest, self._bytes = Digest(), Digest()  # of lines, as in the footer; of bytes, as in the file
        self.count = self.synced_count = self._size = self._synced_size = 0
        self._sync_failed = self._sealed = False
        try:
            self._file: HeldFile = disk.hold(path, new=new)
        except BlockingIOError as error:
            detail = f"the tape {path} is being written by another process."
            raise InfrastructureError(detail=detail, remedy="Wait for its end, or end it.") from error

    def _write(self, lines: bytes) -> None:
        try:
            self._file.append(lines)
        except OSError:
            self._file.truncate(self._size)
            raise
        self._size += len(lines)
        self._bytes.add_all(lines)

    def _read_back(self, size: int) -> bytes:
        """The bytes appended since the last sync, as the system still has them."""
        lines = self._disk.read(self.path, self._synced_size, size - self._synced_size)
        try:
            for line in lines.decode().splitlines():
                without_checksum(line)
        except (DataError, UnicodeDecodeError) as error:
            raise OSError(errno.EIO, f"what could not be synced cannot be read back either: {error}") from error
        return lines

    def __enter__(self) -> TapeWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_tape(path: Path, disk: Disk | None = None) -> Tape:
    """Read a tape, also one that is still being written, or whose last line was torn by a crash (``Tape.torn``), or a gzip.

    Raises DataError when the file is missing or no tape, a record in its middle is damaged or out of order, or the
    digest of a sealed tape does not fit.
    """
    raw = _load(path, disk or LocalDisk())
    if raw.startswith(GZIP):
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(detail=f"{path} cannot be unpacked: {error}. Was it copied whole?") from error
    return parse_whole(str(path), raw)[1]


def _read_for_writer(path: Path, disk: Disk, mark: Mark | None) -> tuple[TapePrefix, Tape]:
    """The tape that a writer left; a loss of power may have damaged its end."""
    if mark is not None and (prefix := up_to(mark, _chunks(path, disk, mark.size))) is not None:
        with suppress(DataError):  # whether what follows a damaged line was synced, only the whole tape can tell
            return prefix, parse(str(path), prefix, _load(path, disk, mark.size))
    return parse_whole(str(path), _load(path, disk), after_power_loss=True)


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
