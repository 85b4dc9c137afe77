"""Tapes and snapshots on disk: what this package knows of files.

Responsible for: a record being in the file when ``append`` returns (with the operating system, so it survives the process;
after ``sync`` the machine's power, too), one writer at a time, a failed append leaving nothing behind, going on where a
writer died, and a reader that tells a torn end from a damaged middle. Refuses to interpret.
"""

from __future__ import annotations

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
)
from orchestrator.tape.snapshot import Snapshot, decode


class TapeWriter:
    """Writes one tape; a ``Sink``. Close it to seal it with its digest. ``sync`` is for any thread, the rest for one.

    ``count`` is the number of the last record, ``synced_count`` that of the last one known to survive a loss of power.
    """

    count: int
    synced_count: int

    def __init__(self, path: Path, header: Header | FleetHeader, disk: Disk | None = None) -> None:
        """Begin a new tape. Raises FileExistsError when there is one."""
        self._hold(path, disk or LocalDisk(), new=True)
        self._write(f"{encode_header(header)}\n".encode())

    @classmethod
    def reopen(cls, path: Path, disk: Disk | None = None, mark: Mark | None = None) -> tuple[TapeWriter, Tape]:
        """Go on where a writer died, and what is there: a torn end is cut off. A sealed tape stays closed.

        Raises InfrastructureError while the writer before lives, and as ``read_tape``.
        """
        writer, disk = cls.__new__(cls), disk or LocalDisk()
        writer._hold(path, disk, new=False)
        raw = _load(path, disk)  # under the lock
        tape, size = _parse(path, raw, mark)
        if tape.footer is not None:
            writer.let_go()
            return writer, tape
        writer._file.truncate(size)
        writer._digest.add_all(raw[:size])
        writer._size, writer.count = size, tape.count
        return writer, tape

    def append(self, record: Record) -> None:
        """Raises OSError when it cannot be written. Nothing of it is in the file then, and it may be asked again."""
        self._write(f"{encode_record(record)}\n".encode())
        self.count = record.n

    def append_lines(self, lines: bytes, count: int) -> None:
        """Records already encoded, each with its newline; ``count`` is the number of the last one."""
        self._write(lines)
        self.count = count

    def sync(self) -> None:
        """What was appended before survives a loss of power: ``synced_count`` says up to where. Raises OSError."""
        count = self.count
        self._file.sync()
        self.synced_count = max(self.synced_count, count)

    @property
    def mark(self) -> Mark:
        """Where it stands. For the thread that writes."""
        return Mark(self.count, self._size, self._digest.hex())

    def close(self) -> None:
        """Seal the tape. Safe to call twice."""
        if self._file.closed:
            return
        footer = Footer(self.count, self._digest.hex())
        self._write(f"{encode_footer(footer)}\n".encode())
        self._file.close()

    def let_go(self) -> None:
        """Stop writing without sealing: another goes on. Safe to call twice."""
        self._file.close()

    def _hold(self, path: Path, disk: Disk, *, new: bool) -> None:
        self.path, self._digest, self._size = path, Digest(), 0
        self.count = self.synced_count = 0
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
        self._digest.add_all(lines)

    def __enter__(self) -> TapeWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_tape(path: Path, disk: Disk | None = None, mark: Mark | None = None) -> Tape:
    """Read a tape, also one that is still being written or whose last line was torn by a crash (``Tape.torn``).

    With a ``mark`` that fits, only what comes behind it is decoded, and ``Tape.before`` says so.

    Raises DataError when the file is missing or no tape, a record in its middle is damaged or out of order, or the
    digest of a sealed tape does not fit.
    """
    return _parse(path, _load(path, disk or LocalDisk()), mark)[0]


def _load(path: Path, disk: Disk) -> bytes:
    try:
        return disk.read(path)
    except OSError as error:
        raise DataError(detail=f"the tape {path} cannot be read: {error.strerror}. Check the path.") from error


def _parse(path: Path, raw: bytes, mark: Mark | None) -> tuple[Tape, int]:
    """The tape in ``raw``, and how many bytes its header and whole records take."""
    begin, newline, _ = raw.partition(b"\n")
    if not newline:
        raise DataError(detail=f"{path} holds no complete line, so it is no tape.")
    header, digest = decode_header(begin.decode("utf-8", errors="replace")), Digest()
    if mark is None or not _fits(mark, raw):
        mark = Mark(0, len(begin) + 1, "")
    size, records = mark.size, list[Record]()
    digest.add_all(raw[:size])
    *whole, rest = raw[size:].split(b"\n")
    torn = f"the last line breaks off after {len(rest)} characters; it was left out" if rest else None
    for index, line in enumerate(whole, start=1):
        number, last = 1 + mark.count + index, index == len(whole) and not rest
        try:
            decoded = decode_line(line.decode("utf-8", errors="replace"))
        except DataError as error:
            if last:
                torn = f"the last line is damaged; it was left out ({error})"
                break
            raise DataError(detail=f"line {number} of {path} is damaged: {error}") from error
        count = mark.count + len(records)
        if isinstance(decoded, Footer):
            _check_seal(path, decoded, count, digest.hex(), last)
            return Tape(header, tuple(records), decoded, before=mark.count), size
        if decoded.n != count + 1:
            raise DataError(detail=f"line {number} of {path} is step {decoded.n}, not {count + 1}: lines are lost.")
        records.append(decoded)
        digest.add_all(line + b"\n")
        size += len(line) + 1
    return Tape(header, tuple(records), None, torn, mark.count), size


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
