"""What became of an offer's bytes, as events: held and measured, or of no use. ``admission`` and ``health`` judge."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.core.vocabulary import Contribution, Instant, RefusalReason


@dataclass(frozen=True, slots=True)
class ContributionArrived:
    """The payload's bytes are held on the synchroniser's side, their checksum is good, and every value is a number.

    ``displacement`` is ‖Θ_p − θ‖, how far the fragment is from the synchroniser's when the bytes came (Euclidean, over all
    its parameters). ``None`` where nobody measured it: on tapes written before it was.
    """

    at: Instant
    contribution: Contribution
    displacement: float | None = None


@dataclass(frozen=True, slots=True)
class ContributionUnusable:
    """The bytes came but cannot be merged: corrupt, of the wrong shape, or not finite. They are not held."""

    at: Instant
    contribution: Contribution
    reason: RefusalReason
    detail: str
