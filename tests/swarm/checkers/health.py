"""The checker of contributions' quality: no outlier is admitted, and an island whose work is unusable is quarantined.

Responsible for: every displacement that was admitted being near the median of those before it, by a median of its own; every
refusal as exploding being true; an island in quarantine exactly when its contributions to one fragment were bad so often in
a row, or held no numbers. Told of a step before ``islands`` and ``rounds``: it asks how things stood when it happened.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from orchestrator.accounting.series import median
from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.saving import FragmentRestored
from orchestrator.core.vocabulary import Contribution, FragmentId, Incarnation, IslandId, JobPolicy, RefusalReason
from tests.swarm.checkers.islands import Islands
from tests.swarm.checkers.rounds import Rounds
from tests.swarm.checkers.violation import require

OfferSource = tuple[IslandId, Incarnation, FragmentId]
LATEST = 31
FIRST_VERSIONS = 4


class Health:
    def __init__(self, policy: JobPolicy, islands: Islands, rounds: Rounds) -> None:
        self._policy, self._islands, self._rounds = policy, islands, rounds
        self._latest: list[deque[float]] = [deque(maxlen=LATEST) for _ in range(policy.fragment_count)]
        self._bad: dict[OfferSource, set[int]] = {}
        self._in_a_row: dict[OfferSource, int] = {}

    def apply(self, event: e.Event, effects: tuple[f.Effect, ...]) -> None:
        due = False
        if isinstance(event, FragmentRestored) and effects:
            self._latest[event.fragment].clear()  # usual is what it is from there on
        if isinstance(event, e.ContributionUnusable):
            due = self._is_bad(event.contribution, event.reason)
        elif isinstance(event, e.ContributionArrived):
            due = self._arrived(event, effects)
        quarantined = [x for x in effects if isinstance(x, f.QuarantineIsland)]
        require(len(quarantined) == due, "an island is quarantined for bad work, and at once", (event, quarantined))
        ended = {(x.island, x.incarnation) for x in effects if isinstance(x, f.StopIsland)}
        gone = all((x.island, x.incarnation) in ended for x in quarantined)
        require(gone, "an island in quarantine is ended", effects)

    def _arrived(self, event: e.ContributionArrived, effects: tuple[f.Effect, ...]) -> bool:
        c = event.contribution
        if event.displacement is None:
            admitted = [effect for effect in effects if isinstance(effect, f.AdmitContribution)]
            require(not admitted, "nothing is admitted whose bytes did not come", (event, admitted))
            return False
        own, is_last = self._policy.router_interval_steps, c.fragment == self._policy.fragment_count - 1
        period = own if own is not None and is_last else self._policy.sync_interval_steps
        far = event.displacement / max(1.0, c.step_count / period)
        latest, ratio_max = self._latest[c.fragment], self._policy.health.displacement_ratio_max
        judged = ratio_max is not None and bool(latest) and self._rounds.all[c.fragment].version >= FIRST_VERSIONS
        exploding = judged and ratio_max is not None and far > ratio_max * _usual(latest)
        for effect in effects:
            if isinstance(effect, f.AdmitContribution):
                require(not exploding, "nothing that exploded is admitted", (effect, event.displacement))
                latest.append(far)
                self._in_a_row[c.island, c.incarnation, c.fragment] = 0
            elif isinstance(effect, f.RefuseContribution) and effect.reason is RefusalReason.EXPLODING:
                require(exploding, "only what is far off is refused as exploding", (effect, event.displacement))
                return self._is_bad(c, effect.reason)
        return False

    def _is_bad(self, c: Contribution, reason: RefusalReason) -> bool:
        """Whether this was once too often. What is told again counts once."""
        source = (c.island, c.incarnation, c.fragment)
        if not self._islands.all[c.island].speaks(c.incarnation) or c.offer <= max(self._bad.get(source, {0})):
            return False
        self._bad.setdefault(source, set()).add(c.offer)
        self._in_a_row[source] = self._in_a_row.get(source, 0) + 1
        return reason is RefusalReason.NON_FINITE or self._in_a_row[source] >= self._policy.health.strikes_max


def _usual(latest: Iterable[float]) -> float:
    """The median; of an even number of values the higher of the two in the middle."""
    ordered = sorted(latest)
    return median(ordered if len(ordered) % 2 else ordered[1:])
