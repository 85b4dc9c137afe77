"""The events of a job: its tape as server-sent events while it grows, and as a file.

Both read ``RUN_DIR/tape.jsonl`` and ask the job nothing, so that onlookers cost it nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.responses import Response

from api.http import eventstream
from api.http.pools import RECORDS, STREAMS, chunks_in
from api.http.routing import runs_in
from api.http.streams import File, Stream, following
from api.routes.dependencies import ServiceHere
from api.run.files import open_below
from api.run.folder import Run
from api.run.records import TapeReader
from orchestrator.errors import NotFound

router = APIRouter(prefix="/v1/jobs/{job}", tags=["records"], route_class=runs_in(RECORDS))

POLL_S = 0.3
KEEP_ALIVE_S = 15.0
NUMBER_MAX = 2**53
NDJSON = "application/x-ndjson"
EXAMPLE = """id: 1
event: record
data: {"n":1,"event":{"type":"JobStarted","at":0.02},"effects":[]}

event: end
data: {"n":1}
"""


Follow = Annotated[bool, Depends(following(True, "false: stop at the newest record instead of waiting for more"))]


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
    after: Annotated[int, Query(ge=0, le=NUMBER_MAX, description="begin after the record of this number")] = 0,
    last_event_id: Annotated[int | None, Header(ge=0, le=NUMBER_MAX, description="as `after`, and before it")] = None,
) -> Response:
    """The records of the job's tape as server-sent events, and `end` once the job has ended.

    The stream stops without `end` soon after the token that it was opened with was revoked or has expired.
    """
    run = await RECORDS.run(service.run, job, key=job)
    reader = TapeReader(run.tape, after if last_event_id is None else last_event_id)
    events = tell(reader, lambda: has_ended(service.run, run.job), follow)
    return Stream(request, events, eventstream.CONTENT_TYPE, {"X-Accel-Buffering": "no"})


@router.get("/tape", response_class=Stream, responses={200: {"content": {NDJSON: {}}}})
def download_tape(request: Request, job: str, service: ServiceHere) -> Response:
    """The job's tape as it stands, one JSON document a line: header, records, and a footer once the job has ended."""
    run = service.run(job)
    name = f"{run.job}.tape.jsonl"
    try:
        tape = open_below(run.folder, run.tape.name)
    except OSError as error:
        detail = f"Job {run.job} has written no tape that can be read: {error.strerror}."
        raise NotFound(detail=detail, remedy="It begins when the job's processes run.") from error
    if run.ended():
        return File(request, tape, NDJSON, filename=name)
    tape.close()
    # It grows while it is sent, so that no length can be promised; and a line half written is not sent.
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Stream(request, chunks_in(RECORDS, whole_lines(TapeReader(run.tape))), NDJSON, headers)


def whole_lines(reader: TapeReader) -> Iterator[bytes]:
    while lines := reader.read():
        yield b"\n".join([*lines, b""])


async def tell(reader: TapeReader, ended: Callable[[], bool], follow: bool) -> AsyncIterator[bytes]:
    """The stream itself. ``ended`` is asked before the last look, so that nothing written before the end is missed."""
    over = await STREAMS.run(ended)
    yield eventstream.RETRY
    told_at = time.monotonic()
    while True:
        if lines := await STREAMS.run(reader.read):
            yield eventstream.frames(lines)
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


def has_ended(run_of: Callable[[str], Run], job: str) -> bool:
    """Whether the job has ended, or is no longer known."""
    try:
        return run_of(job).ended()
    except NotFound:
        return True
