"""The impairment of a link between an island and the synchroniser by injected faults, as data without waiting or clocks.

    cut                     nothing passes for a while: reports, payloads, publications; the process trains on
    slow                    payloads and publications pass at so many bytes a second for a while; reports weigh nothing
    corrupt, delay, drop    the next so many payloads arrive with flipped bits, late, or not at all

The live link and the simulated one use the same class, so a plan means the same in both. It is the application's link that
is impaired, not the network: what goes around it (peers' states, a kill, Ray's own traffic) is not held up. The link's user
waits and passes the time. An impairment whose end has passed is over.

Rules of the kernel are no alternative: on one machine all nodes share the loopback device, and such rules need root and
would hit Ray itself.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from math import inf

from orchestrator.core.vocabulary import Duration, FaultSpec, Instant


class LinkFault(StrEnum):
    CUT = "cut"
    SLOW = "slow"
    CORRUPT = "corrupt"
    DELAY = "delay"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class PayloadFault:
    """The fate of one payload: ``kind`` is corrupt, delay (by ``late``) or drop."""

    kind: LinkFault
    late: Duration = 0.0


class LinkImpairment:
    """The impairment of one link; none until a fault is injected. One thread may inject while others ask."""

    def __init__(self) -> None:
        self._cut_until: Instant = -inf
        self._slow: tuple[Instant, float] = (-inf, inf)
        self._payload_faults: deque[PayloadFault] = deque()

    def inject(self, kind: LinkFault, fault: FaultSpec, now: Instant) -> None:
        """A second cut never shortens the first; a second slowness takes the place of the first."""
        match kind:
            case LinkFault.CUT:
                self._cut_until = max(self._cut_until, now + fault.duration)
            case LinkFault.SLOW:
                self._slow = (now + fault.duration, fault.bytes_per_second)
            case LinkFault.CORRUPT | LinkFault.DELAY | LinkFault.DROP:
                self._payload_faults.extend([PayloadFault(kind, fault.duration)] * fault.payloads)

    def clear(self) -> None:
        """Remove every impairment."""
        self._cut_until, self._slow = -inf, (-inf, inf)
        self._payload_faults.clear()

    def cut_s(self, now: Instant) -> Duration:
        """For how long from ``now`` nothing passes; 0 while something does."""
        return max(0.0, self._cut_until - now)

    def slow(self, now: Instant) -> bool:
        return now < self._slow[0]

    def transfer_delay_s(self, size_bytes: int, now: Instant) -> Duration:
        """How much longer than without impairment so many bytes take; the rest after its end takes no time."""
        until, bytes_per_second = self._slow
        return min(size_bytes / bytes_per_second, until - now) if now < until else 0.0

    def payload_fault(self) -> PayloadFault | None:
        """The fault of the payload that arrives now, if it has one. Each is used once."""
        return self._payload_faults.popleft() if self._payload_faults else None
