"""The service's figures for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from api.http.pools import LISTS
from api.http.routing import runs_in
from api.metrics.exposition import Metrics

router = APIRouter(tags=["metrics"], route_class=runs_in(LISTS))


@router.get("/metrics", response_class=PlainTextResponse)
def get_metrics(request: Request) -> PlainTextResponse:
    """All metrics in Prometheus's text format. Each live job is asked how it stands; it answers within seconds."""
    metrics: Metrics = request.app.state.metrics
    return PlainTextResponse(metrics.exposition(), media_type=CONTENT_TYPE_PLAIN_0_0_4)
