"""What has arrived of one payload: a buffer, and which of its ranges are verified. It outlives the pull that began it.

A pull that breaks off leaves its reception as it is; the next one, with a new ticket for the same bytes and maybe another
server, asks for the missing ranges alone. Thread-safe.
"""

from __future__ import annotations

import threading
from collections import deque

import numpy as np

from orchestrator.channel.checksums import composite
from orchestrator.channel.ticket import Ticket
from orchestrator.errors import PayloadDamaged


class Reception:
    """``into`` takes the bytes; without it a buffer is made. Raises ValueError if it has not the payload's size."""

    def __init__(self, ticket: Ticket, into: memoryview | None = None) -> None:
        content = np.empty(ticket.size, np.uint8).data if into is None else into.cast("B")
        if len(content) != ticket.size or content.readonly:
            raise ValueError(f"{ticket.payload} has {ticket.size:,} bytes, and the buffer takes {len(content):,}")
        self.content = content
        self._ticket = ticket
        self._lock = threading.Lock()
        self._checksums: dict[int, int] = {}
        self._missing = deque(range(max(1, -(-ticket.size // ticket.range_bytes))))
        self._range_count = len(self._missing)

    def require_same(self, ticket: Ticket) -> None:
        """Raise ValueError if the ticket is of other bytes than those that have arrived."""
        if (ticket.size, ticket.range_bytes, ticket.checksum) != (
            self._ticket.size,
            self._ticket.range_bytes,
            self._ticket.checksum,
        ):
            raise ValueError(f"{ticket.payload} is not the payload of which a part is here already")

    @property
    def complete(self) -> bool:
        with self._lock:
            return len(self._checksums) == self._range_count

    @property
    def received_count(self) -> int:
        """How many ranges are here."""
        with self._lock:
            return len(self._checksums)

    @property
    def range_count(self) -> int:
        return self._range_count

    def part(self, number: int) -> memoryview:
        start = number * self._ticket.range_bytes
        return self.content[start : min(start + self._ticket.range_bytes, self._ticket.size)]

    def take(self) -> int | None:
        """The next missing range, which is the caller's until ``give_back`` or ``arrived``; None if none is left."""
        with self._lock:
            return self._missing.popleft() if self._missing else None

    def give_back(self, number: int) -> None:
        with self._lock:
            self._missing.appendleft(number)

    def arrived(self, number: int, checksum: int) -> None:
        """The range is in the buffer and has this checksum, which was computed here."""
        with self._lock:
            self._checksums[number] = checksum

    def require_whole(self) -> None:
        """Raise PayloadDamaged, and forget all that has arrived, if the ranges together are not the ticket's payload."""
        with self._lock:
            if composite([self._checksums[number] for number in range(self._range_count)]) == self._ticket.checksum:
                return
            self._checksums.clear()
            self._missing = deque(range(self._range_count))
        detail = "its ranges are sound, but together not the bytes that the ticket names: the server has others."
        raise PayloadDamaged(payload=self._ticket.payload, detail=detail)
