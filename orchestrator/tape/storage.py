"""Tapes and snapshots on disk: what this package knows of files.

Responsible for: a record being in the file when ``append`` returns (with the operating system, so it survives the process;
after ``sync`` the machine's power, too), one writer at a time, a failed append leaving nothing behind, a failed sync being
made good, going on where a writer died, and a reader that tells a torn end from a damaged middle. Refuses to interpret
(what a loss of power may have done to the end, ``tail`` says).
"""

from __future__ import annotations

import errno
import gzip
import zlib
from functools import cache
from hashlib import blake2b
from pathlib import Path

from orchestrator import accounting, core, tape
from orchestrator.disk import Disk, HeldFile, LocalDisk
from orchestrator.errors import DataError, InfrastructureError
from orchestrator.tape.schema import (
    Digest,
    FleetHeader,
    Footer,
    Header,
    Mark,
    Record,
    Tape,
    decode_header,
    decode_line,
    encode_footer,
    encode_header,
    encode_record,
    with_checksum,
    without_checksum,
)
from orchestrator.tape.snapshot import Snapshot, decode
from orchestrator.tape.tail import was_synced

GZIP = b"\x1f\x8b"


class TapeWriter:
    """Writes one tape; a ``Sink``. Close it to seal it with its digest. ``sync`` is for any thread, the rest for one.

    ``count`` is the number of the last record, ``synced_count`` that of the last one known to survive a loss of power.
    """

    count: int
    synced_count: int
    _size: int
    _synced_size: int
    _doubtful: bool
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
        """Go on where a writer died, and what is there: a torn end is cut off. A sealed tape stays closed.

        Raises InfrastructureError while the writer before lives, and as ``read_tape``.
        """
        writer, disk = cls.__new__(cls), disk or LocalDisk()
        writer._hold(path, disk, new=False)
        raw = _load(path, disk)  # under the lock
        tape, digest, size = _parse(path, raw, mark, powerless=True)
        if tape.footer is not None:
            writer.let_go()
            return writer, tape
        writer._file.truncate(size)
        writer._digest = digest
        writer._bytes.add_all(raw[:size])
        writer._size, writer.count = size, tape.count
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
        """What was appended before survives a loss of power: ``synced_count`` says up to where.

        Raises OSError, and may be asked again: what it could not sync is then written anew, for the system counts it as
        written.
        """
        count, size = self.count, self._size
        if self._doubtful:
            self._file.rewrite(self._synced_size, self._read_back(size))
        try:
            self._file.sync()
        except OSError:
            self._doubtful = True
            raise
        self._doubtful = False
        self.synced_count, self._synced_size = max(self.synced_count, count), max(self._synced_size, size)

    @property
    def mark(self) -> Mark:
        """Where it stands. For the thread that writes."""
        return Mark(self.count, self._size, self._bytes.hex())

    @property
    def digest(self) -> str:
        """What the footer would say now."""
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
        self._digest, self._bytes = (
            Digest(),
            Digest(),
        )  # of the lines, which the footer tells; and as they are in the file
        self.count = self.synced_count = self._size = self._synced_size = 0
        self._doubtful = self._sealed = False
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
        """What was appended since the last sync, as the system still has it."""
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


def read_tape(path: Path, disk: Disk | None = None, mark: Mark | None = None) -> Tape:
    """Read a tape, also one that is still being written, or whose last line was torn by a crash (``Tape.torn``), or a gzip.

    With a ``mark`` that fits, only what comes behind it is decoded, and ``Tape.before`` says so.

    Raises DataError when the file is missing or no tape, a record in its middle is damaged or out of order, or the
    digest of a sealed tape does not fit.
    """
    raw = _load(path, disk or LocalDisk())
    if raw.startswith(GZIP):
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(detail=f"{path} cannot be unpacked: {error}. Was it copied whole?") from error
    return _parse(path, raw, mark)[0]


def _load(path: Path, disk: Disk) -> bytes:
    try:
        return disk.read(path)
    except OSError as error:
        raise DataError(detail=f"the tape {path} cannot be read: {error.strerror}. Check the path.") from error


def _parse(path: Path, raw: bytes, mark: Mark | None = None, *, powerless: bool = False) -> tuple[Tape, Digest, int]:
    """The tape, its digest, and how many bytes are whole; ``powerless``: its end may be what a loss of power left."""
    begin, newline, _ = raw.partition(b"\n")
    if not newline:
        raise DataError(detail=f"{path} holds no complete line, so it is no tape.")
    header, digest = decode_header(_text(begin)), Digest()
    if mark is None or not _fits(mark, raw):
        mark = Mark(0, len(begin) + 1, "")
    size, records = mark.size, list[Record]()
    for known in raw[:size].splitlines():
        digest.add(without_checksum(_text(known)))
    *whole, rest = raw[size:].split(b"\n")
    torn = f"the last line breaks off after {len(rest)} characters; it was left out" if rest else None
    for index, line in enumerate(map(_text, whole), start=1):
        number, last = 1 + mark.count + index, index == len(whole) and not rest
        try:
            decoded = decode_line(line)
        except DataError as error:
            if last:
                torn = f"the last line is damaged; it was left out ({error})"
                break
            if powerless and mark.count:  # whether what follows was synced, only the whole tape can tell
                return _parse(path, raw, powerless=True)
            if powerless and not was_synced(records, map(_text, whole[index:])):
                torn = f"line {number} and what follows were never synced, and left out ({error})"
                break
            raise DataError(detail=f"line {number} of {path} is damaged: {error}") from error
        count = mark.count + len(records)
        if isinstance(decoded, Footer):
            _check_seal(path, decoded, count, digest.hex(), last)
            return Tape(header, tuple(records), decoded, before=mark.count), digest, size
        if decoded.n != count + 1:
            raise DataError(detail=f"line {number} of {path} is step {decoded.n}, not {count + 1}: lines are lost.")
        records.append(decoded)
        digest.add(without_checksum(line))
        size += len(whole[index - 1]) + 1
    return Tape(header, tuple(records), None, torn, mark.count), digest, size


def _text(line: bytes) -> str:
    return line.decode("utf-8", errors="replace")


def _fits(mark: Mark, raw: bytes) -> bool:
    before = Digest()
    before.add_all(raw[: mark.size])
    return len(raw) >= mark.size and before.hex() == mark.digest


def _check_seal(path: Path, footer: Footer, count: int, digest: str, last: bool) -> None:
    if not last:
        raise DataError(detail=f"{path} goes on after its footer; two writers must have shared it.")
    if footer.end != count or footer.digest != digest:
        raise DataError(
            detail=f"{path} was changed after it was sealed: its footer says {footer.end} steps and digest "
            f"{footer.digest}, its lines give {count} and {digest}."
        )


def keep_snapshot(path: Path, raw: bytes, disk: Disk | None = None) -> None:
    """Put an encoded snapshot in the place of the one before, whole or not at all. Raises OSError."""
    (disk or LocalDisk()).replace(path, raw)


def read_snapshot(path: Path, disk: Disk | None = None) -> Snapshot | None:
    """``None`` where there is none. Raises DataError, with the reason, where it is not to be used."""
    try:
        raw = (disk or LocalDisk()).read(path)
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
