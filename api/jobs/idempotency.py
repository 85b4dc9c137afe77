"""Check that an ``Idempotency-Key`` is used for one request only, identified by its digest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any, Protocol

from orchestrator.errors import RequestError
from orchestrator.system.plain import brief


def digest_of(request: Any) -> str:
    """Return a digest that is equal for equal requests, also for requests that validation would refuse."""
    try:
        canonical = json.dumps(request, sort_keys=True, default=str).encode()
    except (TypeError, ValueError, RecursionError):
        canonical = b"".join(_pieces(request))
    return blake2b(canonical, digest_size=16).hexdigest()


def _pieces(value: Any) -> Iterator[bytes]:
    """Yield a canonical form of what JSON cannot encode, without recursion: mixed keys, cycles, depth, huge integers."""
    waiting, seen = [value], set()
    while waiting:
        item = waiting.pop()
        yield type(item).__name__.encode("utf-8", "backslashreplace")
        if isinstance(item, dict | list | tuple):
            yield str(len(item)).encode()
            if id(item) not in seen:
                seen.add(id(item))
                pairs = sorted(item.items(), key=lambda pair: brief(pair[0])) if isinstance(item, dict) else [item]
                waiting += [part for pair in pairs for part in pair]
        elif isinstance(item, int):
            yield hex(item).encode()
        else:
            yield str(item).encode("utf-8", "backslashreplace")


class KeyedRow(Protocol):
    """A row that a request with a key has created."""

    @property
    def request_digest(self) -> Any: ...


def refuse_other_request(row: KeyedRow, digest: str, key: str | None) -> None:
    """Raise RequestError if the row was created by a different request under the same key."""
    if row.request_digest != digest:
        raise RequestError(
            detail=f"The Idempotency-Key {key!r} was already used for a different request.",
            remedy="Use a new key for each new request, and repeat a key only with the same request.",
        )
