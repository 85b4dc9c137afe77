"""Server-sent events, both ends: how the service frames a tape's records, and how a client reads them again.

    id: 12
    event: record
    data: {"n": 12, "event": {…}, "effects": […]}

A reader that lost the connection resumes with the header ``Last-Event-ID``. ``end`` is the last event of a job that has
ended; a stream that stops without it was cut off, or did not follow. Knows neither files nor sockets, and imports nothing
that reads tapes, because every client imports it.

Source: HTML Living Standard, section 9.2, Server-sent events.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from orchestrator.system.plain import finite

CONTENT_TYPE = "text/event-stream"
RETRY = b"retry: 1000\n\n"
CHECKSUM = re.compile(rb',"crc":"[0-9a-f]{8}"}$')
KEEP_ALIVE = b": nothing new\n\n"


def frames(records: Iterable[tuple[int, bytes]]) -> bytes:
    """Return the events for these records of a tape, each given by its number and its line."""
    return b"".join(b"id: %d\nevent: record\ndata: %s\n\n" % (number, strict_json(line)) for number, line in records)


def end_frame(n: int) -> bytes:
    """Return the event that says that the job has ended, with record ``n``."""
    return b'event: end\ndata: {"n":%d}\n\n' % n


def strict_json(line: bytes) -> bytes:
    """Return the line as strict JSON: NaN and infinities, which tapes may hold, become null.

    The line's checksum is left out, because it is of the line in the file.
    """
    line = CHECKSUM.sub(b"}", line)
    if b"NaN" not in line and b"Infinity" not in line:
        return line
    try:
        return json.dumps(finite(json.loads(line)), separators=(",", ":"), ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # a damaged line of an old tape, which has no checksums
        return b"null"


def events_of(lines: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the data of each event of a stream, given its lines without line ends."""
    name, data = "message", ""
    for line in lines:
        field, _, value = line.partition(":")
        if not line and data:
            yield name, json.loads(data)
        if not line:
            name, data = "message", ""
        elif field == "event":
            name = value.removeprefix(" ")
        elif field == "data":
            data += value.removeprefix(" ")
