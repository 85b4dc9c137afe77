"""What becomes of a fragment when a published version arrives: the arithmetic of adoption, and what it needs remembered.

With Θ the published fragment and θ this island's own:

    replace   θ ← Θ                       Decoupled DiLoCo, arXiv:2604.21428; own work since the last offer is overwritten
    mix       θ ← α·θ + (1 − α)·Θ         Streaming DiLoCo, arXiv:2501.18512
    rebase    θ ← Θ + (θ − θ_merged)      ours: keeps all work that is in no version yet. θ_merged is the snapshot whose
                                         work is in Θ, or what was last adopted when no offer since is in Θ

An island that misses a round by a hair would, by ``replace``, lose a whole interval's work on that fragment, and go on
missing rounds by the same hair. By ``rebase`` it loses nothing: it offers the work again, early for the next round.

Knows nothing of steps, threads or mail; a trainer only through its snapshots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from learners.contract import Arrays, Snapshot
from orchestrator.core.vocabulary import Version

Rule = Literal["replace", "mix", "rebase"]
SENT_KEPT: Mapping[Rule, int] = {"replace": 1, "mix": 1, "rebase": 4}
"""Offers whose snapshots are kept until the next adoption. An island that is cut off goes on offering; its memory must not
grow with the cut. Should one of the dropped be the merged one, the published value replaces the island's own."""


@dataclass(frozen=True, slots=True)
class Sent:
    """An offer of a fragment since it was adopted, and what its snapshot covers."""

    offer: int
    snapshot: Snapshot
    step_count: int = 0
    token_count: int = 0


@dataclass(slots=True)
class FragmentWork:
    """An island's own work on one fragment since it adopted ``version``.

    ``step_count`` and ``token_count`` are the paper's c_steps and c_tokens. ``base`` is what was adopted, if it is known;
    ``offers_before`` the number of the island's last offer made before that; ``sent`` the latest offers since.
    """

    version: Version
    base: Mapping[str, np.ndarray] | None = None
    offers_before: int = 0
    step_count: int = 0
    token_count: int = 0
    sent: list[Sent] = field(default_factory=list)

    @property
    def unsent_tokens(self) -> int:
        return self.token_count - (self.sent[-1].token_count if self.sent else 0)

    def remember(self, sent: Sent, rule: Rule) -> None:
        self.sent = [*self.sent, sent][-SENT_KEPT[rule] :]

    def kept_since(self, merged_offer: int, rule: Rule) -> Sent | None:
        """From where on the work is kept, with what the fragment was then; ``None`` when all of it is overwritten."""
        if rule == "replace":
            return None
        if rule == "mix":
            return self.sent[-1] if self.sent else None
        if merged_offer > self.offers_before:
            return next((sent for sent in self.sent if sent.offer == merged_offer), None)
        return None if self.base is None else Sent(0, Known(self.base))


@dataclass(frozen=True, slots=True)
class Known:
    """A ``Snapshot`` of what is on the host already."""

    known: Mapping[str, np.ndarray]

    def arrays(self) -> Arrays:
        return dict(self.known)


def combine(published: Arrays, own: Arrays, since: Arrays, rule: Rule, alpha: float) -> Arrays:
    """The published fragment with what is kept of the island's own; float32, by tensor name."""
    if rule == "mix":
        own_share = np.float32(alpha)
        return {name: own_share * own[name] + (1 - own_share) * array for name, array in published.items()}
    return {name: array + (own[name] - since[name]) for name, array in published.items()}
