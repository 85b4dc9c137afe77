"""Bodies of requests: read by the one strict parser, in a thread of their own, whatever route they are for.

FastAPI would take the last of two equal keys, NaN for a number, and the event loop's time. Responsible for what comes
between bytes and plain data; which fields there may be says each route's model.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

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
        return await run_in_threadpool(read_json, await self.body(), REQUEST, BODY)
