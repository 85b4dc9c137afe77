"""The parser of a segment's bytes, which tells a torn end from a damaged middle. It does not know files (``storage``).

The part that a snapshot covers is checked by its digest only, and neither decoded nor held.

A loss of power may leave anything of what was not synced: a part, zeros, a good line behind a bad one. The parser cuts such
a tail off, and nothing is lost: islands send their reports again, and the core makes its decisions again. A line that was
synced and is damaged now is never sent again, and a tape without it would tell another story. So the lines behind a
damaged one are searched for evidence that it was synced (``was_synced``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from orchestrator.core.effects import MergeFragment
from orchestrator.core.events import MergeCompleted, SynchroniserRestarted
from orchestrator.errors import DataError
from orchestrator.tape.schema import (
    CHECKSUM_AT_END,
    Continuation,
    Digest,
    FleetHeader,
    Footer,
    Header,
    Mark,
    Record,
    Tape,
    decode_begin,
    decode_line,
    without_checksum,
)


def was_synced(before: Iterable[Record], after: Iterable[str]) -> bool:
    """Return whether the lines ``after`` a damaged one prove that it was durable, given the records ``before`` it.

    A merge is announced only once the tape is durable up to its decision (``parameters.journal``), and after an epoch began
    nothing is done until that is durable (``host.retry``). With durability async the first is no proof, and taken for one.
    """
    decided_before = {(x.fragment, x.version) for r in before for x in r.effects if isinstance(x, MergeFragment)}
    began = False
    for line in after:
        try:
            record = decode_line(line)
        except DataError:
            continue
        if began or isinstance(record, Footer):
            return True
        event = record.event
        if isinstance(event, MergeCompleted) and (event.fragment, event.version) not in decided_before:
            return bool(event.base_digest)  # a build without a journal synced nothing
        began = isinstance(event, SynchroniserRestarted)
    return False


@dataclass(slots=True)
class TapePrefix:
    """The beginning of a segment as far as it was read: its header and the records up to ``count``, ``size`` bytes in all.

    ``lines`` is the digest of the lines, which the footer has; ``raw`` that of the bytes as they are in the file.
    """

    header: Header | FleetHeader
    continuation: Continuation | None = None
    count: int = 0
    size: int = 0
    lines: Digest = field(default_factory=Digest)
    raw: Digest = field(default_factory=Digest)

    @property
    def first(self) -> int:
        """The number of the last record before this segment."""
        return self.continuation.after.count if self.continuation else 0

    def add(self, line: bytes, plain: str) -> None:
        self.lines.add(plain)
        self.raw.add_all(line + b"\n")
        self.size += len(line) + 1


def begin(name: str, raw: bytes) -> TapePrefix:
    """The prefix of a segment's bytes up to its first record."""
    line, newline, _ = raw.partition(b"\n")
    if not newline:
        raise DataError(detail=f"{name} has no complete line, so it is not a tape.")
    header, continuation = decode_begin(_text(line))
    prefix = TapePrefix(header, continuation)
    prefix.count = prefix.first
    prefix.add(line, without_checksum(_text(line)))
    return prefix


def up_to(mark: Mark, chunks: Iterable[bytes]) -> TapePrefix | None:
    """The prefix up to the mark, whose bytes come as ``chunks``; ``None`` where their digest is not the mark's."""
    first, rest, lines, raw = b"", b"", Digest(), Digest()
    for chunk in chunks:
        raw.add_all(chunk)
        whole, newline, rest = (rest + chunk).rpartition(b"\n")
        first = first or whole.partition(b"\n")[0]
        lines.add_all(CHECKSUM_AT_END.sub(b"}\n", whole + newline))
    if raw.hex() != mark.digest:
        return None
    return TapePrefix(*decode_begin(_text(first)), mark.count, mark.size, lines, raw)


def parse(
    name: str, prefix: TapePrefix, rest: bytes, *, after_power_loss: bool = False, sealed: Sequence[Record] = ()
) -> Tape:
    """Parse ``rest``, the bytes behind ``prefix``, which grows by the whole lines of it.

    ``after_power_loss``: its end may be what a loss of power left. ``sealed`` are all records of the segments before this
    one, which the tape begins with then. Raises DataError as ``read_tape``.
    """
    *whole, broken = rest.split(b"\n")
    torn = f"the last line breaks off after {len(broken)} characters; it was left out" if broken else None
    before, records = prefix.count - len(sealed), list(sealed)
    number_before = 1 + prefix.count - prefix.first
    for index, raw in enumerate(whole, start=1):
        line, number, last = _text(raw), number_before + index, index == len(whole) and not broken
        try:
            decoded = decode_line(line)
        except DataError as error:
            if last:
                torn = f"the last line is damaged; it was left out ({error})"
                break
            if after_power_loss and not was_synced(records, map(_text, whole[index:])):
                torn = f"line {number} and what follows were never synced, and left out ({error})"
                break
            raise DataError(detail=f"line {number} of {name} is damaged: {error}") from error
        if isinstance(decoded, Footer):
            _check_seal(name, decoded, prefix, last)
            return Tape(prefix.header, tuple(records), decoded, before=before)
        if decoded.n != prefix.count + 1:
            raise DataError(
                detail=f"line {number} of {name} is step {decoded.n}, not {prefix.count + 1}: lines are lost."
            )
        records.append(decoded)
        prefix.add(raw, without_checksum(line))
        prefix.count += 1
    return Tape(prefix.header, tuple(records), None, torn, before)


def _text(line: bytes) -> str:
    return line.decode("utf-8", errors="replace")


def _check_seal(name: str, footer: Footer, prefix: TapePrefix, last: bool) -> None:
    if not last:
        raise DataError(detail=f"{name} continues after its footer; two processes must have written it.")
    if (footer.end, footer.digest) != (prefix.count, prefix.lines.hex()):
        raise DataError(
            detail=f"{name} was changed after it was sealed: its footer says {footer.end} steps and digest "
            f"{footer.digest}, its lines give {prefix.count} and {prefix.lines.hex()}."
        )
