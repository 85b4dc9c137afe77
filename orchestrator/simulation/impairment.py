"""The impairment of a link between an island and the synchroniser by injected faults, as data without waiting or clocks.

    cut                     nothing passes for a while: reports, payloads, publications; the process trains on
    slow                    payloads and publications pass at a limited rate for a while; reports take no time
    corrupt, delay, drop    a number of payloads arrive with flipped bits, late, or not at all

The live link and the simulated one use the same class, so a plan means the same in both. The faults impair the link of the
application, not the network: other traffic (states from peers, a kill, Ray's own calls) is not delayed. The user of the link
does the waiting and passes the time in. An impairment ends by itself.

Kernel rules are no alternative: on one machine all nodes share the loopback device, and such rules need root and would
affect Ray itself.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import assert_never

from orchestrator.core.faults import Corrupt, Cut, Delay, Drop, LinkFault, PayloadFault, Slow
from orchestrator.core.vocabulary import Duration, Instant


class LinkImpairment:
    """The impairment of one link; none until a fault is injected. One thread may inject while others read."""

    def __init__(self) -> None:
        self._cut_until: Instant = -inf
        self._slow: tuple[Instant, float] = (-inf, inf)
        self._payload_faults: deque[PayloadFault] = deque()

    def inject(self, fault: LinkFault, now: Instant) -> None:
        """Add a fault. A second cut never shortens the first; a second slow link replaces the first."""
        match fault:
            case Cut():
                self._cut_until = max(self._cut_until, now + fault.duration_s)
            case Slow():
                self._slow = (now + fault.duration_s, fault.bytes_per_second)
            case Corrupt() | Delay() | Drop():
                self._payload_faults.extend([fault] * fault.payloads)
            case _:
                assert_never(fault)

    def clear(self) -> None:
        """Remove every impairment."""
        self._cut_until, self._slow = -inf, (-inf, inf)
        self._payload_faults.clear()

    def cut_s(self, now: Instant) -> Duration:
        """Return how long from ``now`` nothing passes; 0 if the link is not cut."""
        return max(0.0, self._cut_until - now)

    def slow(self, now: Instant) -> bool:
        return now < self._slow[0]

    def transfer_delay_s(self, size_bytes: int, now: Instant) -> Duration:
        """Return how much longer these bytes take than without impairment. What is left when it ends takes no time."""
        until, bytes_per_second = self._slow
        return min(size_bytes / bytes_per_second, until - now) if now < until else 0.0

    def payload_fault(self) -> PayloadFault | None:
        """Return the fault of the payload that arrives now, if it has one. Each is used once."""
        return self._payload_faults.popleft() if self._payload_faults else None
