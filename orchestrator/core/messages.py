"""Island reports: what an island tells the synchroniser, as data.

An island is commanded by calls (``learners.island``) and answers by *reports*: it appends them to an outbox in the order
things happened, and the synchroniser's link to that island reads them in that order by long polling. A report holds no
arrays. Bytes travel apart, pulled by the synchroniser's side under the name of an offer.

The event that each island report stands for, of that island's incarnation and at that instant.

The live link, the laboratory and the simulation all decode reports, and must do it alike. An offer becomes a contribution
only once its bytes are held, so it has a function of its own; a broken island is decoded as the loss of its connection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from orchestrator.core import events, saving
from orchestrator.core.vocabulary import (
    NO_ANCHOR,
    NO_FLAWS,
    Contribution,
    DataFlaws,
    FailureExtent,
    FragmentId,
    Incarnation,
    Instant,
    IslandId,
    ScheduleAnchor,
    SourceLoss,
    Version,
    payload_id,
)


@dataclass(frozen=True, slots=True)
class Progress:
    """The island trained. Fields as in ``events.ProgressReported``."""

    step: int
    steps_total: int
    tokens_total: int
    stepping_seconds: float
    step_seconds_median: float
    gap_max_seconds: float
    loss: float
    flaws: DataFlaws = NO_FLAWS


@dataclass(frozen=True, slots=True)
class Offer:
    """A snapshot of fragment ``fragment`` waits under ``offer``. Fields as in ``vocabulary.Contribution``."""

    fragment: FragmentId
    offer: int
    step: int
    base_version: Version
    step_count: int
    token_count: int
    tokens_total: int


@dataclass(frozen=True, slots=True)
class Adopted:
    """A published version was taken at a step boundary. Fields as in ``events.FragmentAdopted``."""

    fragment: FragmentId
    version: Version
    step: int
    tokens_total: int
    kept_tokens: int
    fix: ScheduleAnchor = NO_ANCHOR


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """The island holds a state. Fields as in ``events.IslandCaughtUp``."""

    donor: IslandId | None
    versions: tuple[Version, ...]
    step: int
    transfer_seconds: float
    sources: tuple[IslandId, ...] = ()


@dataclass(frozen=True, slots=True)
class CatchUpFailure:
    donor: IslandId | None
    reason: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is built and compiled."""

    device_count: int
    start_seconds: float


@dataclass(frozen=True, slots=True)
class Flushed:
    """Everything was offered; no step will follow."""


@dataclass(frozen=True, slots=True)
class Drained:
    """Nothing trained here is missing from the versions that were adopted; no step will follow."""


@dataclass(frozen=True, slots=True)
class Saved:
    """This island's part of a checkpoint is on disk. Fields as in ``saving.IslandSaved``."""

    checkpoint: int
    digest: str
    tokens_total: int
    held_seconds: float


@dataclass(frozen=True, slots=True)
class NotSaved:
    checkpoint: int
    reason: str


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Θ was measured here. Fields as in ``events.EvaluationCompleted``."""

    global_version: int
    loss: float
    sequence_count: int
    seconds: float
    bits_per_byte: float | None = None
    sources: tuple[SourceLoss, ...] = ()


@dataclass(frozen=True, slots=True)
class NotEvaluated:
    global_version: int
    reason: str


@dataclass(frozen=True, slots=True)
class Overdue:
    """The present step does not end. Fields as in ``events.StepOverdue``."""

    seconds: float
    usual_seconds: float


@dataclass(frozen=True, slots=True)
class Broken:
    """The island's own code failed; its process is about to end. ``detail`` is the last line of the traceback."""

    detail: str
    extent: FailureExtent = FailureExtent.INCARNATION


ALL_OFFERS = 1 << 62
"""As a publication's ``merged_offer``: keep nothing of your own, whatever you offered and whatever the rule of adoption."""

IslandReport = (
    Progress
    | Offer
    | Adopted
    | CaughtUp
    | CatchUpFailure
    | Ready
    | Flushed
    | Drained
    | Saved
    | NotSaved
    | Evaluated
    | NotEvaluated
    | Overdue
    | Broken
)


EventReport = (
    Progress
    | Adopted
    | Ready
    | CaughtUp
    | CatchUpFailure
    | Flushed
    | Drained
    | Saved
    | NotSaved
    | Evaluated
    | NotEvaluated
    | Overdue
    | Broken
)
"""Reports that are events by themselves: all but offers."""
_EVENTS: dict[type, Callable[..., events.IncarnationEvent]] = {
    Progress: events.ProgressReported,
    Adopted: events.FragmentAdopted,
    Ready: events.IslandReady,
    CaughtUp: events.IslandCaughtUp,
    CatchUpFailure: events.CatchUpFailed,
    Flushed: events.IslandFlushed,
    Drained: events.IslandDrained,
    Overdue: events.StepOverdue,
    Saved: saving.IslandSaved,
    NotSaved: saving.IslandNotSaved,
}
"""Reports whose fields are their event's, by the same names."""


def event_of(report: EventReport, at: Instant, island: IslandId, incarnation: Incarnation) -> events.Event:
    """The event that this report stands for."""
    if isinstance(report, Evaluated):
        facts = _facts(report)
        return events.EvaluationCompleted(at, **facts, place=island, island=island, incarnation=incarnation)
    if isinstance(report, NotEvaluated):
        return events.EvaluationFailed(at, report.global_version, f"on {island}: {report.reason}")
    if isinstance(report, Broken):
        reason = f"its own code failed: {report.detail}"
        return events.ConnectionLost(at, island, incarnation, True, reason, extent=report.extent)
    return _EVENTS[type(report)](at, island, incarnation, **_facts(report))


def contribution_of(offer: Offer, island: IslandId, incarnation: Incarnation) -> Contribution:
    """The contribution that the offer is, once its bytes are held."""
    return Contribution(
        payload=payload_id(island, incarnation, offer.fragment, offer.offer),
        island=island,
        incarnation=incarnation,
        **_facts(offer),
    )


def _facts(report: IslandReport) -> dict[str, Any]:
    """The report's fields by name. ``asdict`` would copy them deeply, which costs six times as much."""
    return {name: getattr(report, name) for name in report.__slots__}
