"""Statistics of merges: how often, with whom, how long rounds waited, and why they stopped waiting.

``waited`` is the time from when the round could have closed (quorum, and a contribution on time) to when it did: what
grace was used. A contribution is on time from the fragment's due point on (``core.fragment_round``).

A round's time has three parts, each a histogram: ``collecting`` from its first contribution to when it could have closed,
``grace`` from then to when it did, ``merging`` from then to the new version. How long merges took to be durable is a
histogram of its own, of those of which that is known.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import fsum
from typing import Any

from orchestrator.accounting.series import Epochs, Histogram, policy_after
from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.vocabulary import (
    Duration,
    FragmentId,
    Instant,
    IslandId,
    JobPolicy,
    Version,
    next_due,
)

ROUND_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
JOURNAL_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
COLLECTING, GRACE, MERGING = "collecting", "grace", "merging"


@dataclass(slots=True)
class _Reason:
    count: int = 0
    contributors: int = 0
    waited: Duration = 0.0
    waited_max: Duration = 0.0


@dataclass(slots=True)
class _Round:
    """An open round as seen from outside, of a fragment whose version was made at ``step``."""

    step: int
    islands: set[IslandId] = field(default_factory=set)
    on_time: bool = False
    began_at: Instant | None = None
    closable_at: Instant | None = None


@dataclass(frozen=True, slots=True)
class _Merging:
    """A round that closed and whose merge is under way."""

    islands: tuple[IslandId, ...]
    step: int
    closed_at: Instant
    step_before: int


class Merges:
    """The fold."""

    count: int
    _epochs: Epochs
    contributors: list[Counter[int]]
    refusals: Counter[str]
    islands: Counter[IslandId]
    _policy: JobPolicy
    _rounds: list[_Round]
    _steps: list[int]
    _reasons: dict[str, _Reason]
    _merging: dict[tuple[FragmentId, Version], _Merging]
    _round_seconds: dict[str, Histogram]
    _journal_seconds: Histogram
    _merge_seconds: Duration

    def __init__(self, policy: JobPolicy) -> None:
        self.count = 0
        self._epochs = Epochs()
        self.contributors = [Counter() for _ in range(policy.fragment_count)]
        self.refusals = Counter()
        self.islands = Counter()
        self._policy = policy
        self._rounds = [_Round(0) for _ in range(policy.fragment_count)]
        self._steps = [0] * policy.fragment_count
        self._reasons = {}
        self._merging = {}
        self._round_seconds = {part: Histogram(ROUND_BOUNDS_S) for part in (COLLECTING, GRACE, MERGING)}
        self._journal_seconds = Histogram(JOURNAL_BOUNDS_S)
        self._merge_seconds = 0.0

    def apply(self, event: e.Event, effects: tuple[f.Effect, ...], training_count: int) -> None:
        """Take one step in; ``training_count`` islands train after it."""
        if isinstance(event, e.MergeCompleted):
            self._completed(event)
        elif self._epochs.begins(event):
            self._merging.clear()
            self._rounds = [_Round(step) for step in self._steps]
        elif isinstance(event, e.MergeFailed) and effects:
            self._rounds[event.fragment] = _Round(self._merging.pop((event.fragment, event.version)).step_before)
        if (policy := policy_after(self._policy, event, effects)) is not self._policy:
            self._policy = policy
            for current in self._rounds:
                self._note_closable(current, training_count, event.at)
        for effect in effects:
            if isinstance(effect, f.AdmitContribution):
                c = effect.contribution
                current = self._rounds[c.fragment]
                current.islands.add(c.island)
                current.began_at = event.at if current.began_at is None else current.began_at
                current.on_time = current.on_time or c.step >= self._due_step(c.fragment, current.step)
                self._note_closable(current, training_count, event.at)
            elif isinstance(effect, f.RefuseContribution):
                self.refusals[effect.reason.value] += 1
            elif isinstance(effect, f.MergeFragment):
                self._closed(effect, event.at)

    def summary(self) -> dict[str, Any]:
        by_contributors: Counter[int] = sum(self.contributors, Counter())
        contributors = sum(n * times for n, times in by_contributors.items())
        return {
            "merges": self.count,
            "contributors_mean": contributors / self.count if self.count else 0.0,
            "merges_by_contributors": {str(n): by_contributors[n] for n in sorted(by_contributors)},
            "merges_per_fragment": [sum(counter.values()) for counter in self.contributors],
            "contributors_per_fragment": [{str(n): c[n] for n in sorted(c)} for c in self.contributors],
            "merges_per_island": {island: self.islands[island] for island in sorted(self.islands)},
            "close_reasons": [
                {
                    "reason": reason,
                    "merges": r.count,
                    "contributors_mean": r.contributors / r.count,
                    "waited_mean_s": r.waited / r.count,
                    "waited_max_s": r.waited_max,
                }
                for reason, r in sorted(self._reasons.items(), key=lambda item: (-item[1].count, item[0]))
            ],
            "grace_used_mean_s": fsum(r.waited for r in self._reasons.values()) / max(1, self._closed_count()),
            "merge_seconds_mean": self._merge_seconds / self.count if self.count else 0.0,
            "round_seconds": {part: histogram.summary() for part, histogram in self._round_seconds.items()},
            "journal_seconds": self._journal_seconds.summary(),
            "refusals": {reason: self.refusals[reason] for reason in sorted(self.refusals)},
        }

    def _due_step(self, fragment: FragmentId, step: int) -> int:
        return next_due(fragment, step, self._policy.fragment_count, self._policy.sync_interval_steps)

    def _note_closable(self, current: _Round, training_count: int, at: Instant) -> None:
        has_quorum = len(current.islands) >= self._policy.quorum_of(training_count)
        if current.closable_at is None and current.on_time and has_quorum:
            current.closable_at = at

    def _closed_count(self) -> int:
        return sum(reason.count for reason in self._reasons.values())

    def _closed(self, effect: f.MergeFragment, at: Instant) -> None:
        current = self._rounds[effect.fragment]
        closable_at = at if current.closable_at is None else current.closable_at
        waited = at - closable_at
        self._round_seconds[COLLECTING].observe(closable_at - (at if current.began_at is None else current.began_at))
        self._round_seconds[GRACE].observe(waited)
        self._rounds[effect.fragment] = _Round(effect.step)
        islands = tuple(item.island for item in effect.inputs)
        self._merging[effect.fragment, effect.version] = _Merging(islands, effect.step, at, current.step)
        reason = self._reasons.setdefault(effect.reason.value, _Reason())
        reason.count += 1
        reason.contributors += len(effect.inputs)
        reason.waited += waited
        reason.waited_max = max(reason.waited_max, waited)

    def _completed(self, event: e.MergeCompleted) -> None:
        merging = self._merging.pop((event.fragment, event.version), None)
        if merging is None:
            return
        self.count += 1
        self._steps[event.fragment] = merging.step
        self.contributors[event.fragment][len(merging.islands)] += 1
        self.islands.update(merging.islands)
        self._round_seconds[MERGING].observe(event.at - merging.closed_at)
        self._merge_seconds += event.merge_seconds
        if event.journal_seconds is not None:
            self._journal_seconds.observe(event.journal_seconds)
