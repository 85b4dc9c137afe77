"""Addresses from which nothing comes although pulls want it: what an operator must hear of, before a pull gives up.

    failed    a connection could not be made, or both ends do not trust each other; again with every try
    waiting   a stream waits for bytes, and is silent while its guard notes none
    reached   a connection stands: what failed before is forgotten

Short troubles are none: a process that ends, a line that stumbles. Refuses to know what an operator can do (``endpoint``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from orchestrator.channel.stream import Guard
from orchestrator.channel.ticket import Address

HINDERED_S = 10.0
"""So long nothing comes from an address that is called hindered."""
FORGOTTEN_S = 30.0
"""So long after the last try nobody wants anything from an address any more. Longer than a try and the wait after it."""


@dataclass(frozen=True, slots=True)
class Hindrance:
    """``is_distrust``: the two ends reach each other, and do not accept each other's certificates."""

    address: Address
    reason: str
    is_distrust: bool = False


@dataclass(frozen=True, slots=True)
class _Failures:
    """Of connections to one address, with none in between that stood."""

    first_at: float
    last_at: float
    latest: Hindrance


class Hindrances:
    """Of one client. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures: dict[Address, _Failures] = {}
        self._waiting: dict[Address, list[Guard]] = {}

    def failed(self, address: Address, reason: str, *, is_distrust: bool = False) -> None:
        now, latest = self._clock(), Hindrance(address, reason, is_distrust)
        with self._lock:
            before = self._failures.get(address)
            lasts = before is not None and now - before.last_at < FORGOTTEN_S
            first_at = before.first_at if before is not None and lasts else now
            self._failures[address] = _Failures(first_at, now, latest)

    def reached(self, address: Address) -> None:
        with self._lock:
            self._failures.pop(address, None)

    @contextmanager
    def waiting(self, address: Address, guard: Guard) -> Iterator[None]:
        """While a stream with this guard waits for bytes from there."""
        with self._lock:
            self._waiting.setdefault(address, []).append(guard)
        try:
            yield
        finally:
            with self._lock:
                guards = self._waiting[address]
                guards.remove(guard)
                if not guards:
                    del self._waiting[address]

    def current(self) -> tuple[Hindrance, ...]:
        """Of every address that is hindered now."""
        now = self._clock()
        with self._lock:
            self._failures = {
                address: failures
                for address, failures in self._failures.items()
                if now - failures.last_at < FORGOTTEN_S
            }
            hindered = {
                address: failures.latest
                for address, failures in self._failures.items()
                if now - failures.first_at >= HINDERED_S
            }
            for address, guards in self._waiting.items():
                if now - max(guard.moved_at for guard in guards) >= HINDERED_S:
                    hindered.setdefault(address, Hindrance(address, "it is silent"))
        return tuple(hindered.values())
