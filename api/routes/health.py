"""Two health checks, for two kinds of watchers: the process is alive, and it can do its work.

The service's figures for Prometheus.
"""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from api.http.pools import FLEET, LISTS, runs_in
from api.jobs.status_cache import ANSWER_WITHIN_S, Readiness, group_count
from api.metrics.exposition import Metrics
from api.schemas import Health

metrics_router = APIRouter(tags=["metrics"], route_class=runs_in(LISTS))


@metrics_router.get("/metrics", response_class=PlainTextResponse)
def get_metrics(request: Request) -> PlainTextResponse:
    """All metrics in Prometheus's text format. Each live job is asked how it stands; it answers within seconds."""
    metrics: Metrics = request.app.state.metrics
    return PlainTextResponse(metrics.exposition(), media_type=CONTENT_TYPE_PLAIN_0_0_4)


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
