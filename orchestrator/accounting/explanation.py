"""The explanation of each merge: who contributed what, who was waited for, who was refused, who was away.

A round towards version v is recorded once it closes, and completed by what follows: the merge's result, and contributions
that came too late for it, which the core refuses only when they arrive. So a ``late`` refusal stands with the merge it
missed, every other refusal with the round that was open.

Responsible for the newest ``keep`` merges, so that a job of any length takes bounded memory. Refuses to know: words for
people, and the numbers of a whole job (``merges``).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from orchestrator.accounting.island_time import ABSENT, Lifecycle
from orchestrator.accounting.series import Epochs, policy_after
from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.vocabulary import (
    CloseReason,
    Contribution,
    Duration,
    FragmentId,
    GraceTimer,
    Incarnation,
    Instant,
    IslandId,
    JobPolicy,
    RefusalReason,
    Version,
)

KEEP = 4096
REFUSALS_LISTED_MAX = 32
"""Of one merge. An island that offers in vain may do so at every due point; ``refusal_count`` counts them all."""


@dataclass(frozen=True, slots=True)
class Contributor:
    """One input of a merge. ``staleness`` is how many versions behind its base was; ``on_time`` false is early."""

    island: IslandId
    incarnation: Incarnation
    step: int
    step_count: int
    token_count: int
    base_version: Version
    staleness: int
    weight: float
    arrived_at: Instant
    on_time: bool


@dataclass(frozen=True, slots=True)
class Refusal:
    """A contribution that did not enter."""

    island: IslandId
    incarnation: Incarnation
    step: int
    token_count: int
    base_version: Version
    reason: RefusalReason
    detail: str
    at: Instant


@dataclass(frozen=True, slots=True)
class Explanation:
    """One merge: fragment ``fragment`` from ``version - 1`` to ``version``.

    opened_at       the first contribution on time, from which quorum is waited for
    quorum_at       the round could have closed: enough contributions, one of them on time
    grace_until     how long it might wait for more; None if it did not wait, or waits for everyone
    absent          islands without a contribution, once they were placed, and their state when the round closed
    merged_at       None while the outer step is being taken, and then ``merge_seconds`` and ``digest`` are missing too
    """

    fragment: FragmentId
    version: Version
    step: int
    quorum: int
    opened_at: Instant
    quorum_at: Instant
    grace_until: Instant | None
    closed_at: Instant
    reason: CloseReason
    detail: str
    contributors: tuple[Contributor, ...]
    absent: tuple[tuple[IslandId, str], ...]
    refusals: tuple[Refusal, ...]
    refusal_count: int
    merged_at: Instant | None = None
    merge_seconds: Duration | None = None
    digest: str | None = None

    def with_refusal(self, refusal: Refusal) -> Explanation:
        refusals = (*self.refusals, refusal)[:REFUSALS_LISTED_MAX]
        return replace(self, refusals=refusals, refusal_count=self.refusal_count + 1)


@dataclass(slots=True)
class _Round:
    """The round that is open in a fragment at ``version``, made at ``step``."""

    version: Version
    step: int
    due_step: int
    offered: dict[IslandId, tuple[Contribution, Instant]] = field(default_factory=dict)
    opened_at: Instant | None = None
    quorum_at: Instant | None = None
    grace_until: Instant | None = None
    refusals: list[Refusal] = field(default_factory=list)
    refusal_count: int = 0


class Explanations:
    """The fold. ``merges`` holds the newest ones by fragment and version, oldest first."""

    def __init__(self, policy: JobPolicy, keep: int = KEEP) -> None:
        self.merges: dict[tuple[FragmentId, Version], Explanation] = {}
        self._policy = policy
        self._keep = keep
        self._epochs = Epochs()
        self._lifecycle = Lifecycle(tuple(plan.island for plan in policy.islands))
        self._rounds = {p: self._next_round(p, Version(0), 0) for p in map(FragmentId, range(policy.fragment_count))}
        self._closing: dict[FragmentId, _Round] = {}

    def version(self, fragment: FragmentId) -> Version | None:
        """Return the fragment's version, counting a merge under way; None if there is no such fragment."""
        current = self._rounds.get(fragment)
        return current.version if current else None

    def apply(self, event: e.Event, effects: tuple[f.Effect, ...]) -> None:
        if isinstance(event, e.MergeCompleted):
            self._completed(event)
        elif self._epochs.begins(event):
            self._begin_rounds_anew()
        elif isinstance(event, e.MergeFailed) and effects:
            self._failed(event)
        self._lifecycle.apply(event, effects)
        if (policy := policy_after(self._policy, event, effects)) is not self._policy:
            self._policy = policy
            for fragment, current in self._rounds.items():
                current.due_step = self._due_step(fragment, current.step)
                if current.quorum_at is None and current.opened_at is not None and self._has_quorum(current):
                    current.quorum_at = event.at
        for effect in effects:
            match effect:
                case f.AdmitContribution():
                    self._admitted(effect.contribution, event.at)
                case f.RefuseContribution():
                    self._refused(effect, event.at)
                case f.SetTimer(timer=GraceTimer(fragment)) if fragment in self._rounds:
                    self._rounds[fragment].grace_until = effect.due_at
                case f.MergeFragment():
                    self._closed(effect, event.at)

    def _begin_rounds_anew(self) -> None:
        """Offers are lost with the synchroniser's process, and so is a merge that was under way."""
        for fragment, current in self._rounds.items():
            version, merging = current.version, self.merges.get((fragment, current.version))
            if merging is not None and merging.merged_at is None:
                del self.merges[fragment, version]
                version = Version(version - 1)
            before = self.merges.get((fragment, version))
            self._rounds[fragment] = self._next_round(fragment, version, before.step if before else 0)

    def _next_round(self, fragment: FragmentId, version: Version, step: int) -> _Round:
        return _Round(version, step, self._due_step(fragment, step))

    def _due_step(self, fragment: FragmentId, step: int) -> int:
        return self._policy.schedule.next_due(fragment, step)

    def _admitted(self, c: Contribution, at: Instant) -> None:
        current = self._rounds[c.fragment]
        current.offered[c.island] = (c, at)
        if current.opened_at is None and c.step >= current.due_step:
            current.opened_at = at
        if current.quorum_at is None and current.opened_at is not None and self._has_quorum(current):
            current.quorum_at = at

    def _has_quorum(self, current: _Round) -> bool:
        return len(current.offered) >= self._quorum

    @property
    def _quorum(self) -> int:
        return self._policy.quorum_of(self._lifecycle.training_count)

    def _refused(self, effect: f.RefuseContribution, at: Instant) -> None:
        c = effect.contribution
        refusal = Refusal(
            c.island, c.incarnation, c.step, c.token_count, c.base_version, effect.reason, effect.detail, at
        )
        current = self._rounds.get(c.fragment)
        if current is None:
            return
        if effect.reason is RefusalReason.LATE:
            missed = (c.fragment, current.version)
            if missed in self.merges:
                self.merges[missed] = self.merges[missed].with_refusal(refusal)
            return
        current.refusal_count += 1
        if len(current.refusals) < REFUSALS_LISTED_MAX:
            current.refusals.append(refusal)

    def _closed(self, effect: f.MergeFragment, at: Instant) -> None:
        current = self._rounds[effect.fragment]
        quorum_at = at if current.quorum_at is None else current.quorum_at
        states = {island: life.state for island, life in self._lifecycle.lives.items()}
        inputs = {item.island for item in effect.inputs}
        self.merges[effect.fragment, effect.version] = Explanation(
            fragment=effect.fragment,
            version=effect.version,
            step=effect.step,
            quorum=self._policy.quorum if effect.reason is CloseReason.FINAL_FLUSH else self._quorum,
            opened_at=quorum_at if current.opened_at is None else current.opened_at,
            quorum_at=quorum_at,
            grace_until=current.grace_until,
            closed_at=at,
            reason=effect.reason,
            detail=effect.detail,
            contributors=tuple(_contributor(current, item.island, item.weight) for item in effect.inputs),
            absent=tuple((i, state) for i, state in states.items() if i not in inputs and state != ABSENT),
            refusals=tuple(current.refusals),
            refusal_count=current.refusal_count,
        )
        self._closing[effect.fragment] = current
        self._rounds[effect.fragment] = self._next_round(effect.fragment, effect.version, effect.step)
        if len(self.merges) > self._keep:
            del self.merges[next(iter(self.merges))]

    def _completed(self, event: e.MergeCompleted) -> None:
        merged = self.merges.get((event.fragment, event.version))
        if merged is not None and merged.merged_at is None:
            self.merges[event.fragment, event.version] = replace(
                merged, merged_at=event.at, merge_seconds=event.merge_seconds, digest=event.digest
            )

    def _failed(self, event: e.MergeFailed) -> None:
        """There is no such merge, and its round is open again."""
        self.merges.pop((event.fragment, event.version), None)
        closed = self._closing[event.fragment]
        self._rounds[event.fragment] = _Round(closed.version, closed.step, self._due_step(event.fragment, closed.step))


def _contributor(current: _Round, island: IslandId, weight: float) -> Contributor:
    c, arrived_at = current.offered[island]
    return Contributor(
        island=c.island,
        incarnation=c.incarnation,
        step=c.step,
        step_count=c.step_count,
        token_count=c.token_count,
        base_version=c.base_version,
        staleness=current.version - c.base_version,
        weight=weight,
        arrived_at=arrived_at,
        on_time=c.step >= current.due_step,
    )
