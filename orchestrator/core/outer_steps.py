"""What became of a merge, as events: a new version stands, or none could be made."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.core.vocabulary import Duration, FragmentId, Instant, PayloadId, Version


@dataclass(frozen=True, slots=True)
class MergeCompleted:
    """Fragment ``fragment`` now stands at ``version``; ``digest`` names its bytes, ``base_digest`` those it was made from.

    True only once the merge would survive the synchroniser's death. Tapes of builds without a journal know no base.
    ``journal_seconds`` is the part of ``merge_seconds`` that this took; None where nobody measured it: in simulations, on
    older tapes, and where only the journal knew of the merge.
    """

    at: Instant
    fragment: FragmentId
    version: Version
    digest: str
    merge_seconds: Duration
    base_digest: str = ""
    journal_seconds: Duration | None = None


@dataclass(frozen=True, slots=True)
class MergeFailed:
    """The outer step gave something that is not finite, which was thrown away: the fragment stands where it stood.

    ``inputs`` tell this attempt from a later one to make the same version.
    """

    at: Instant
    fragment: FragmentId
    version: Version
    inputs: tuple[PayloadId, ...]
    reason: str
