"""The class of all routes that change or tell something: its function runs in a pool, its body is read strictly.

FastAPI would run every function in one limit of 40 threads, take the last of two equal keys and NaN for a number, and read
bodies in the event loop. Responsible for what comes between a request's bytes and the call of a route; which fields there
may be says each route's model, and which pools there are ``api.http.pools``.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from inspect import iscoroutinefunction
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from api.http.pools import PARSING, Pool, in_pool
from orchestrator.documents import REQUEST, read_json
from orchestrator.errors import ConfigurationError

BODY = "the body"


class StrictBody(APIRoute):
    """A route whose body is plain data as ``orchestrator.documents`` has it, or refused with the reason."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strictly(request: Request) -> Response:
            try:
                return await handle(_Strict(request.scope, request.receive))
            except HTTPException as error:  # what FastAPI makes of any failure to parse
                if isinstance(error.__cause__, ConfigurationError):
                    raise error.__cause__ from None
                raise

        return strictly


class _Strict(Request):
    async def json(self) -> Any:
        return await PARSING.run(read_json, await self.body(), REQUEST, BODY)


def runs_in(pool: Pool) -> type[APIRoute]:
    """The class of routes whose functions run in this pool, but for coroutines, which must not wait for anything."""

    class PooledRoute(StrictBody):
        def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
            chosen = hasattr(endpoint, "pool") or iscoroutinefunction(endpoint)
            super().__init__(path, endpoint if chosen else in_pool(pool)(endpoint), **options)

    return PooledRoute
