"""The logs of a job's processes: a list of them, and each as plain text, to its end or while it is written."""

from __future__ import annotations

import asyncio
import codecs
import time
from collections.abc import AsyncIterator, Callable
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response

from api.http.pools import RECORDS, STREAMS
from api.http.routing import runs_in
from api.http.streams import Stream, following
from api.routes.dependencies import ServiceHere
from api.routes.events import POLL_S, has_ended
from api.run.folder import Run
from api.run.logs import LogReader, Logs, logs_of, newest
from orchestrator.errors import NotFound

router = APIRouter(prefix="/v1/jobs/{job}/logs", tags=["records"], route_class=runs_in(RECORDS))

LOOK_ROUND_EVERY_S = 1.0
TAIL_MAX = 10_000
INCARNATION_MAX = 2**31 - 1
PLAIN = "text/plain; charset=utf-8"
EXAMPLE = "2026-11-21 22:31:50,114 INFO learners.island: asia, incarnation 2, is process 27450\n"
Follow = Annotated[bool, Depends(following(False, "wait for more, until the job has ended"))]


@router.get("")
def list_logs(job: str, service: ServiceHere) -> Logs:
    """The logs of a job that lie on a disk this service reads: of each life of its islands, and of what serves them."""
    return Logs(logs=logs_of(service.run(job)))


@router.get(
    "/{source}",
    response_class=Stream,
    responses={200: {"content": {PLAIN: {"schema": {"type": "string"}, "example": EXAMPLE}}}},
)
async def read_log(
    request: Request,
    job: str,
    source: str,
    service: ServiceHere,
    follow: Follow,
    incarnation: Annotated[
        int | None, Query(ge=1, le=INCARNATION_MAX, description="which life of the island; default: the newest")
    ] = None,
    tail: Annotated[int, Query(ge=1, le=TAIL_MAX, description="begin with so many of the last lines")] = 200,
) -> Response:
    """What an island, the `synchroniser`, the `controller` or the `evaluator` said, as plain text, oldest first.

    With `follow`, and unless an incarnation was asked for, the island's next one is told after the last. The stream stops
    soon after the token that it was opened with was revoked or has expired.
    """
    run = await RECORDS.run(service.run, job, key=job)
    book = await RECORDS.run(newest, run, source, incarnation, key=job)
    reader = await RECORDS.run(LogReader, book, tail, key=job)
    text = tell(reader, run, follow, incarnation is None, lambda: has_ended(service.run, run.job))
    return Stream(request, text, PLAIN, {"X-Accel-Buffering": "no"})


async def tell(
    reader: LogReader, run: Run, follow: bool, goes_on: bool, ended: Callable[[], bool]
) -> AsyncIterator[str]:
    """The text itself. ``ended`` is asked before the last look, so that nothing said before the end is missed."""
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
    """The island's next incarnation from its beginning; None if there is none yet."""
    try:
        book = newest(run, reader.book.source)
        return LogReader(book, TAIL_MAX) if book.number > reader.book.number else None
    except (NotFound, FileNotFoundError):
        return None
