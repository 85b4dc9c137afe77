"""What routes have in common: the service, who is asking, and the idempotency key."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Header, Request

from api.service import Service


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


ServiceHere = Annotated[Service, Depends(service_of)]
Caller = Annotated[
    str, Header(alias="Atoll-Caller", max_length=200, description="who is asking, for the record; not authenticated")
]
IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key", min_length=1, max_length=200, description="repeat a request without doing it twice"
    ),
]
ANONYMOUS = "anonymous"
