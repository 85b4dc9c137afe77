"""What a job recorded: its tape as server-sent events and as a file, its merges with explanations, and its logs.

Everything is read from files of the run's folder, so that readers cost the job nothing.
"""

from __future__ import annotations

import asyncio
import codecs
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import islice
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Path, Query, Request
from fastapi.responses import Response
from pydantic import Field

from api.http import eventstream
from api.http.pools import RECORDS, STREAMS, chunks_in, runs_in
from api.http.streams import File, Stream, following
from api.jobs.autopilot import advice_of, section_of
from api.routes.dependencies import ServiceHere
from api.run.explanations import (
    AllExplanations,
    answer_of,
    merge_of,
    summary_of,
    with_silence,
    with_status,
    without_tape,
)
from api.run.folder import LogReader, Run, logs_of, newest, open_below
from api.run.records import TapeReader, number_at_end, sound_records
from api.schemas import Advice, Diagnosis, Logs, Merge, Merges
from orchestrator.errors import DataError, InfrastructureError, NotFound
from orchestrator.tape.schema import CHECKSUM_AT_END, CONTINUATION_BYTES, Digest, Footer, continuation_at, encode_footer

log = logging.getLogger(__name__)
merges_router = APIRouter(prefix="/v1/jobs/{job}/merges", tags=["records"], route_class=runs_in(RECORDS))
NUMBER_MAX = 2**53
Number = Annotated[int, Path(ge=0, le=NUMBER_MAX)]
router = APIRouter(prefix="/v1/jobs/{job}", tags=["records"], route_class=runs_in(RECORDS))
POLL_S = 0.3
KEEP_ALIVE_S = 15.0
NDJSON = "application/x-ndjson"
EXAMPLE = """id: 1
event: record
data: {"n":1,"event":{"type":"JobStarted","at":0.02},"effects":[]}

event: end
data: {"n":1}
"""
Follow = Annotated[bool, Depends(following(True, "false: stop at the newest record instead of waiting for more"))]
logs_router = APIRouter(prefix="/v1/jobs/{job}/logs", tags=["records"], route_class=runs_in(RECORDS))
LOOK_ROUND_EVERY_S = 1.0
TAIL_MAX = 10_000
WITHOUT_MAX, NAME_MAX = 64, 100
INCARNATION_MAX = 2**31 - 1
PLAIN = "text/plain; charset=utf-8"
LOG_EXAMPLE = "2026-11-21 22:31:50,114 INFO learners.island: asia, incarnation 2, is process 27450\n"
FollowLog = Annotated[bool, Depends(following(False, "wait for more, until the job has ended"))]


async def explanations_of(request: Request) -> AllExplanations:
    explanations: AllExplanations = request.app.state.explanations
    return explanations


ExplanationsHere = Annotated[AllExplanations, Depends(explanations_of)]


@merges_router.get("")
def list_merges(
    job: str,
    service: ServiceHere,
    explained: ExplanationsHere,
    fragment: Annotated[int | None, Query(ge=0, le=NUMBER_MAX, description="only merges of this fragment")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 50,
    cursor: Annotated[str | None, Query(max_length=40, description="`next_cursor` of the previous page")] = None,
) -> Merges:
    """List a job's merges, newest first. A few thousand are kept; the tape has all of them."""
    explanations = explained.of(service.run(job)).history.merges()
    if cursor is not None:
        names = [f"{explanation.fragment}:{explanation.version}" for explanation in explanations]
        if cursor not in names:
            raise NotFound(
                detail=f"The cursor {cursor!r} does not name a kept merge.", remedy="Start without a cursor."
            )
        explanations = explanations[names.index(cursor) + 1 :]
    wanted = (explanation for explanation in explanations if fragment is None or explanation.fragment == fragment)
    page = [summary_of(explanation) for explanation in islice(wanted, limit)]
    more = next(wanted, None) is not None
    return Merges(merges=page, next_cursor=f"{page[-1].fragment}:{page[-1].version}" if more else None)


@merges_router.get("/{fragment}/{version}")
def explain_merge(
    job: str, fragment: Number, version: Number, service: ServiceHere, explained: ExplanationsHere
) -> Merge:
    """Explain one merge: its contributors, quorum and grace, why it closed, and refused contributions."""
    run = service.run(job)
    return merge_of(explained.of(run).history.merge(run.job, fragment, version))


@router.get("/diagnosis")
def diagnose(job: str, service: ServiceHere, explained: ExplanationsHere) -> Diagnosis:
    """Name the one cause of slowness or death, with the records of the tape that show it, and how islands compare.

    For a running job it is the diagnosis so far.
    """
    run = service.run(job)
    diagnosis = explained.of(run).diagnosis()
    if diagnosis is None:
        raise without_tape(service.job(run.job), run.folder)
    if diagnosis.outcome is None:
        try:
            diagnosis = with_status(diagnosis, service.job(run.job))
        except InfrastructureError as error:  # the tape is on the disk whatever the job's processes do
            diagnosis = with_silence(diagnosis, error)
    return answer_of(run.job, diagnosis)


@router.get("/advice")
def advise(job: str, service: ServiceHere) -> Advice:
    """Return what the job's autopilot found in its looks at the tape, the newest first."""
    run = service.run(job)
    kind = section_of(service.specification(job).specification).kind
    return Advice(job=run.job, kind=kind, looks=advice_of(run.folder))


@router.get(
    "/events",
    response_class=Stream,
    responses={200: {"content": {eventstream.CONTENT_TYPE: {"example": EXAMPLE}}}},
)
async def follow_events(
    request: Request,
    job: str,
    service: ServiceHere,
    follow: Follow,
    after: Annotated[int, Query(ge=0, le=NUMBER_MAX, description="start after the record with this number")] = 0,
    last_event_id: Annotated[
        int | None, Header(ge=0, le=NUMBER_MAX, description="as `after`, and takes precedence over it")
    ] = None,
    tail: Annotated[
        int | None, Query(ge=1, le=TAIL_MAX, description="start with so many of the newest records, instead of `after`")
    ] = None,
    without: Annotated[
        list[Annotated[str, Field(max_length=NAME_MAX)]] | None,
        Query(max_length=WITHOUT_MAX, description="types of events to leave out, as `TimerFired`"),
    ] = None,
) -> Response:
    """Stream the records of the job's tape as server-sent events, with `end` once the job has ended.

    The stream stops without `end` soon after its token is revoked or expires.
    """
    run = await RECORDS.run(service.run, job, key=job)
    if tail is not None:
        after = max(0, await RECORDS.run(number_at_end, run.tape, key=job) - tail)
    reader = TapeReader(run.tape, after if last_event_id is None else last_event_id)
    first = await RECORDS.run(reader.read, key=job)  # refuses a damaged tape while the answer can still say so
    events = tell(first, reader, lambda: has_ended(service.run, run.job), follow, frozenset(without or ()))
    return Stream(request, events, eventstream.CONTENT_TYPE, {"X-Accel-Buffering": "no"})


@router.get("/tape", response_class=Stream, responses={200: {"content": {NDJSON: {}}}})
def download_tape(request: Request, job: str, service: ServiceHere) -> Response:
    """Download the job's tape so far, one JSON document a line: header, records, and a footer once the job has ended."""
    run = service.run(job)
    name = f"{run.job}.tape.jsonl"
    try:
        tape = open_below(run.folder, run.tape.name)
    except OSError as error:
        detail = f"Job {run.job} has no readable tape: {error.strerror}."
        raise NotFound(detail=detail, remedy="The tape is created when the job's processes start.") from error
    sealed = continuation_at(tape.read(CONTINUATION_BYTES)) is not None
    tape.seek(0)
    if run.ended() and not sealed:
        return File(request, tape, NDJSON, filename=name)
    tape.close()
    reader = TapeReader(run.tape)
    first = reader.read()  # raises DataError now, and not in the middle of the answer, if its first segment is damaged
    # It grows while it is sent, or is unpacked, so its length is unknown; a partly written line is not sent.
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Stream(request, chunks_in(RECORDS, whole_lines(first, reader)), NDJSON, headers)


def whole_lines(lines: list[bytes], reader: TapeReader) -> Iterator[bytes]:
    """Yield what was read and what follows, as one file. Its footer's digest is that of all its lines.

    Stop where another tape takes its place.
    """
    digest, epoch = Digest(), reader.epoch
    while lines and reader.epoch == epoch:
        if reader.sealed:
            lines[-1] = b""
        chunk = b"\n".join([*lines, b""]) if not reader.sealed else b"\n".join(lines)
        digest.add_all(CHECKSUM_AT_END.sub(b"}\n", chunk))
        yield chunk
        if reader.sealed:
            yield f"{encode_footer(Footer(reader.n, digest.hex()))}\n".encode()
        lines = reader.read()


async def tell(
    lines: list[bytes],
    reader: TapeReader,
    ended: Callable[[], bool],
    follow: bool,
    without: frozenset[str] = frozenset(),
) -> AsyncIterator[bytes]:
    """Yield what was read and what follows as events, up to a damaged segment. Events of types ``without`` are left out.

    ``ended`` is checked before the last read, so that nothing written before the end is missed.
    """
    over = await STREAMS.run(ended)
    yield eventstream.RETRY
    told_at = time.monotonic()
    while True:
        if lines:
            yield eventstream.frames(sound_records(lines, without))
            told_at = time.monotonic()
        elif over or reader.sealed:
            yield eventstream.end_frame(reader.n)
            return
        elif not follow:
            return
        else:
            await asyncio.sleep(POLL_S)
            if time.monotonic() - told_at > KEEP_ALIVE_S:
                over = await STREAMS.run(ended)
                yield eventstream.KEEP_ALIVE
                told_at = time.monotonic()
        try:
            lines = await STREAMS.run(reader.read)
        except DataError as error:
            log.warning("an event stream stops: %s", error)
            return


def has_ended(run_of: Callable[[str], Run], job: str) -> bool:
    """Return whether the job has ended or was removed."""
    try:
        return run_of(job).ended()
    except NotFound:
        return True


@logs_router.get("")
def list_logs(job: str, service: ServiceHere) -> Logs:
    """List the logs of a job: of each incarnation of its islands, and of its helpers.

    Of an island on another machine it is a copy of the last part, at least 64 KiB if there is so much.
    """
    return Logs(logs=logs_of(service.run(job)))


@logs_router.get(
    "/{source}",
    response_class=Stream,
    responses={200: {"content": {PLAIN: {"schema": {"type": "string"}, "example": LOG_EXAMPLE}}}},
)
async def read_log(
    request: Request,
    job: str,
    source: str,
    service: ServiceHere,
    follow: FollowLog,
    incarnation: Annotated[
        int | None, Query(ge=1, le=INCARNATION_MAX, description="incarnation of the island; default: the newest")
    ] = None,
    tail: Annotated[int, Query(ge=1, le=TAIL_MAX, description="number of last lines to start with")] = 200,
) -> Response:
    """Return the log of an island, the `synchroniser`, the `controller` or the `evaluator` as plain text, oldest first.

    With `follow` and without `incarnation`, the island's next incarnation follows the last. The stream stops soon after its
    token is revoked or expires.
    """
    run = await RECORDS.run(service.run, job, key=job)
    book = await RECORDS.run(newest, run, source, incarnation, key=job)
    reader = await RECORDS.run(LogReader, book, tail, key=job)
    text = stream_log(reader, run, follow, incarnation is None, lambda: has_ended(service.run, run.job))
    return Stream(request, text, PLAIN, {"X-Accel-Buffering": "no"})


async def stream_log(
    reader: LogReader, run: Run, follow: bool, goes_on: bool, ended: Callable[[], bool]
) -> AsyncIterator[str]:
    """Yield the text. ``ended`` is checked before the last read, so that nothing written before the end is missed."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    over, looked_at = not follow or await STREAMS.run(ended), time.monotonic()
    try:
        while True:
            if more := await STREAMS.run(reader.read):
                yield decoder.decode(more)
                if not follow:
                    return
            elif goes_on and follow and (after := await STREAMS.run(next_book, reader, run)):
                reader.close()
                reader = after
                yield f"\n==> {reader.book.source}, incarnation {reader.book.number} <==\n"
            elif over:
                return
            else:
                await asyncio.sleep(POLL_S)
                if time.monotonic() - looked_at > LOOK_ROUND_EVERY_S:
                    over, looked_at = await STREAMS.run(ended), time.monotonic()
    finally:
        reader.close()


def next_book(reader: LogReader, run: Run) -> LogReader | None:
    """Return a reader of the island's next incarnation, or None if there is none yet."""
    try:
        book = newest(run, reader.book.source)
        return LogReader(book, TAIL_MAX) if book.number > reader.book.number else None
    except (NotFound, FileNotFoundError):
        return None
