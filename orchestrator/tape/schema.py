"""The lines of a tape: a header, one record per step, a footer with the digest of everything before it.

    {"schema": "atoll-tape/1", "job": …, "epoch": 1, "started_at": …, "policy": {…}}
    {"n": 1, "event": {"type": …, …}, "effects": [{"type": …, …}, …], "crc": "…"}
    …
    {"end": 1234, "digest": "…"}

The tape of a long job is a chain of *segments* (``sealing``). Each is such a file, but for the footer, which only the newest
one has. The header of every segment but the first says how the one before it ends:

    {"schema": "atoll-tape/2", "segment": 2, "after": {"count": …, "size": …, "digest": "…"}, "job": …, …}

A *fleet tape* (simulated failures of slices, ``orchestrator/elastic``) has the same lines; its header says "fleet": true,
its policy is an ``ElasticPolicy``, and it holds the plan and the seed that made it.

Responsible for: what the lines say and how they are chained. Refuses to know: files (``storage``), and what the records
mean. The footer's digest is blake2b over header and records of its file, newlines included, checksums not; a tape without
a footer was not closed. ``crc`` distinguishes a damaged line from a good one, also where it can still be parsed; fleet tapes
and older ones have none.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, cast

from orchestrator.core.effects import Effect
from orchestrator.core.events import Event
from orchestrator.core.vocabulary import JobPolicy
from orchestrator.elastic import ElasticPolicy, FleetEffect, FleetEvent
from orchestrator.errors import DataError
from orchestrator.tape.codec import decode, decode_tagged, to_json

SCHEMA = "atoll-tape/1"
SCHEMA_CONTINUED = "atoll-tape/2"
"""The schema of a segment that continues another: earlier builds refuse it by name."""
CONTINUATION_BYTES = 256
"""The header of such a segment says within so many bytes what it continues."""
_CONTINUED = re.compile(
    rb'\{"schema":"%s","segment":(\d{1,9}),"after":\{"count":(\d{1,18}),"size":(\d{1,18}),"digest":"([0-9a-f]{32})"\},'
    % SCHEMA_CONTINUED.encode()
)
BEGINNING_BYTES = 1024
"""The header of a job's tape says within so many bytes in which epoch it begins."""
_EPOCH = re.compile(rb'\{[^\n]*?,"epoch":(\d{1,18}),"started_at":')
CHECKSUM = ',"crc":"'
CHECKSUM_AT_END = re.compile(re.escape(CHECKSUM.encode()) + rb'[0-9a-f]{8}"\}\n')
SEGMENT_BYTES_MAX = 256 << 20
"""The largest segment that is unpacked. Writers seal far smaller ones (``sealing.SEAL_BYTES``)."""


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a job's tape: all that a replay needs to build the same core.

    ``started_at`` is the job's creation in Unix seconds; 0 if simulated.
    """

    job: str
    policy: JobPolicy
    started_at: float = 0.0
    epoch: int = 1


@dataclass(frozen=True, slots=True)
class FleetHeader:
    """The same for a fleet. ``plan`` (plain data) and ``seed`` made it: for people and for simulating it again."""

    job: str
    policy: ElasticPolicy
    plan: Mapping[str, Any]
    seed: int


@dataclass(frozen=True, slots=True)
class Record:
    """One step: the ``n``-th event (from 1) and what was decided on it. A tape holds a job's or a fleet's, never both."""

    n: int
    event: Event | FleetEvent
    effects: tuple[Effect | FleetEffect, ...]


@dataclass(frozen=True, slots=True)
class Footer:
    end: int
    digest: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A place on a tape: behind its first ``count`` records, ``size`` bytes in all, which have this ``digest``."""

    count: int
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class Continuation:
    """``segment`` is the number of a tape's segment, from 2. ``after`` is the end of the one before, in its own file."""

    segment: int
    after: Mark


@dataclass(frozen=True, slots=True)
class Tape:
    """A tape in memory. ``torn`` says what is wrong with its last line, if anything is.

    ``before`` records were left out at its beginning: a snapshot stands for them.
    """

    header: Header | FleetHeader
    records: tuple[Record, ...]
    footer: Footer | None = None
    torn: str | None = None
    before: int = 0

    @property
    def count(self) -> int:
        """The number of the last record."""
        return self.before + len(self.records)


def job_steps(tape: Tape) -> Iterator[tuple[Event, tuple[Effect, ...]]]:
    """Every event of a job's tape with what was decided on it; a fleet's tape has others."""
    for record in tape.records:
        yield cast("tuple[Event, tuple[Effect, ...]]", (record.event, record.effects))


@dataclass(slots=True)
class Digest:
    """The rolling digest over lines."""

    _hash: Any = field(default_factory=lambda: blake2b(digest_size=16))

    def add(self, line: str) -> None:
        self._hash.update(line.encode())
        self._hash.update(b"\n")

    def add_all(self, lines: bytes) -> None:
        """Whole lines at once, each with its newline."""
        self._hash.update(lines)

    def hex(self) -> str:
        return str(self._hash.hexdigest())


def encode_header(header: Header | FleetHeader, continuation: Continuation | None = None) -> str:
    if isinstance(header, FleetHeader):
        about = {"schema": SCHEMA, "fleet": True, "job": header.job, "seed": header.seed}
        return to_json({**about, "plan": header.plan, "policy": header.policy})
    schema: dict[str, Any] = {"schema": SCHEMA}
    if continuation is not None:
        schema = {"schema": SCHEMA_CONTINUED, "segment": continuation.segment, "after": continuation.after}
    return to_json(
        {
            **schema,
            "job": header.job,
            "epoch": header.epoch,
            "started_at": header.started_at,
            "policy": header.policy,
        }
    )


def encode_record(record: Record) -> str:
    return to_json({"n": record.n, "event": record.event, "effects": record.effects})


def with_checksum(line: str) -> str:
    """A header or record as a job's tape has it: with the CRC-32 of the line as it is without."""
    return f'{line[:-1]}{CHECKSUM}{zlib.crc32(line.encode()):08x}"}}'


def without_checksum(line: str) -> str:
    """The line without its checksum, if it has one. Raises DataError if that does not fit."""
    begin = len(line) - len(CHECKSUM) - 10
    if begin < 0 or not (line.startswith(CHECKSUM, begin) and line.endswith('"}')):
        return line
    plain = line[:begin] + "}"
    if (actual := f"{zlib.crc32(plain.encode()):08x}") != line[-10:-2]:
        raise DataError(detail=f"its checksum is {actual}, not {line[-10:-2]}: {line[:80]!r}.")
    return plain


def encode_footer(footer: Footer) -> str:
    return to_json({"end": footer.end, "digest": footer.digest})


def decode_header(line: str) -> Header | FleetHeader:
    """Raises DataError unless the line is the header of a tape this build can read."""
    return decode_begin(line)[0]


def decode_begin(line: str) -> tuple[Header | FleetHeader, Continuation | None]:
    """Decode a file's first line; the second value is None for a tape's first segment. Raises DataError."""
    data = _parse(without_checksum(line), "the header")
    if data.get("schema") == SCHEMA_CONTINUED:
        return _header(data), _continuation(data)
    if data.get("schema") != SCHEMA:
        raise DataError(detail=f"this is not a tape of schema {SCHEMA!r}: its first line says {data.get('schema')!r}.")
    return _header(data), None


def continuation_at(beginning: bytes) -> Continuation | None:
    """Return what a segment that begins with these bytes continues, without decoding its header; None if nothing."""
    if (match := _CONTINUED.match(beginning)) is None:
        return None
    return Continuation(int(match[1]), Mark(int(match[2]), int(match[3]), match[4].decode()))


def epoch_at(beginning: bytes) -> int | None:
    """Return the epoch in which a tape begins whose header begins with these bytes; None if they do not say.

    All segments of a tape have the same. A tape that continues from what islands hold has a later one.
    """
    match = _EPOCH.match(beginning)
    return int(match[1]) if match else None


def _continuation(data: Mapping[str, Any]) -> Continuation:
    try:
        segment, after = data["segment"], data["after"]
        mark = Mark(after["count"], after["size"], after["digest"])
        sound = type(segment) is type(mark.count) is type(mark.size) is int and isinstance(mark.digest, str)
    except (KeyError, TypeError) as error:
        raise DataError(detail=f"the tape's header does not say what it continues: {error!r}.") from error
    if not sound or segment < 2 or mark.count < 0 or not 0 < mark.size <= SEGMENT_BYTES_MAX:
        raise DataError(detail=f"the tape's header cannot continue segment {segment!r:.20} after {after!r:.80}.")
    return Continuation(segment, mark)


def _header(data: Mapping[str, Any]) -> Header | FleetHeader:
    try:
        if data.get("fleet"):
            return FleetHeader(data["job"], decode(ElasticPolicy, data["policy"]), data["plan"], data["seed"])
        return Header(
            job=data["job"],
            policy=decode(JobPolicy, data["policy"]),
            started_at=data["started_at"],
            epoch=data["epoch"],
        )
    except KeyError as error:
        raise DataError(detail=f"the tape's header lacks the field {error}.") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise DataError(detail=f"the tape's header has an invalid field: {error}.") from error


def decode_line(line: str) -> Record | Footer:
    """A line after the header. Raises DataError if it is neither a record nor a footer, or its checksum does not fit."""
    data = _parse(without_checksum(line), "a record")
    if "end" in data:
        if type(data["end"]) is not int or type(data.get("digest")) is not str:
            raise DataError(detail=f"a footer has a number and a digest, this one {line[:80]!r}.")
        return Footer(end=data["end"], digest=data["digest"])
    if strange := data.keys() - {"n", "event", "effects"}:
        raise DataError(detail=f"a record has no field {min(strange)!r}.")
    try:
        return Record(
            n=int(data["n"]),
            event=decode_tagged(data["event"]),
            effects=tuple(decode_tagged(item) for item in data["effects"]),
        )
    except KeyError as error:
        raise DataError(detail=f"the record lacks the field {error}.") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise DataError(detail=f"the record has an invalid field: {error}.") from error


def _parse(line: str, name: str) -> dict[str, Any]:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(detail=f"{name} is not JSON: {error} in {line[:80]!r}.") from error
    if not isinstance(data, dict):
        raise DataError(detail=f"{name} is not a JSON object: {line[:80]!r}.")
    return data
