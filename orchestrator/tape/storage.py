"""Tapes on disk: what this package knows of files.

Responsible for: a record being in the file when ``append`` returns (with the operating system, so it survives the process;
after ``sync`` the machine's power, too), one writer at a time, a failed append leaving nothing behind, a failed sync being
made good, going on where a writer died, and a reader that tells a torn end from a damaged middle. Refuses to interpret
(what a loss of power may have done to the end, ``tail`` says).
"""

from __future__ import annotations

import errno
from pathlib import Path

from orchestrator.disk import Disk, HeldFile, LocalDisk
from orchestrator.errors import DataError, InfrastructureError
from orchestrator.tape.schema import (
    Digest,
    FleetHeader,
    Footer,
    Header,
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
from orchestrator.tape.tail import was_synced


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
    def reopen(cls, path: Path, disk: Disk | None = None) -> tuple[TapeWriter, Tape]:
        """Go on where a writer died, and what is there: a torn end is cut off. A sealed tape stays closed.

        Raises InfrastructureError while the writer before lives, and as ``read_tape``.
        """
        writer, disk = cls.__new__(cls), disk or LocalDisk()
        writer._hold(path, disk, new=False)
        raw = _load(path, disk)  # under the lock
        tape, digest = _parse(path, raw, powerless=True)
        if tape.footer is not None:
            writer.let_go()
            return writer, tape
        whole = b"".join(raw.splitlines(keepends=True)[: 1 + len(tape.records)])
        writer._file.truncate(len(whole))
        writer._digest = digest
        writer._size, writer.count = len(whole), len(tape.records)
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
        self.path, self._disk, self._digest = path, disk, Digest()
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


def read_tape(path: Path, disk: Disk | None = None) -> Tape:
    """Read a tape, also one that is still being written or whose last line was torn by a crash (``Tape.torn``).

    Raises DataError when the file is missing or no tape, a record in its middle is damaged or out of order, or the
    digest of a sealed tape does not fit.
    """
    return _parse(path, _load(path, disk or LocalDisk()))[0]


def _load(path: Path, disk: Disk) -> bytes:
    try:
        return disk.read(path)
    except OSError as error:
        raise DataError(detail=f"the tape {path} cannot be read: {error.strerror}. Check the path.") from error


def _parse(path: Path, raw: bytes, *, powerless: bool = False) -> tuple[Tape, Digest]:
    """The tape and its digest up to there; ``powerless``: its end may be what a loss of power left."""
    *whole, rest = raw.decode("utf-8", errors="replace").split("\n")
    if not whole:
        raise DataError(detail=f"{path} holds no complete line, so it is no tape.")
    digest, header = Digest(), decode_header(whole[0])
    records: list[Record] = []
    digest.add(without_checksum(whole[0]))
    torn = f"the last line breaks off after {len(rest)} characters; it was left out" if rest else None
    for number, line in enumerate(whole[1:], start=2):
        try:
            decoded = decode_line(line)
        except DataError as error:
            if number == len(whole) and not rest:
                torn = f"the last line is damaged; it was left out ({error})"
                break
            if powerless and not was_synced(records, whole[number:]):
                torn = f"line {number} and what follows were never synced, and left out ({error})"
                break
            raise DataError(detail=f"line {number} of {path} is damaged: {error}") from error
        if isinstance(decoded, Footer):
            _check_seal(path, decoded, len(records), digest.hex(), number == len(whole) and not rest)
            return Tape(header, tuple(records), decoded), digest
        if decoded.n != len(records) + 1:
            raise DataError(
                detail=f"line {number} of {path} is step {decoded.n}, not {len(records) + 1}: lines are lost."
            )
        records.append(decoded)
        digest.add(without_checksum(line))
    return Tape(header, tuple(records), None, torn), digest


def _check_seal(path: Path, footer: Footer, count: int, digest: str, last: bool) -> None:
    if not last:
        raise DataError(detail=f"{path} goes on after its footer; two writers must have shared it.")
    if footer.end != count or footer.digest != digest:
        raise DataError(
            detail=f"{path} was changed after it was sealed: its footer says {footer.end} steps and digest "
            f"{footer.digest}, its lines give {count} and {digest}."
        )
