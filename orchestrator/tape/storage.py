"""Tapes on disk: the only file of this package that touches one.

Responsible for: a record being in the file when ``append`` returns (flushed to the operating system, so it survives the
process, not the machine's power), and for a reader that tells a torn end from a damaged middle. Refuses to interpret.
"""

from __future__ import annotations

from pathlib import Path

from orchestrator.errors import DataError
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
    """Writes one new tape; a ``Sink``. Close it to seal it with its digest. Not for several threads at once."""

    def __init__(self, path: Path, header: Header | FleetHeader) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._digest = Digest()
        self._count = 0
        self._file = path.open("x", encoding="utf-8", newline="\n")
        self._write(encode_header(header))

    def append(self, record: Record) -> None:
        self._write(encode_record(record))
        self._count = record.n

    def append_lines(self, lines: bytes, count: int) -> None:
        """Records already encoded, each with its newline; ``count`` is the number of the last one. Flushed once."""
        self._file.buffer.write(lines)  # every write before this one was flushed
        self._file.flush()
        self._digest.add_all(lines)
        self._count = count

    @property
    def digest(self) -> str:
        """What the footer would say now."""
        return self._digest.hex()

    def close(self) -> None:
        """Seal the tape. Safe to call twice."""
        if self._file.closed:
            return
        footer = Footer(self._count, self._digest.hex())
        self._file.write(encode_footer(footer) + "\n")
        self._file.close()

    def _write(self, line: str) -> None:
        self._file.write(line + "\n")
        self._file.flush()
        self._digest.add(line)

    def __enter__(self) -> TapeWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_tape(path: Path) -> Tape:
    """Read a tape, also one that is still being written or whose last line was torn by a crash (``Tape.torn``).

    Raises DataError when the file is missing or no tape, a record in its middle is damaged or out of order, or the
    digest of a sealed tape does not fit.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(detail=f"the tape {path} cannot be read: {error.strerror}. Check the path.") from error
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
