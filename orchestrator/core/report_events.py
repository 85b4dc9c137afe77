"""The event that each island report stands for, of that island's incarnation and at that instant.

The live link, the laboratory and the simulation all decode reports, and must do it alike. An offer becomes a contribution
only once its bytes are held, so it has a function of its own; a broken island is decoded as the loss of its connection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestrator.core import events, messages, saving
from orchestrator.core.vocabulary import Contribution, Incarnation, Instant, IslandId, payload_id

EventReport = (
    messages.Progress
    | messages.Adopted
    | messages.Ready
    | messages.CaughtUp
    | messages.CatchUpFailure
    | messages.Flushed
    | messages.Drained
    | messages.Saved
    | messages.NotSaved
    | messages.Evaluated
    | messages.NotEvaluated
    | messages.Overdue
    | messages.Broken
)
"""Reports that are events by themselves: all but offers."""
_EVENTS: dict[type, Callable[..., events.IncarnationEvent]] = {
    messages.Progress: events.ProgressReported,
    messages.Adopted: events.FragmentAdopted,
    messages.Ready: events.IslandReady,
    messages.CaughtUp: events.IslandCaughtUp,
    messages.CatchUpFailure: events.CatchUpFailed,
    messages.Flushed: events.IslandFlushed,
    messages.Drained: events.IslandDrained,
    messages.Overdue: events.StepOverdue,
    messages.Saved: saving.IslandSaved,
    messages.NotSaved: saving.IslandNotSaved,
}
"""Reports whose fields are their event's, by the same names."""


def event_of(report: EventReport, at: Instant, island: IslandId, incarnation: Incarnation) -> events.Event:
    """The event that this report stands for."""
    if isinstance(report, messages.Evaluated):
        facts = _facts(report)
        return events.EvaluationCompleted(at, **facts, place=island, island=island, incarnation=incarnation)
    if isinstance(report, messages.NotEvaluated):
        return events.EvaluationFailed(at, report.global_version, f"on {island}: {report.reason}")
    if isinstance(report, messages.Broken):
        reason = f"its own code failed: {report.detail}"
        return events.ConnectionLost(at, island, incarnation, True, reason, extent=report.extent)
    return _EVENTS[type(report)](at, island, incarnation, **_facts(report))


def contribution_of(offer: messages.Offer, island: IslandId, incarnation: Incarnation) -> Contribution:
    """The contribution that the offer is, once its bytes are held."""
    return Contribution(
        payload=payload_id(island, incarnation, offer.fragment, offer.offer),
        island=island,
        incarnation=incarnation,
        **_facts(offer),
    )


def _facts(report: messages.IslandReport) -> dict[str, Any]:
    """The report's fields by name. ``asdict`` would copy them deeply, which costs six times as much."""
    return {name: getattr(report, name) for name in report.__slots__}
