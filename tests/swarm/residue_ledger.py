"""A ledger of coding residues: each is in the island's parameters exactly once, until a later offer contains it.

Offer n is Δ, with everything in θ that no version contains. Its encoded form is less, and the rest is the residue r_n. A
residue can therefore be in three places: in θ, in an offer in flight (and still in θ), and in a version, through the
offer that contained it.

    adopted by                  then in θ
    rebase, since offer n       r_n, and what was added to θ after n was made
    rebase, since the adoption  what was there
    replace, of offer n         r_n
    replace, 0                  what was there
    replace, none               nothing: a rollback overwrites all work

There are no arrays here, and residues are not computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.core.vocabulary import AllOffers, FragmentId
from orchestrator.replica.replica import Action, AdoptVersion, OfferFragment, Publication
from orchestrator.replica.work import Mix, Rebase, Replace
from tests.swarm.checkers.violation import require

APPLIED_ONCE = "no residue is applied twice, and what a version holds is taken out of θ"
NONE_LOST = "no residue is lost while its island's work is kept"


class ResidueLedger:
    """The ledger of one incarnation. A residue has the number of its offer."""

    def __init__(self) -> None:
        self._arrived: dict[FragmentId, Publication] = {}
        self._carried: dict[FragmentId, frozenset[int]] = {}
        self._offers: dict[FragmentId, dict[int, frozenset[int]]] = {}
        """The residues in each offer."""

    def arrived(self, publication: Publication) -> None:
        self._arrived[publication.fragment] = publication

    def carried_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case OfferFragment():
                    fragment = action.report.fragment
                    carried = self._carried.get(fragment, frozenset())
                    self._offers.setdefault(fragment, {})[action.report.offer] = carried
                case AdoptVersion():
                    self._adopt(action)

    def _adopt(self, action: AdoptVersion) -> None:
        fragment = action.report.fragment
        merged = self._arrived[fragment].merged_offer
        offers, carried = self._offers.pop(fragment, {}), self._carried.get(fragment, frozenset())
        held = merged if merged in offers else None
        match action.mode:
            case Rebase(since):
                require(since == held, APPLIED_ONCE, (action, merged))
                after = carried if since is None else (carried - offers[since]) | {since}
                require(since not in carried, APPLIED_ONCE, (action, carried))
            case Replace(residue) | Mix(residue) if residue is not None:
                require((residue or None) == held, NONE_LOST, (action, merged))
                after = frozenset({residue}) if residue else carried
            case _:
                require(isinstance(merged, AllOffers) or not (carried or held), NONE_LOST, (action, merged, carried))
                after = frozenset()
        self._carried[fragment] = after
