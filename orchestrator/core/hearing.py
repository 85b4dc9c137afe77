"""What an island's letter means to the core: each letter is one event, said by that island's incarnation at that instant.

The live link and the laboratory both hear islands, and must hear the same. An offer becomes a contribution only once
somebody holds its bytes, so it has a function of its own; a broken island is heard as the loss of its connection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestrator.core import events, messages, saving
from orchestrator.core.vocabulary import Contribution, Incarnation, Instant, IslandId, payload_id

Heard = (
    messages.Progress
    | messages.Adopted
    | messages.Ready
    | messages.CaughtUp
    | messages.CatchUpFailure
    | messages.Flushed
    | messages.Drained
    | messages.Saved
    | messages.NotSaved
    | messages.Broken
)
Said = events.IslandEvent | saving.IslandSaved | saving.IslandNotSaved
_EVENTS: dict[type, Callable[..., Said]] = {
    messages.Progress: events.ProgressReported,
    messages.Adopted: events.FragmentAdopted,
    messages.Ready: events.IslandReady,
    messages.CaughtUp: events.IslandCaughtUp,
    messages.CatchUpFailure: events.CatchUpFailed,
    messages.Flushed: events.IslandFlushed,
    messages.Drained: events.IslandDrained,
    messages.Saved: saving.IslandSaved,
    messages.NotSaved: saving.IslandNotSaved,
}
"""Letters whose fields are their event's, by the same names."""


def event_of(letter: Heard, at: Instant, island: IslandId, incarnation: Incarnation) -> Said:
    """The event that this letter tells of."""
    if isinstance(letter, messages.Broken):
        return events.ConnectionLost(at, island, incarnation, True, f"its own code failed: {letter.detail}")
    return _EVENTS[type(letter)](at, island, incarnation, **_facts(letter))


def contribution_of(offer: messages.Offer, island: IslandId, incarnation: Incarnation) -> Contribution:
    """What the offer contributes, once its bytes are held."""
    return Contribution(
        payload=payload_id(island, incarnation, offer.fragment, offer.offer),
        island=island,
        incarnation=incarnation,
        **_facts(offer),
    )


def _facts(letter: messages.Letter) -> dict[str, Any]:
    """The letter's fields by name. ``asdict`` would copy them deeply, which costs six times as much."""
    return {name: getattr(letter, name) for name in letter.__slots__}
