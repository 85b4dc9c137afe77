"""Contributions and merges, seen from outside: nothing lost, nothing counted twice, no merge but a right one.

Responsible for: the sentences of docs/concepts.md and of the paper about one fragment, from events and effects alone:
every payload is held or released, every contribution gets one verdict with a true reason, a merge has its quorum, weights
by the formula and the next version, and a round that has nobody to wait for does not wait. Refuses to know: seconds.

Source: Decoupled DiLoCo, arXiv:2604.21428 (minimum quorum, token weighting w = c_tokens · c_tokens / c_steps).
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from math import ceil, fsum, isclose

from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.messages import CaughtUp, LeftState
from orchestrator.core.saving import RestoreFragments
from orchestrator.core.vocabulary import (
    CloseReason,
    Contribution,
    Epoch,
    FragmentId,
    GraceTimer,
    Incarnation,
    IslandId,
    JobPolicy,
    PayloadId,
    RefusalReason,
    ReleaseReason,
)
from tests.swarm.checkers.contribution_records import OfferRecord, Round
from tests.swarm.checkers.islands import Islands, Stage
from tests.swarm.checkers.timers import Timers
from tests.swarm.checkers.violation import require

_SEEN_IN_THE_BYTES = {
    RefusalReason.CORRUPT,
    RefusalReason.WRONG_SHAPE,
    RefusalReason.NON_FINITE,
    RefusalReason.EXPLODING,
}
"""Whether the last is true, ``health`` says."""


class Rounds:
    """``merged_at[p]`` is when fragment p last merged, ``merged_tokens`` what each island has in each fragment.

    ``going_back``: no round closes, for the job goes back to a checkpoint. ``epoch`` is the newest that was told.
    """

    def __init__(self, policy: JobPolicy, epoch: Epoch, islands: Islands, timers: Timers) -> None:
        self.all = [Round(FragmentId(p)) for p in range(policy.fragment_count)]
        self.held: set[PayloadId] = set()
        self.merged_at = [0.0] * policy.fragment_count
        self.merged_tokens = {plan.island: [0] * policy.fragment_count for plan in policy.islands}
        self.epoch, self._policy = epoch, policy
        self._islands, self._timers = islands, timers
        self._offer_records: dict[tuple[IslandId, int, FragmentId], OfferRecord] = {}
        self._admitted: set[PayloadId] = set()
        self._over = self._complete = False
        self.going_back = False

    def apply(self, event: e.Event, effects: tuple[f.Effect, ...]) -> None:
        if isinstance(event, (e.ContributionArrived, e.ContributionUnusable)):
            self._arrived(event, effects)
        elif isinstance(event, e.MergeCompleted):
            self._completed(event, effects)
        elif isinstance(event, e.MergeFailed):
            self._failed(event, effects)
        elif isinstance(event, e.SynchroniserRestarted) and event.epoch > self.epoch:
            self._died(event)
        elif isinstance(report := e.report_of(event), CaughtUp) and report.left is not None:
            self._continues(event, report.left)
        for effect in effects:
            match effect:
                case f.AdmitContribution():
                    self._admit(effect)
                case f.ReleasePayload():
                    self._release(effect, event, effects)
                case f.MergeFragment():
                    self._merge(effect)
                case f.PublishFragment():
                    self._publish(effect)
                case f.FinishJob():
                    self._over = True
        in_rounds = {c.payload for r in self.all for c in (*r.open.values(), *r.inputs)}
        require(self.held == in_rounds, "every payload is held or released and never both", self.held ^ in_rounds)
        for current in self.all:
            self._waits_for_somebody(current)
        gave_all = self._islands.ending and not self._islands.live and not self.going_back
        self._complete = self._complete or (gave_all and not any(r.open or r.inputs for r in self.all))

    def merged_up_to(self, island: IslandId, incarnation: Incarnation) -> list[int]:
        """Of each fragment: how far this incarnation's tokens are in versions."""
        records = (
            self._offer_records.get((island, incarnation, current.fragment), OfferRecord()) for current in self.all
        )
        return [record.merged_up_to for record in records]

    def _died(self, event: e.SynchroniserRestarted) -> None:
        """What was admitted and not merged was never given: the same offers may come again, under the new epoch."""
        self.epoch = event.epoch
        for current in self.all:
            for c in (*current.open.values(), *current.inputs):
                self._record_of(c).admitted_offer = c.offer - 1
                self._admitted.discard(c.payload)
            current.open = {}
            self._unmerge(current)
            self._timers.drop(GraceTimer(current.fragment))

    def _continues(self, event: e.Event, left: LeftState) -> None:
        """Of the work that the island keeps, nothing is in a version yet. Its own offers begin with that."""
        assert isinstance(event, e.IslandReported)
        if not self._islands.all[event.island].speaks(event.incarnation):
            return
        for current, tokens in zip(self.all, left.kept_tokens, strict=True):
            former = self.offer_record(event.island, left.incarnation, current.fragment)
            own = self.offer_record(event.island, event.incarnation, current.fragment)
            fresh = not tokens or former.merged_up_to <= left.tokens_total - tokens
            require(fresh, "no work that an island keeps of an earlier incarnation is merged", (event, former))
            former.continued_from = left.tokens_total - tokens if tokens else None
            if not own.admitted_offer:
                own.merged_up_to = -tokens

    # ── contributions ─────────────────────────────────────────────────────────────────────────────────────────

    def _arrived(self, event: e.ContributionArrived | e.ContributionUnusable, effects: tuple[f.Effect, ...]) -> None:
        c = event.contribution
        if isinstance(event, e.ContributionArrived):
            self.held.add(c.payload)
        verdicts = [x for x in effects if isinstance(x, (f.AdmitContribution, f.RefuseContribution))]
        silent = self._over and isinstance(event, e.ContributionUnusable)
        once = len(verdicts) == (0 if silent else 1) and all(verdict.contribution == c for verdict in verdicts)
        require(once, "every contribution gets one verdict", (event, verdicts))
        for verdict in verdicts:
            if isinstance(verdict, f.RefuseContribution):
                require(self._true(verdict), "a refusal gives a true reason", verdict)
            else:
                require(isinstance(event, e.ContributionArrived), "what cannot be used is refused", verdict)

    def _true(self, refusal: f.RefuseContribution) -> bool:
        c, status = refusal.contribution, self._islands.all[refusal.contribution.island]
        current, record = self.all[c.fragment], self._record_of(c)
        behind = current.version - c.base_version
        match refusal.reason:
            case RefusalReason.FENCED:
                return c.incarnation != status.incarnation
            case RefusalReason.JOB_OVER:
                return self._over or self._complete
            case RefusalReason.NOT_CAUGHT_UP:
                return status.stage is not Stage.TRAINING
            case RefusalReason.DUPLICATE:
                return c.offer <= record.admitted_offer
            case RefusalReason.EMPTY:
                return c.step_count <= 0 or c.token_count <= 0
            case RefusalReason.UNKNOWN_VERSION:
                return behind < 0
            case RefusalReason.ALREADY_MERGED:
                return c.base_version < record.merged_into
            case RefusalReason.LATE:
                return bool(current.inputs) or current.restoring or (behind == 1 and self._policy.staleness_max < 1)
            case RefusalReason.STALE_BASE:
                return behind > max(1, self._policy.staleness_max)
        return refusal.reason in _SEEN_IN_THE_BYTES

    def _admit(self, effect: f.AdmitContribution) -> None:
        c = effect.contribution
        status, current, record = self._islands.all[c.island], self.all[c.fragment], self._record_of(c)
        require(status.speaks(c.incarnation), "nothing of an incarnation that is over is admitted", (effect, status))
        require(status.stage is Stage.TRAINING, "only an island that has caught up contributes", (effect, status))
        require(not self._over and not self._complete, "nothing is admitted once the job has all its work", effect)
        require(c.payload not in self._admitted, "a contribution is admitted once", effect)
        require(c.offer > record.admitted_offer, "an older offer never replaces a newer one", (effect, record))
        require(c.step_count > 0 and c.token_count > 0, "no contribution is empty", effect)
        opens = not current.inputs and effect.version == current.version + 1
        require(opens, "contributions enter the round towards the next version", (effect, current.version))
        behind = current.version - c.base_version
        require(0 <= behind <= self._policy.staleness_max, "no base is staler than staleness_max", (effect, behind))
        require(
            c.base_version >= record.merged_into, "no work is admitted on a base before its own merge", (effect, record)
        )
        current.open[c.island] = c
        record.admitted_offer = c.offer
        self._admitted.add(c.payload)

    def _release(self, effect: f.ReleasePayload, event: e.Event, effects: tuple[f.Effect, ...]) -> None:
        require(effect.payload in self.held, "only held payloads are released, and once", effect)
        self.held.discard(effect.payload)
        match effect.reason:
            case ReleaseReason.LOST:
                right = isinstance(event, e.SynchroniserRestarted)
            case ReleaseReason.MERGED:
                right = isinstance(event, e.MergeCompleted)
            case ReleaseReason.REFUSED:
                right = _about(effect.payload, f.RefuseContribution, effects)
            case ReleaseReason.SUPERSEDED:
                left = [x.island for x in effects if isinstance(x, f.BeginCatchUp) and isinstance(x.source, f.FromLeft)]
                withdrawn = [(r, c) for r in self.all for c in r.open.values() if c.payload == effect.payload]
                for current, c in withdrawn if left else ():
                    del current.open[c.island]
                right = any(isinstance(x, f.AdmitContribution) for x in effects)
                right = right or [c.island for _, c in withdrawn] == left
            case ReleaseReason.ABANDONED:
                right = self._islands.ending or self._islands.finished or isinstance(event, e.MergeFailed)
                right = right or any(isinstance(x, RestoreFragments) for x in effects)
                for current in self.all:
                    current.open = {i: c for i, c in current.open.items() if c.payload != effect.payload}
                    if self._islands.finished and effect.payload in {c.payload for c in current.inputs}:
                        current.inputs = tuple(c for c in current.inputs if c.payload != effect.payload)
        require(right, "a payload is released for a true reason", (effect, event))

    # ── merges ────────────────────────────────────────────────────────────────────────────────────────────────

    def _merge(self, effect: f.MergeFragment) -> None:
        current = self.all[effect.fragment]
        inputs = tuple(current.open[island] for island in sorted(current.open))
        require(effect.epoch == self.epoch, "a merge carries the synchroniser's epoch", effect)
        require(
            not self._over and not self.going_back, "nothing is merged after the job's end, or on a way back", effect
        )
        next_one = effect.version == current.version + 1 and not current.inputs
        require(next_one, "versions rise by one, one merge at a time", (effect, current.version))
        at_once = effect.reason is CloseReason.NO_GRACE_LEFT  # later, more islands may train than when it was reached
        least = self._quorum if at_once else self._policy.quorum
        leaves = self._policy.leaving_closes and bool(self._islands.leaving)
        all_leave = leaves and not any(status.trains_perhaps for status in self._islands.all.values())
        below = effect.reason is CloseReason.LEAVING and all_leave
        require(len(inputs) >= least or below, "no merge is below quorum, unless all leave", (effect, least))
        closing = leaves or effect.reason is not CloseReason.LEAVING
        require(closing, "everybody leaves when the round says so", (effect, self._islands.live))
        same = sorted(item.payload for item in effect.inputs) == sorted(c.payload for c in inputs)
        require(same, "a round merges exactly what it admitted", (effect, inputs))
        step = max(current.step, *(c.step for c in inputs))
        require(effect.step == step, "a merge is at the highest step among its inputs", (effect, step))
        require(_weighted(effect, inputs), "weights follow the formula and sum to one", (effect, inputs))
        present = self._on_time(current)
        in_time = bool(present) or effect.reason is CloseReason.LEAVING
        require(in_time, "somebody in a merge is on time, unless all leave", effect)
        everyone = effect.reason is not CloseReason.EVERYONE_IN or self._islands.live <= present
        require(everyone, "everyone is in when the round says so", (effect, self._islands.live))
        rang = effect.reason is not CloseReason.GRACE_OVER or self._timers.rang == GraceTimer(effect.fragment)
        require(rang, "grace is over when its timer rings", effect)
        for c in inputs:
            record = self._record_of(c)
            fresh = c.tokens_total - c.token_count >= record.merged_up_to
            fresh &= record.continued_from is None or c.tokens_total <= record.continued_from
            require(fresh, "no token is merged twice", (effect, c, record))
            record.merged_before, record.merged_up_to = record.merged_up_to, c.tokens_total
        current.inputs, current.open = inputs, {}
        self._timers.drop(GraceTimer(effect.fragment))

    def _completed(self, event: e.MergeCompleted, effects: tuple[f.Effect, ...]) -> None:
        current = self.all[event.fragment]
        if self._over or not current.inputs or event.version != current.version + 1:
            require(not effects, "nothing comes of a merge that nobody waits for", (event, effects))
            return
        for c in current.inputs:
            record = self._record_of(c)
            record.merged_offer, record.merged_into = c.offer, event.version
            self._islands.contributed(c.island, c.incarnation)
            self.merged_tokens[c.island][c.fragment] += c.token_count
        current.step = max(current.step, *(c.step for c in current.inputs))
        current.version, current.inputs = event.version, ()
        current.merged[event.version] = {
            island: counts[event.fragment] for island, counts in self.merged_tokens.items()
        }
        self.merged_at[event.fragment] = event.at
        recipients = {x.island for p in effects if isinstance(p, f.PublishFragment) for x in p.recipients}
        training = {island for island, status in self._islands.all.items() if status.stage is Stage.TRAINING}
        require(training <= recipients, "everybody who trains hears of a new version", training - recipients)

    def _failed(self, event: e.MergeFailed, effects: tuple[f.Effect, ...]) -> None:
        """Its work is in no version, and may come again."""
        current = self.all[event.fragment]
        if sorted(event.inputs) != sorted(c.payload for c in current.inputs):
            require(not effects, "nothing comes of a merge that nobody waits for", (event, effects))
            return
        self._unmerge(current)

    def _unmerge(self, current: Round) -> None:
        for c in current.inputs:
            self._record_of(c).merged_up_to = self._record_of(c).merged_before
        current.inputs = ()

    def _publish(self, effect: f.PublishFragment) -> None:
        current = self.all[effect.fragment]
        latest = current.step + self._policy.overlap_steps
        present = effect.version == current.version and current.step <= effect.step <= latest
        require(present, "what is published is the present version", (effect, current.version, current.step, latest))
        for item in effect.recipients:
            incarnation = (item.island, item.incarnation)  # a standby may have heard it before it took a place
            alive = self._islands.all[item.island].speaks(item.incarnation) or incarnation in self._islands.taken
            require(alive, "only present incarnations hear of a version", (effect, item))
            record = self._offer_records.get((item.island, item.incarnation, effect.fragment), OfferRecord())
            require(item.merged_offer == record.merged_offer, "an island hears which offer is merged", (effect, record))

    def _waits_for_somebody(self, current: Round) -> None:
        """While the job runs. When it ends, every flush moves the rounds on."""
        over = self._islands.ending or self._islands.finished or self.going_back
        if self._policy.leaving_closes and self._islands.leaving and not over:
            self._waits_for_who_leaves(current)
            return
        if over or len(current.open) < self._quorum or current.inputs:
            return
        present = self._on_time(current)
        if not present:
            return
        require(not self._islands.live <= present, "a round waits for somebody", (current, self._islands.live))
        timed = self._policy.grace_cap_steps is None or self._timers.awaits(GraceTimer(current.fragment))
        require(timed, "a round with its quorum has a deadline", current)

    @property
    def _quorum(self) -> int:
        """How many contributions a round needs while these islands train. When the job ends, the fixed number is enough."""
        part = ceil(self._policy.quorum_ratio * len(self._islands.live) - 1e-9)
        return self._policy.quorum if self._islands.ending else max(self._policy.quorum, part)

    def _waits_for_who_leaves(self, current: Round) -> None:
        """Nobody trains. What those that leave gave is merged, and they are not kept waiting."""
        trains_perhaps = any(status.trains_perhaps for status in self._islands.all.values())
        least = self._policy.quorum if trains_perhaps else 1
        if len(current.open) < least or current.inputs:
            return
        gone = not self._islands.leaving <= current.open.keys()
        require(gone, "a round waits for an island that leaves", (current, self._islands.leaving))
        timed = self._policy.grace_cap_steps is None or self._timers.awaits(GraceTimer(current.fragment))
        require(timed, "a round whose islands leave has a deadline", current)

    def _on_time(self, current: Round) -> Set[IslandId]:
        """Who contributed at or after the first due point past the last merge; everybody, when the job ends."""
        if self._islands.ending:
            return current.open.keys()
        policy, due_step = self._policy, current.step + 1
        period, own = policy.sync_interval_steps, policy.router_interval_steps
        shared_count = policy.fragment_count - (own is not None)
        if own is not None and current.fragment == shared_count:
            period, place = own, 1
        else:
            place = current.fragment * period // shared_count
        while (due_step - place) % period:
            due_step += 1
        return {island for island, c in current.open.items() if c.step >= due_step}

    def offer_record(self, island: IslandId, incarnation: Incarnation, fragment: FragmentId) -> OfferRecord:
        return self._offer_records.setdefault((island, incarnation, fragment), OfferRecord())

    def _record_of(self, c: Contribution) -> OfferRecord:
        return self.offer_record(c.island, c.incarnation, c.fragment)


def _weighted(effect: f.MergeFragment, inputs: Iterable[Contribution]) -> bool:
    quality = {c.island: c.token_count * c.token_count / c.step_count for c in inputs}
    total = fsum(quality.values())
    right = all(isclose(item.weight, quality[item.island] / total, rel_tol=1e-12) for item in effect.inputs)
    return right and isclose(fsum(item.weight for item in effect.inputs), 1.0, rel_tol=1e-12)


def _about(payload: PayloadId, kind: type[f.RefuseContribution], effects: tuple[f.Effect, ...]) -> bool:
    return any(isinstance(x, kind) and x.contribution.payload == payload for x in effects)
