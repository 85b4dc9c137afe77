"""The sealed segments of a tape: their compressed form, and the chain that binds each of them to the next.

    tape.jsonl                   the newest segment, plain, which a writer appends to
    tape.sealed/00000001.zst     the first one, sealed, and so on

A sealed segment is a Zstandard frame of one line about itself and of the lines of its file, without their checksums where
these can be computed again. The digest that the next segment's header has is that of the file as it was.

Responsible for: that a damaged, exchanged or missing segment is refused by its name, in bounded memory. The chain has no
key: it finds damage, not forgery. Refuses to know: files (``storage``), and what the records say (``reading``).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from hashlib import blake2b

import zstandard

from orchestrator.errors import DataError
from orchestrator.tape.schema import CHECKSUM_AT_END, SEGMENT_BYTES_MAX, Continuation, Mark, decode_begin

SCHEMA = "atoll-segment/1"
LEVEL = 9
"""Of the levels 3 to 19, the last that is quick: 80 MB/s, and 6 % larger than 19 at 1.4 MB/s."""
WINDOW_MAX = 1 << 27
SEAL_BYTES = 4 << 20
"""A segment that is smaller stays plain: most jobs have one file only."""


def seal(lines: bytes) -> bytes:
    """Return the sealed form of a segment's lines."""
    plain = CHECKSUM_AT_END.sub(b"}\n", lines)
    again = _with_checksums(plain) == lines
    about = json.dumps({"schema": SCHEMA, "checksums": again}).encode()
    return zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).compress(
        b"%s\n%s" % (about, plain if again else lines)
    )


def unseal(name: str, sealed: bytes) -> bytes:
    """Return a segment's lines as they were. Raises DataError unless these bytes are whole and of bounded size."""
    try:
        size = zstandard.frame_content_size(sealed)
        if not 0 <= size <= SEGMENT_BYTES_MAX:
            raise DataError(
                detail=f"{name} is damaged: it unpacks to {size:,} bytes, not to 0 to {SEGMENT_BYTES_MAX:,}."
            )
        reader = zstandard.ZstdDecompressor(max_window_size=WINDOW_MAX)
        about, newline, lines = reader.decompress(sealed, allow_extra_data=False).partition(b"\n")
        document = json.loads(about) if newline else None
    except (zstandard.ZstdError, ValueError, RecursionError) as error:
        raise DataError(detail=f"{name} is damaged, and cannot be unpacked: {error}.") from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise DataError(detail=f"{name} is no sealed segment of schema {SCHEMA!r}: it begins with {about[:80]!r}.")
    return _with_checksums(lines) if document.get("checksums") is True else lines


Load = Callable[[int], tuple[str, bytes]]
"""Returns the name of the segment with this number, for people, and its sealed bytes. Raises DataError if it cannot."""


def chained(newest: Continuation, load: Load) -> Iterator[tuple[str, bytes]]:
    """Yield name and lines of every sealed segment before ``newest``, oldest first, each once its chain is checked.

    Raises DataError with the name of the segment that is missing, damaged, or of another tape.
    """
    try:
        yield from _forward(newest, load)
    except DataError:
        require_chain(newest, load)  # it raises for the segment that a sound one does not continue
        raise


def require_chain(newest: Continuation, load: Load) -> None:
    """Raise DataError for the newest sealed segment that is not the one which its successor continues.

    Only this direction tells which of two segments is damaged: whether the later one's header can be trusted is known then.
    """
    link: Continuation | None = newest
    for number in range(newest.segment - 1, 0, -1):
        name, lines = unsealed(number, load)
        assert link is not None
        require_link(name, lines, link.after)
        link = begin_of(name, lines)
        _require_number(name, number, link)


def unsealed(number: int, load: Load) -> tuple[str, bytes]:
    """Return name and lines of one segment, which may be of another tape. Raises DataError."""
    name, sealed = load(number)
    return name, unseal(name, sealed)


def _forward(newest: Continuation, load: Load) -> Iterator[tuple[str, bytes]]:
    before: tuple[str, bytes] | None = None
    for number in range(1, newest.segment):
        name, lines = unsealed(number, load)
        continuation = begin_of(name, lines)
        _require_number(name, number, continuation)
        if before is not None and continuation is not None:
            require_link(*before, continuation.after)
            yield before
        before = (name, lines)
    if before is not None:
        require_link(*before, newest.after)
        yield before


def _require_number(name: str, number: int, continuation: Continuation | None) -> None:
    if (actual := continuation.segment if continuation else 1) != number:
        raise DataError(detail=f"{name} is segment {actual} of a tape, not {number}. Put it back from a copy.")


def begin_of(name: str, lines: bytes) -> Continuation | None:
    """Return what the header in the first of these lines continues. Raises DataError, with the name, for anything else."""
    try:
        return decode_begin(lines.partition(b"\n")[0].decode(errors="replace"))[1]
    except DataError as error:
        raise DataError(detail=f"{name} does not begin with a header: {error}") from error


def require_link(name: str, lines: bytes, mark: Mark) -> None:
    """Raise DataError unless these lines are those that the next segment continues."""
    digest = blake2b(lines, digest_size=16).hexdigest()
    if (len(lines), digest) != (mark.size, mark.digest):
        raise DataError(
            detail=f"{name} is damaged or of another tape: it has {len(lines):,} bytes with the digest {digest}, and the "
            f"segment after it continues {mark.size:,} bytes with {mark.digest}. Put it back from a copy."
        )


def _with_checksums(lines: bytes) -> bytes:
    return b"".join(b'%s,"crc":"%08x"}\n' % (line[:-1], zlib.crc32(line)) for line in lines.split(b"\n")[:-1])
