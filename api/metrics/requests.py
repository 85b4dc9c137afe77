"""The durations of requests: a middleware around the whole application, and its histogram.

A request's time ends where its answer begins: a stream of events that lasts for hours is no slow request. Labels are the
route's template, never the path, and what matches no route is one label together, so that nobody who asks for nonsense
fills the registry. These figures are of this process and start anew with it.
"""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.metrics.catalogue import FAMILIES

BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
NO_ROUTE = "(none)"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


def request_seconds(registry: CollectorRegistry) -> Histogram:
    family = FAMILIES["atoll_api_request_seconds"]
    return Histogram(family.name, family.help, family.labels, registry=registry, buckets=BOUNDS_S)


class RequestMetrics:
    """Middleware: observe every HTTP request. ``status`` is the class of its answer, 2xx to 5xx."""

    def __init__(self, app: ASGIApp, seconds: Histogram) -> None:
        self._app, self._seconds = app, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        answered = False

        def observe(status: int) -> None:
            nonlocal answered
            answered = True
            method = scope["method"] if scope["method"] in METHODS else "other"
            route = getattr(scope.get("route"), "path", NO_ROUTE)
            self._seconds.labels(method, route, f"{status // 100}xx").observe(time.perf_counter() - began)

        async def observed_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                observe(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, observed_send)
        except Exception:
            if not answered:
                observe(500)
            raise
