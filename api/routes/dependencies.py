"""The dependencies that routes share: the service, the caller, the idempotency key, and versions."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Header, Request, Response

from api.auth.roles import Principal
from api.jobs.service import Service
from api.jobs.status_cache import unchanged
from api.schemas import Command


async def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def caller_of(request: Request) -> str:
    """The name of the token that the authentication let in."""
    principal: Principal = request.state.principal
    return principal.name


ServiceHere = Annotated[Service, Depends(service_of)]
Caller = Annotated[str, Depends(caller_of)]
IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key", min_length=1, max_length=200, description="repeat a request without doing it twice"
    ),
]
IfMatch = Annotated[
    str | None,
    Header(max_length=500, description="an ETag: refuse with 412 if something else was asked of it since that look"),
]
IfNoneMatch = Annotated[
    str | None,
    Header(max_length=500, description="ETags that the caller has: 304 without a body if one is still right"),
]
ANONYMOUS = "anonymous"
"""The default that Python wants of a parameter behind others. No caller has it: every request that passes has a name."""


def accepted(command: Command, response: Response) -> Command:
    """The command, and in the answer's head where its outcome is read."""
    response.headers["Location"] = f"/v1/jobs/{command.job}/commands/{command.command}"
    return command


VERSIONED: dict[int | str, dict[str, Any]] = {
    200: {"headers": {"ETag": {"description": "the answer's version", "schema": {"type": "string"}}}},
    304: {"description": "The caller has this answer already"},
}
"""The OpenAPI part of an operation that answers by ``versioned``."""


def versioned(body: bytes, tag: str, if_none_match: str | None) -> Response:
    """This JSON with its entity tag, or 304 for a caller who has it."""
    headers = {"ETag": tag}
    if unchanged(if_none_match, tag):
        return Response(status_code=304, headers=headers)
    return Response(body, media_type="application/json", headers=headers)
