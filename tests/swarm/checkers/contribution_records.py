"""A checker's records of contributions: each incarnation's offers to a fragment, and each fragment's round.

Plain data; what must be true of it is ``rounds``' business.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.core.vocabulary import Contribution, FragmentId, IslandId, MergedOffer, Version


@dataclass(slots=True)
class OfferRecord:
    """What one incarnation of an island gave to one fragment."""

    admitted_offer: int = 0
    merged_offer: MergedOffer = 0
    merged_into: Version = Version(0)
    merged_up_to: int = 0
    merged_before: int = 0
    continued_from: int | None = None
    """Work beyond so many of its tokens is a later incarnation's now, which continued from the state that it left."""
    """What ``merged_up_to`` was before the merge under way, which may fail, or die with the synchroniser."""


@dataclass(slots=True)
class Round:
    """The fragment stands at ``version``; ``inputs`` are being merged, ``open`` waits.

    ``restoring``: the next version is a checkpoint's. ``merged`` is what each island has in each version.
    """

    fragment: FragmentId
    version: Version = Version(0)
    step: int = 0
    open: dict[IslandId, Contribution] = field(default_factory=dict)
    inputs: tuple[Contribution, ...] = ()
    restoring: bool = False
    merged: dict[Version, dict[IslandId, int]] = field(default_factory=dict)
