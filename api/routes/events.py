"""What happened in a job: its tape as server-sent events while it grows, and as a file.

Both read ``RUN_DIR/tape.jsonl`` and ask the job nothing, so that onlookers cost it nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.responses import Response, StreamingResponse
from starlette.concurrency import run_in_threadpool

from api.auth.roles import bearer
from api.auth.tokens import Tokens
from api.http import eventstream
from api.routes.dependencies import ServiceHere, sent
from api.run.files import open_below
from api.run.folder import Run
from api.run.records import TapeReader
from orchestrator.errors import InfrastructureError, NotFound

router = APIRouter(prefix="/v1/jobs/{job}", tags=["records"])

STREAMS_MAX = 64
"""Each looks at one file every ``POLL_S``. More than these are somebody's mistake."""
POLL_S = 0.3
KEEP_ALIVE_S = 15.0
RECHECK_S = 2.0
"""How long a stream may outlive its token."""
NUMBER_MAX = 2**53
NDJSON = "application/x-ndjson"
EXAMPLE = """id: 1
event: record
data: {"n":1,"event":{"type":"JobStarted","at":0.02},"effects":[]}

event: end
data: {"n":1}
"""


class Seats:
    """How many streams are open."""

    def __init__(self) -> None:
        self.taken = 0


async def seat(request: Request) -> AsyncIterator[None]:
    """Room for one stream, until its answer is through."""
    seats: Seats = request.app.state.seats
    if seats.taken >= STREAMS_MAX:
        detail = f"{STREAMS_MAX} event streams are open, as many as this service keeps."
        raise InfrastructureError(detail=detail, remedy="Close one, and try again.")
    seats.taken += 1
    try:
        yield
    finally:
        seats.taken -= 1


@router.get(
    "/events",
    response_class=StreamingResponse,
    responses={200: {"content": {eventstream.CONTENT_TYPE: {"example": EXAMPLE}}}},
    dependencies=[Depends(seat)],
)
async def follow_events(
    request: Request,
    job: str,
    service: ServiceHere,
    after: Annotated[int, Query(ge=0, le=NUMBER_MAX, description="begin after the record of this number")] = 0,
    follow: Annotated[bool, Query(description="false: stop at the newest record instead of waiting for more")] = True,
    last_event_id: Annotated[int | None, Header(ge=0, le=NUMBER_MAX, description="as `after`, and before it")] = None,
) -> Response:
    """The records of the job's tape as server-sent events, and `end` once the job has ended.

    The stream stops without `end` soon after the token that it was opened with was revoked or has expired.
    """
    tokens: Tokens = request.app.state.tokens
    token = bearer(request.headers.get("Authorization", ""))
    run = await run_in_threadpool(service.run, job)
    reader = TapeReader(run.tape, after if last_event_id is None else last_event_id)
    return StreamingResponse(
        tell(reader, lambda: has_ended(service.run, run.job), lambda: tokens.holder_of(token) is not None, follow),
        media_type=eventstream.CONTENT_TYPE,
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


@router.get("/tape", response_class=StreamingResponse, responses={200: {"content": {NDJSON: {}}}})
def download_tape(job: str, service: ServiceHere) -> Response:
    """The job's tape as it stands, one JSON document a line: header, records, and a footer once the job has ended."""
    run = service.run(job)
    name = f"{run.job}.tape.jsonl"
    try:
        tape = open_below(run.folder, run.tape.name)
    except OSError as error:
        detail = f"Job {run.job} has written no tape that can be read: {error.strerror}."
        raise NotFound(detail=detail, remedy="It begins when the job's processes run.") from error
    if run.ended():
        return sent(tape, NDJSON, name)
    tape.close()
    # It grows while it is sent, so that no length can be promised; and a line half written is not sent.
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return StreamingResponse(whole_lines(TapeReader(run.tape)), media_type=NDJSON, headers=headers)


def whole_lines(reader: TapeReader) -> Iterator[bytes]:
    while lines := reader.read():
        yield b"\n".join([*lines, b""])


async def tell(
    reader: TapeReader, ended: Callable[[], bool], allowed: Callable[[], bool], follow: bool
) -> AsyncIterator[bytes]:
    """The stream itself. ``ended`` is asked before the last look, so that nothing written before the end is missed."""
    over = await run_in_threadpool(ended)
    yield eventstream.RETRY
    told_at = checked_at = time.monotonic()
    while True:
        if time.monotonic() - checked_at > RECHECK_S:
            if not await run_in_threadpool(allowed):
                return
            checked_at = time.monotonic()
        if lines := await run_in_threadpool(reader.read):
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
                over = await run_in_threadpool(ended)
                yield eventstream.KEEP_ALIVE
                told_at = time.monotonic()


def has_ended(run_of: Callable[[str], Run], job: str) -> bool:
    """Whether the job has ended, or is no longer known."""
    try:
        return run_of(job).ended()
    except NotFound:
        return True
