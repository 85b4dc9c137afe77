"""What routes have in common: the service, who is asking, and the idempotency key."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Header, Request

from api.auth.roles import Holder
from api.service import Service


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def caller_of(request: Request) -> str:
    """The name of the token that the gate let in."""
    holder: Holder = request.state.holder
    return holder.name


ServiceHere = Annotated[Service, Depends(service_of)]
Caller = Annotated[str, Depends(caller_of)]
IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key", min_length=1, max_length=200, description="repeat a request without doing it twice"
    ),
]
ANONYMOUS = "anonymous"
"""The default that Python wants of a parameter behind others. No caller has it: the gate lets nobody in without a name."""
