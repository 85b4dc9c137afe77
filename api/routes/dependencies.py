"""The dependencies that routes share: the service, the caller, the idempotency key, and versions."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Header, Request, Response

from api.auth.permissions import Principal
from api.jobs.service import Service
from api.jobs.status_cache import unchanged
from api.schemas import Command


async def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def caller_of(request: Request) -> str:
    """Return the name of the authenticated token."""
    principal: Principal = request.state.principal
    return principal.name


ServiceHere = Annotated[Service, Depends(service_of)]
Caller = Annotated[str, Depends(caller_of)]
IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=200,
        description="makes it safe to repeat the request: it is carried out once",
    ),
]
IfMatch = Annotated[
    str | None,
    Header(max_length=500, description="an ETag: refuse with 412 if it was changed since that read"),
]
IfNoneMatch = Annotated[
    str | None,
    Header(max_length=500, description="known ETags: answer 304 without a body if one is current"),
]
ANONYMOUS = "anonymous"
"""A default that Python's syntax requires. It is never used: every authenticated request has a name."""


def accepted(command: Command, response: Response) -> Command:
    """Return the command, with the path of its outcome in the answer's Location header."""
    response.headers["Location"] = f"/v1/jobs/{command.job}/commands/{command.command}"
    return command


VERSIONED: dict[int | str, dict[str, Any]] = {
    200: {"headers": {"ETag": {"description": "the answer's version", "schema": {"type": "string"}}}},
    304: {"description": "The caller's version is current"},
}
"""The OpenAPI part of an operation that answers with ``versioned``."""


def versioned(body: bytes, tag: str, if_none_match: str | None) -> Response:
    """Return this JSON with its entity tag, or 304 if the caller has that version."""
    headers = {"ETag": tag}
    if unchanged(if_none_match, tag):
        return Response(status_code=304, headers=headers)
    return Response(body, media_type="application/json", headers=headers)
