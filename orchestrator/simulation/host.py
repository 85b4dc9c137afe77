"""A simulated process and the link to it: in which order letters arrive, and what a frozen or cut-off island does.

Letters are carried one by one, in order, as ``runtime``'s links do: an offer's bytes are pulled before the next letter is
read. While the island is frozen or cut off nothing is carried either way; what was sent waits. Bytes that were not pulled
die with the process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from orchestrator.core.events import (
    CatchUpFailed,
    ContributionArrived,
    Event,
    FragmentAdopted,
    IslandCaughtUp,
    IslandFlushed,
    IslandReady,
    ProgressReported,
)
from orchestrator.core.messages import (
    Adopted,
    Broken,
    CatchUpFailure,
    CaughtUp,
    Flushed,
    Letter,
    Offer,
    Progress,
    Ready,
)
from orchestrator.core.vocabulary import Contribution, Instant, payload_id
from orchestrator.errors import InternalError
from orchestrator.simulation.island import SimulatedIsland


@dataclass(slots=True)
class Host:
    """``frozen_until`` and ``cut_until`` lie in the past while all is well. ``waiting`` are calls held back by either."""

    process: SimulatedIsland
    alive: bool = True
    placed: bool = False
    suspected: bool = False
    carrying: bool = False
    frozen_until: Instant = 0.0
    cut_until: Instant = 0.0
    last_step_end: Instant = 0.0
    reported_at: Instant = 0.0
    outbox: deque[Letter] = field(default_factory=deque)
    waiting: list[Callable[[], None]] = field(default_factory=list)

    def silent(self, now: Instant) -> bool:
        return now < self.frozen_until or now < self.cut_until

    def post(self, letters: list[Letter]) -> None:
        self.outbox.extend(letters)

    def event_of(self, letter: Letter, at: Instant) -> Event:
        """The event that a letter becomes once it was read (and, for an offer, its bytes are held)."""
        island, incarnation = self.process.island, self.process.incarnation
        match letter:
            case Progress(step, steps, tokens, stepping, median, gap, loss):
                return ProgressReported(at, island, incarnation, step, steps, tokens, stepping, median, gap, loss)
            case Offer():
                return ContributionArrived(at, self.contribution_of(letter))
            case Adopted(fragment, version, step, tokens, kept):
                return FragmentAdopted(at, island, incarnation, fragment, version, step, tokens, kept)
            case Ready(devices, seconds):
                return IslandReady(at, island, incarnation, devices, seconds)
            case CaughtUp(donor, versions, step, seconds):
                return IslandCaughtUp(at, island, incarnation, donor, versions, step, seconds)
            case CatchUpFailure(donor, reason):
                return CatchUpFailed(at, island, incarnation, donor, reason)
            case Flushed():
                return IslandFlushed(at, island, incarnation)
            case Broken():
                raise InternalError(detail="A simulated island's own code does not fail.")

    def contribution_of(self, offer: Offer) -> Contribution:
        island, incarnation = self.process.island, self.process.incarnation
        return Contribution(
            payload=payload_id(island, incarnation, offer.fragment, offer.offer),
            island=island,
            incarnation=incarnation,
            fragment=offer.fragment,
            offer=offer.offer,
            step=offer.step,
            base_version=offer.base_version,
            step_count=offer.step_count,
            token_count=offer.token_count,
            tokens_total=offer.tokens_total,
        )
