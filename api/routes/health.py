"""Two health checks (the process is alive; it can do its work), and the service's metrics for Prometheus."""

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
    """Return all metrics in Prometheus's text format. Live jobs are queried; the answer comes within seconds."""
    metrics: Metrics = request.app.state.metrics
    return PlainTextResponse(metrics.exposition(), media_type=CONTENT_TYPE_PLAIN_0_0_4)


router = APIRouter(tags=["health"], route_class=runs_in(FLEET))


@router.get("/healthz")
async def healthz() -> Health:
    """Answer that the process is alive. Restart it if this fails."""
    return Health(status="ok")


@router.get("/readyz")
async def readyz(request: Request) -> Health:
    """Check that the database and the cluster answer; if not, answer 503 with the reason within a second.

    Send no requests here while this fails.
    """
    readiness: Readiness = request.app.state.readiness
    question = readiness.question()
    answer = asyncio.wrap_future(question)
    answer.add_done_callback(
        lambda done: done.exception()
    )  # retrieve it, so that asyncio does not log it; ``group_count`` raises it
    await asyncio.wait({answer}, timeout=ANSWER_WITHIN_S)
    return Health(status="ok", detail=f"{group_count(question)} node groups")
