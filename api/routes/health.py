"""Two health checks, for two kinds of watchers: the process is alive, and it can do its work."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request

from api.http.pools import FLEET
from api.http.routing import runs_in
from api.jobs.readiness import ANSWER_WITHIN_S, Readiness, group_count
from api.schemas import Health

router = APIRouter(tags=["health"], route_class=runs_in(FLEET))


@router.get("/healthz")
async def healthz() -> Health:
    """The process answers. Restart it when this fails."""
    return Health(status="ok")


@router.get("/readyz")
async def readyz(request: Request) -> Health:
    """The store and the cluster answer too; 503 with the reason when one does not, within a second.

    Send no work here when this fails.
    """
    readiness: Readiness = request.app.state.readiness
    question = readiness.question()
    answer = asyncio.wrap_future(question)
    answer.add_done_callback(lambda done: done.exception())  # asked for here or not, it is said by the question itself
    await asyncio.wait({answer}, timeout=ANSWER_WITHIN_S)
    return Health(status="ok", detail=f"{group_count(question)} node groups")
