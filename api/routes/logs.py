"""What a job's processes said: which logs there are, and each as plain text, to its end or while it is written."""

from __future__ import annotations

import asyncio
import codecs
import time
from collections.abc import AsyncIterator, Callable
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from fastapi.responses import Response, StreamingResponse
from starlette.concurrency import run_in_threadpool

from api.routes.dependencies import ServiceHere
from api.routes.events import POLL_S, has_ended, seat
from api.run.folder import Run
from api.run.logs import LogReader, Logs, logs_of, newest
from orchestrator.errors import NotFound

router = APIRouter(prefix="/v1/jobs/{job}/logs", tags=["records"])

LOOK_ROUND_EVERY_S = 1.0
TAIL_MAX = 10_000
INCARNATION_MAX = 2**31 - 1
PLAIN = "text/plain; charset=utf-8"
EXAMPLE = "2026-11-21 22:31:50,114 INFO learners.island: asia, incarnation 2, is process 27450\n"


@router.get("")
def list_logs(job: str, service: ServiceHere) -> Logs:
    """The logs of a job that lie on a disk this service reads: of each life of its islands, and of what serves them."""
    return Logs(logs=logs_of(service.run(job)))


@router.get(
    "/{source}",
    response_class=StreamingResponse,
    responses={200: {"content": {PLAIN: {"schema": {"type": "string"}, "example": EXAMPLE}}}},
    dependencies=[Depends(seat)],
)
async def read_log(
    job: str,
    source: str,
    service: ServiceHere,
    incarnation: Annotated[
        int | None, Query(ge=1, le=INCARNATION_MAX, description="which life of the island; default: the newest")
    ] = None,
    tail: Annotated[int, Query(ge=1, le=TAIL_MAX, description="begin with so many of the last lines")] = 200,
    follow: Annotated[bool, Query(description="wait for more, until the job has ended")] = False,
) -> Response:
    """What an island, the `synchroniser`, the `controller` or the `evaluator` said, as plain text, oldest first.

    With `follow`, and unless an incarnation was asked for, the island's next one is told after the last.
    """
    run = await run_in_threadpool(service.run, job)
    book = await run_in_threadpool(newest, run, source, incarnation)
    reader = await run_in_threadpool(LogReader, book, tail)
    text = tell(reader, run, follow, incarnation is None, lambda: has_ended(service.run, run.job))
    return StreamingResponse(text, media_type=PLAIN, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})


async def tell(
    reader: LogReader, run: Run, follow: bool, goes_on: bool, ended: Callable[[], bool]
) -> AsyncIterator[str]:
    """The text itself. ``ended`` is asked before the last look, so that nothing said before the end is missed."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    over, looked_at = not follow or await run_in_threadpool(ended), time.monotonic()
    try:
        while True:
            if more := await run_in_threadpool(reader.read):
                yield decoder.decode(more)
                if not follow:
                    return
            elif goes_on and follow and (after := await run_in_threadpool(next_book, reader, run)):
                reader.close()
                reader = after
                yield f"\n==> {reader.book.source}, incarnation {reader.book.number} <==\n"
            elif over:
                return
            else:
                await asyncio.sleep(POLL_S)
                if time.monotonic() - looked_at > LOOK_ROUND_EVERY_S:
                    over, looked_at = await run_in_threadpool(ended), time.monotonic()
    finally:
        reader.close()


def next_book(reader: LogReader, run: Run) -> LogReader | None:
    """The island's next incarnation from its beginning; None if there is none yet."""
    try:
        book = newest(run, reader.book.source)
        return LogReader(book, TAIL_MAX) if book.number > reader.book.number else None
    except (NotFound, FileNotFoundError):
        return None
