"""Statistics of merges: how often, with whom, how long rounds waited, and why they stopped waiting.

``waited`` is the time from when the round could have closed (quorum, and a contribution on time) to when it did: what
grace was used. A contribution is on time from the fragment's due point on (``core.fragment_round``).

A round's time has three parts, each a histogram: ``collecting`` from its first contribution to when it could have closed,
``grace`` from then to when it did, ``merging`` from then to the new version. How long merges took to be durable is a
histogram of its own, of those of which that is known.

``Mixtures`` has what is recorded of mixtures of experts: how far apart contributions had the routers
(``events.MergeCompleted``), and from each island the load of its experts and the loss around adoptions
(``messages.MixtureFigures``).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import fsum
from typing import Any

from orchestrator.accounting.series import Epochs, Histogram, Series, policy_after
from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.messages import Flushed, MixtureFigures, Progress
from orchestrator.core.vocabulary import (
    NO_INCARNATION,
    Duration,
    FragmentId,
    Incarnation,
    Instant,
    IslandId,
    JobPolicy,
    Version,
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
        return self._policy.schedule.next_due(fragment, step)

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


@dataclass(slots=True)
class _Routers:
    """The routers of one fragment: the last merge of several contributions, and sums over all of these."""

    distance: float = 0.0
    travel: float = 0.0
    merges: int = 0
    distance_sum: float = 0.0
    travel_sum: float = 0.0


@dataclass(slots=True)
class _Expert:
    """An island's last figures, as of so many steps of an incarnation, and sums of the losses around its adoptions."""

    latest: MixtureFigures
    reported: tuple[Incarnation, int] = (NO_INCARNATION, 0)
    adoptions: int = 0
    before_sum: float = 0.0
    after_sum: float = 0.0


class Mixtures:
    """The fold. Everything is empty for a model without experts."""

    router_parameter_count: int
    """The size of the routers' own fragment, if they have one."""
    _routers: dict[FragmentId, _Routers]
    _curve: Series[tuple[Instant, float, float]]
    _islands: dict[IslandId, _Expert]

    def __init__(self) -> None:
        self.router_parameter_count = 0
        self._routers = {}
        self._curve = Series()
        self._islands = {}

    def apply(self, event: e.Event) -> None:
        match event:
            case e.OuterStateSeeded():
                self.router_parameter_count = event.router_parameter_count
            case e.MergeCompleted(router_distance=float() as distance, router_travel=float() as travel):
                own = self._routers.setdefault(event.fragment, _Routers())
                own.distance, own.travel, own.merges = distance, travel, own.merges + 1
                own.distance_sum += distance
                own.travel_sum += travel
                self._curve.add((event.at, distance, travel))
            case e.IslandReported(report=Progress(mixture=MixtureFigures() as figures) as report):
                expert = self._islands.setdefault(event.island, _Expert(figures))
                if (event.incarnation, report.steps_total) <= expert.reported:
                    return  # a report that was sent again, or came late
                expert.latest, expert.reported = figures, (event.incarnation, report.steps_total)
                if figures.loss_before is not None and figures.loss_after is not None:
                    expert.adoptions += figures.adoptions
                    expert.before_sum += figures.adoptions * figures.loss_before
                    expert.after_sum += figures.adoptions * figures.loss_after

    def summary(self) -> dict[str, Any]:
        """Return ``mixture`` as plain data, or nothing if nothing was recorded.

        A router's ``distance`` and ``travel`` are of the last merge of several contributions. ``loss_before`` and
        ``loss_after`` are means over all adoptions of the island. ``router_parameter_count`` is there if routers have a
        fragment of their own.
        """
        if not self._routers and not self._islands and not self.router_parameter_count:
            return {}
        routers = [
            {
                "fragment": fragment,
                "merges": own.merges,
                "distance": own.distance,
                "travel": own.travel,
                "distance_mean": own.distance_sum / own.merges,
                "travel_mean": own.travel_sum / own.merges,
            }
            for fragment, own in sorted(self._routers.items())
        ]
        islands = {
            island: {
                "expert_share_max": own.latest.share_max,
                "expert_entropy_ratio": own.latest.entropy_ratio,
                "adoptions": own.adoptions,
                "loss_before": own.before_sum / own.adoptions if own.adoptions else None,
                "loss_after": own.after_sum / own.adoptions if own.adoptions else None,
            }
            for island, own in sorted(self._islands.items())
        }
        curve = [list(point) for point in self._curve.all()]
        own = {"router_parameter_count": self.router_parameter_count} if self.router_parameter_count else {}
        return {"mixture": {**own, "routers": routers, "router_curve": curve, "islands": islands}}


VERSIONS_REMEMBERED = 1024


@dataclass(slots=True)
class MergeTimes:
    """The time that merges take from order to announcement: ``seconds`` has it with the part of writing, where measured.

    ``ordered`` are the merges under way. ``completed_at`` has the latest versions only.
    """

    ordered: dict[tuple[FragmentId, Version], Instant] = field(default_factory=dict)
    completed_at: OrderedDict[tuple[FragmentId, Version], Instant] = field(default_factory=OrderedDict)
    seconds: Series[tuple[Duration, Duration]] = field(default_factory=lambda: Series(512))

    def completed(self, event: e.MergeCompleted) -> None:
        key = event.fragment, event.version
        if (ordered_at := self.ordered.pop(key, None)) is not None:
            self.seconds.add((event.at - ordered_at, event.journal_seconds or 0.0))
        self.completed_at[key] = event.at
        if len(self.completed_at) > VERSIONS_REMEMBERED:
            self.completed_at.popitem(last=False)

    def long(self, limit_s: Duration, now: Instant) -> tuple[Sequence[tuple[Duration, Duration]], Duration]:
        """Return the merges that take ``limit_s`` or more, of those that are kept, and how long all such took together."""
        points = self.seconds.all()
        long = [one for one in points if one[0] >= limit_s > 0.0]
        under_way = [(now - at, 0.0) for at in self.ordered.values() if now - at >= limit_s > 0.0]
        of_all = self.seconds.count / len(points) if points else 1.0
        together = of_all * fsum(took for took, _ in long) + fsum(took for took, _ in under_way)
        return (*long, *under_way), together


@dataclass(slots=True)
class LastWork:
    """The waits of islands at the end of a job are for each other's last steps, for bytes on their way, and for merges.

    ``offered`` is when each island had offered all its work, ``arrived`` when the last contribution of each came after the
    islands were told to offer it.
    """

    is_due: bool = False
    offered: dict[IslandId, Instant] = field(default_factory=dict)
    arrived: dict[IslandId, Instant] = field(default_factory=dict)
    merged_at: Instant = 0.0

    def apply(self, event: e.Event, effects: tuple[f.Effect, ...]) -> None:
        if self.is_due and isinstance(event, e.ContributionArrived):
            self.arrived[event.contribution.island] = event.at
        elif self.is_due and isinstance(event, e.MergeCompleted):
            self.merged_at = event.at
        elif isinstance(event, e.IslandReported) and isinstance(event.report, Flushed):
            self.offered[event.island] = event.at
        self.is_due = self.is_due or any(isinstance(effect, f.FlushIsland) for effect in effects)

    def waits(self) -> tuple[tuple[IslandId, Duration], tuple[IslandId, Duration], Duration]:
        """Return the last island to offer and how long all others waited for it, the same of arrivals, and of merges.

        The waits follow each other. Each is island time: of all islands that had offered everything by then.
        """
        if not self.offered:
            return (IslandId(""), 0.0), (IslandId(""), 0.0), 0.0
        last = max(self.offered, key=lambda island: (self.offered[island], island))
        before = sorted(at for island, at in self.offered.items() if island != last)
        since = self.offered[last]
        slowest = max(self.arrived, key=lambda island: (self.arrived[island], island), default=last)
        usual = max((at for island, at in self.arrived.items() if island != slowest), default=since)
        arrived_at = max(since, self.arrived.get(slowest, since))
        travel = max(0.0, arrived_at - max(since, usual))
        merging = max(0.0, self.merged_at - arrived_at)
        count = len(self.offered)
        return (last, fsum(since - at for at in before)), (slowest, count * travel), count * merging
