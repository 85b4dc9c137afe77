"""One ``Idempotency-Key`` names one request: how a repeated request is told from another one under the same key."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any, Protocol

from orchestrator.errors import RequestError


def digest_of(request: Any) -> str:
    return blake2b(json.dumps(request, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


class Keyed(Protocol):
    """A row that a request left under its key."""

    @property
    def request_digest(self) -> Any: ...


def refuse_other_request(row: Keyed, digest: str, key: str | None) -> None:
    """One idempotency key names one request."""
    if row.request_digest != digest:
        raise RequestError(
            detail=f"The Idempotency-Key {key!r} was used before for a different request.",
            remedy="Use a new key for a new request, and repeat a key only with the very same request.",
        )
