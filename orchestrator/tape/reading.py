"""The bytes of a tape, and what they say: its records, or, of what a snapshot stands for, only that they are those.

Responsible for: a reader that tells a torn end from a damaged middle, and going through what is known already without
holding or decoding it. Refuses to know files; what a loss of power may have done to the end, ``tail`` says.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from orchestrator.errors import DataError
from orchestrator.tape.schema import (
    CHECKSUM,
    Digest,
    FleetHeader,
    Footer,
    Header,
    Mark,
    Record,
    Tape,
    decode_header,
    decode_line,
    without_checksum,
)
from orchestrator.tape.tail import was_synced

_CHECKSUM_AT_END = re.compile(re.escape(CHECKSUM.encode()) + rb'[0-9a-f]{8}"\}\n')


@dataclass(slots=True)
class Known:
    """The part of a tape that was gone through: its header and ``count`` records, ``size`` bytes in all.

    ``lines`` is the digest of the lines, which the footer tells; ``raw`` that of the bytes as they are in the file.
    """

    header: Header | FleetHeader
    count: int = 0
    size: int = 0
    lines: Digest = field(default_factory=Digest)
    raw: Digest = field(default_factory=Digest)

    def add(self, line: bytes, plain: str) -> None:
        self.lines.add(plain)
        self.raw.add_all(line + b"\n")
        self.size += len(line) + 1


def parse_whole(name: str, raw: bytes, *, powerless: bool = False) -> tuple[Known, Tape]:
    """A tape's bytes, from its header on; otherwise as ``parse``."""
    begin, newline, rest = raw.partition(b"\n")
    if not newline:
        raise DataError(detail=f"{name} holds no complete line, so it is no tape.")
    known = Known(decode_header(_text(begin)))
    known.add(begin, without_checksum(_text(begin)))
    return known, parse(name, known, rest, powerless=powerless)


def up_to(mark: Mark, chunks: Iterable[bytes]) -> Known | None:
    """Behind what the mark stands for, given as ``chunks``; ``None`` where they are other bytes than it knows."""
    first, rest, lines, raw = b"", b"", Digest(), Digest()
    for chunk in chunks:
        raw.add_all(chunk)
        whole, newline, rest = (rest + chunk).rpartition(b"\n")
        first = first or whole.partition(b"\n")[0]
        lines.add_all(_CHECKSUM_AT_END.sub(b"}\n", whole + newline))
    if raw.hex() != mark.digest:
        return None
    return Known(decode_header(_text(first)), mark.count, mark.size, lines, raw)


def parse(name: str, known: Known, rest: bytes, *, powerless: bool = False) -> Tape:
    """What ``rest`` says, which comes behind ``known``; what is whole of it is known then, too.

    ``powerless``: its end may be what a loss of power left. Raises DataError as ``read_tape``.
    """
    *whole, broken = rest.split(b"\n")
    torn = f"the last line breaks off after {len(broken)} characters; it was left out" if broken else None
    before, records = known.count, list[Record]()
    for index, raw in enumerate(whole, start=1):
        line, number, last = _text(raw), 1 + before + index, index == len(whole) and not broken
        try:
            decoded = decode_line(line)
        except DataError as error:
            if last:
                torn = f"the last line is damaged; it was left out ({error})"
                break
            if powerless and not was_synced(records, map(_text, whole[index:])):
                torn = f"line {number} and what follows were never synced, and left out ({error})"
                break
            raise DataError(detail=f"line {number} of {name} is damaged: {error}") from error
        if isinstance(decoded, Footer):
            _check_seal(name, decoded, known, last)
            return Tape(known.header, tuple(records), decoded, before=before)
        if decoded.n != known.count + 1:
            raise DataError(
                detail=f"line {number} of {name} is step {decoded.n}, not {known.count + 1}: lines are lost."
            )
        records.append(decoded)
        known.add(raw, without_checksum(line))
        known.count += 1
    return Tape(known.header, tuple(records), None, torn, before)


def _text(line: bytes) -> str:
    return line.decode("utf-8", errors="replace")


def _check_seal(name: str, footer: Footer, known: Known, last: bool) -> None:
    if not last:
        raise DataError(detail=f"{name} goes on after its footer; two writers must have shared it.")
    if (footer.end, footer.digest) != (known.count, known.lines.hex()):
        raise DataError(
            detail=f"{name} was changed after it was sealed: its footer says {footer.end} steps and digest "
            f"{footer.digest}, its lines give {known.count} and {known.lines.hex()}."
        )
