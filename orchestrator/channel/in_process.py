"""The channel within one process, for tests and the laboratory: the same tickets and refusals, no sockets, one copy."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable

from orchestrator.channel.client import Reception
from orchestrator.channel.frames import (
    Address,
    Ticket,
    composite,
    issue,
    range_bytes_of,
    range_checksums,
    require_valid,
)
from orchestrator.errors import PayloadWithdrawn, TransferCancelled

NOWHERE = Address("in-process", 0)


class InProcessChannel:
    """Server and client in one. ``pull`` copies, as a network would, so nobody holds another's buffer."""

    def __init__(self, *, job: str, epoch: int) -> None:
        self._job, self._epoch, self._secret = job, epoch, secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._payloads: dict[str, memoryview] = {}

    def serve(self, payload: str, content: memoryview) -> None:
        with self._lock:
            self._payloads[payload] = content.cast("B").toreadonly()

    def ticket(self, payload: str, island: str) -> Ticket:
        content = self._content(payload)
        range_bytes = range_bytes_of(len(content))
        checksum = composite(range_checksums(content, range_bytes))
        credential = issue(self._secret, job=self._job, epoch=self._epoch, island=island, payload=payload)
        return Ticket((NOWHERE,), payload, len(content), range_bytes, checksum, credential, tls=False)

    def withdraw(self, payload: str) -> None:
        with self._lock:
            self._payloads.pop(payload, None)

    def advance(self, epoch: int) -> None:
        with self._lock:
            self._epoch = epoch

    def pull(
        self,
        ticket: Ticket,
        into: memoryview | None = None,
        *,
        reception: Reception | None = None,
        abandoned: Callable[[], bool] = lambda: False,
    ) -> memoryview:
        require_valid(ticket.credential, self._secret, job=self._job, epoch=self._epoch, subject=None)
        arriving = reception or Reception(ticket, into)
        arriving.require_same(ticket)
        content = self._content(ticket.payload)
        checksums = range_checksums(content, ticket.range_bytes)
        while (number := arriving.take()) is not None:
            if abandoned():
                arriving.give_back(number)
                raise TransferCancelled(detail="A newer payload has taken its place.")
            part = arriving.part(number)
            start = number * ticket.range_bytes
            part[:] = content[start : start + len(part)]
            arriving.arrived(number, checksums[number])
        arriving.require_whole()
        return arriving.content

    def close(self) -> None:
        with self._lock:
            self._payloads.clear()

    def _content(self, payload: str) -> memoryview:
        with self._lock:
            content = self._payloads.get(payload)
        if content is None:
            raise PayloadWithdrawn(detail=f"{payload} is not served here.")
        return content
