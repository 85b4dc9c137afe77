"""Tapes on disk: what this package knows of files.

Responsible for: a record being in the file when ``append`` returns (with the operating system, so it survives the process;
after ``sync`` the machine's power, too), one writer at a time, a failed append leaving nothing behind, going on where a
writer died, and a reader that tells a torn end from a damaged middle. Refuses to interpret.
"""

from __future__ import annotations

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
)


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
    def reopen(cls, path: Path, disk: Disk | None = None) -> tuple[TapeWriter, Tape]:
        """Go on where a writer died, and what is there: a torn end is cut off. A sealed tape stays closed.

        Raises InfrastructureError while the writer before lives, and as ``read_tape``.
        """
        writer, disk = cls.__new__(cls), disk or LocalDisk()
        writer._hold(path, disk, new=False)
        raw = _load(path, disk)  # under the lock
        tape = _parse(path, raw)
        if tape.footer is not None:
            writer.let_go()
            return writer, tape
        whole = b"".join(raw.splitlines(keepends=True)[: 1 + len(tape.records)])
        writer._file.truncate(len(whole))
        writer._digest.add_all(whole)
        writer._size, writer.count = len(whole), len(tape.records)
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
    def digest(self) -> str:
        """What the footer would say now."""
        return self._digest.hex()

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


def read_tape(path: Path, disk: Disk | None = None) -> Tape:
    """Read a tape, also one that is still being written or whose last line was torn by a crash (``Tape.torn``).

    Raises DataError when the file is missing or no tape, a record in its middle is damaged or out of order, or the
    digest of a sealed tape does not fit.
    """
    return _parse(path, _load(path, disk or LocalDisk()))


def _load(path: Path, disk: Disk) -> bytes:
    try:
        return disk.read(path)
    except OSError as error:
        raise DataError(detail=f"the tape {path} cannot be read: {error.strerror}. Check the path.") from error


def _parse(path: Path, raw: bytes) -> Tape:
    *whole, rest = raw.decode("utf-8", errors="replace").split("\n")
    if not whole:
        raise DataError(detail=f"{path} holds no complete line, so it is no tape.")
    digest, header = Digest(), decode_header(whole[0])
    records: list[Record] = []
    digest.add(whole[0])
    torn = f"the last line breaks off after {len(rest)} characters; it was left out" if rest else None
    for number, line in enumerate(whole[1:], start=2):
        try:
            decoded = decode_line(line)
        except DataError as error:
            if number == len(whole) and not rest:
                torn = f"the last line is damaged; it was left out ({error})"
                break
            raise DataError(detail=f"line {number} of {path} is damaged: {error}") from error
        if isinstance(decoded, Footer):
            _check_seal(path, decoded, len(records), digest.hex(), number == len(whole) and not rest)
            return Tape(header, tuple(records), decoded)
        if decoded.n != len(records) + 1:
            raise DataError(
                detail=f"line {number} of {path} is step {decoded.n}, not {len(records) + 1}: lines are lost."
            )
        records.append(decoded)
        digest.add(line)
    return Tape(header, tuple(records), None, torn)


def _check_seal(path: Path, footer: Footer, count: int, digest: str, last: bool) -> None:
    if not last:
        raise DataError(detail=f"{path} goes on after its footer; two writers must have shared it.")
    if footer.end != count or footer.digest != digest:
        raise DataError(
            detail=f"{path} was changed after it was sealed: its footer says {footer.end} steps and digest "
            f"{footer.digest}, its lines give {count} and {digest}."
        )
