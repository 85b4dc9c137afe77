"""The diagnosis of a job: the one cause that cost most island time, or ended the job, with the records that show it.

Island time comes from ``goodput``: each second of badput has a class and an island. The fold here puts it to causes.

Failures        belong to a node if it fails islands that live elsewhere; to the job's code if several islands die of the
                same error; else to what ended the incarnations: a full disk, unusable work, a hung step, a crash loop, a
                lost connection. Failures without any of this have no culprit.
Late work       belongs to a thin line if the island's contributions, or the versions for it, travel much longer than those
                of others; and to slow merges if merges take more than half of H for a good part of the time.
Unmerged work   of a running job is no badput. It is counted where it is much more than that of the others.
Slow steps      are no badput either. A straggler costs the time in which it trained less than its accelerators could. The
                mean of its steps counts, because an island that is slow in bursts has a usual median.

An island stands out if its figure is at least ``Z_MIN`` spreads above the median of the others. The spread is the median
absolute deviation, scaled to a standard deviation, and at least a tenth of the median, so that two islands suffice.

What a failure is, and which node is bad, is defined in ``failures``: the service cordons nodes by the same rule.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum
from typing import Any

from orchestrator.accounting.failures import (
    Cause,
    Culprits,
    Failures,
    Finding,
    Origin,
    culprit,
    evidence,
    failure_counts,
    shared_error,
)
from orchestrator.accounting.goodput import Goodput
from orchestrator.accounting.island_time import (
    AWAY,
    DRAINING,
    ENDING,
    EVALUATING,
    HELD,
    NO_NODE,
    NOT_STEPPING,
    SILENT,
    Change,
)
from orchestrator.accounting.ledger import (
    LOST_WITH_ISLAND,
    NOT_TAKEN_UP,
    OVERWRITTEN,
    QUARANTINED,
    ROLLED_BACK,
    SUPERSEDED,
    UNFINISHED,
    refused,
)
from orchestrator.accounting.merges import MergeTimes
from orchestrator.accounting.series import Series, distances, median
from orchestrator.accounting.statistics import Pulls
from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.faults import Kind as FaultKind
from orchestrator.core.messages import Adopted, Overdue, Progress, Saved
from orchestrator.core.saving import FragmentRestored, JobSalvaged
from orchestrator.core.vocabulary import (
    NO_INCARNATION,
    Duration,
    Incarnation,
    Instant,
    IslandId,
    IslandState,
    JobOutcome,
    JobPolicy,
    RefusalReason,
)
from orchestrator.system.plain import counted, percent, seconds, some_of

SHARE_MIN = 0.02
"""A cause below this share of all island time is no reason to act."""
Z_MIN, RATIO_MIN = 3.0, 1.25
WAITING_SPREAD_MIN = 0.1
PULL_SPREAD_MIN_S, DELIVERY_SPREAD_MIN_S = 0.5, 0.1
"""The least spreads of the times that payloads travel. Progress, from which a pull is measured, is reported twice a second;
adoptions wait for the end of a step, so their spread is also at least the longest step."""
LONG_MERGE_RATIO = 0.5
"""A merge is long if it takes this part of the time in which an island trains H steps."""
UNMERGED_INTERVALS_MIN = 3.0
"""Unmerged work of an island is remarkable from so many H on: each fragment is offered once in H."""
STALL_MIN_S, STALL_INTERVALS = 30.0, 10.0
RECORDS_SHOWN = 5
Figures = Mapping[str, Any]
"""Figures of ``Goodput.summary``, of the job or of an island in it."""

_LATE_REASONS = RefusalReason.LATE, RefusalReason.STALE_BASE, RefusalReason.ALREADY_MERGED
_LATE = frozenset({SUPERSEDED, *map(refused, _LATE_REASONS)})
_NOT_IN_TIME = _LATE | {OVERWRITTEN, UNFINISHED}
_OF_THE_END = frozenset({ENDING, DRAINING, UNFINISHED})
_UNUSABLE_REASONS = RefusalReason.CORRUPT, RefusalReason.WRONG_SHAPE, RefusalReason.NON_FINITE, RefusalReason.EXPLODING
_UNUSABLE = frozenset({QUARANTINED, *map(refused, _UNUSABLE_REASONS)})
_PLAIN_CAUSES = {
    OVERWRITTEN: Cause.OVERWRITTEN,
    NO_NODE: Cause.NO_NODE,
    HELD: Cause.CORDONED,
    EVALUATING: Cause.EVALUATION,
    ENDING: Cause.ENDING,
    DRAINING: Cause.ENDING,
    UNFINISHED: Cause.ENDING,
    ROLLED_BACK: Cause.UNDONE,
    NOT_TAKEN_UP: Cause.UNDONE,
}


@dataclass(frozen=True, slots=True)
class IslandFigures:
    """The figures of an island beside the others'.

    ``step_s`` is the mean time of a step. ``pull_s`` is the median time that a contribution travels, and ``delivery_s`` that
    from a merge to its adoption, less a step. ``waiting_ratio`` is the part of the time in training in which the island did
    not step. Each has its distance ``z`` from the others in spreads.
    """

    island: IslandId
    node: str
    step_s: Duration | None
    step_z: float | None
    pull_s: Duration | None
    pull_z: float | None
    delivery_s: Duration | None
    delivery_z: float | None
    waiting_ratio: float
    waiting_z: float | None
    failure_count: int

    @property
    def line_z(self) -> float | None:
        """Return how far the slower way of its line is from the others'."""
        return max((z for z in (self.pull_z, self.delivery_z) if z is not None), default=None)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """``cause`` is None where nothing costs ``SHARE_MIN`` of the time; ``others`` are further causes, largest first."""

    outcome: str | None
    reason: str
    goodput_ratio: float
    cause: Finding | None
    others: tuple[Finding, ...]
    islands: tuple[IslandFigures, ...]
    node_failures: Mapping[str, float]


@dataclass(slots=True)
class _Island:
    """The facts about one island. ``reached`` are its latest (step, instant) by its reports.

    ``offer_count`` is of all its contributions, ``pulls`` how long those with bytes took. ``step_count`` is of all
    incarnations, ``counted`` the latest of them with its own count. ``held_s`` is how long its loop waited for checkpoints,
    and ``gaps_s`` how long it waited between steps at most, by the longest gap of each report.
    """

    offer_count: int = 0
    step_count: int = 0
    counted: tuple[Incarnation, int] = (NO_INCARNATION, 0)
    held_s: Duration = 0.0
    gaps_s: Duration = 0.0
    silent_since: Instant | None = None
    pulls: Series[Duration] = field(default_factory=lambda: Series(256))
    deliveries: Series[Duration] = field(default_factory=lambda: Series(256))
    reached: deque[tuple[int, Instant]] = field(default_factory=lambda: deque(maxlen=512))
    overdue: deque[int] = field(default_factory=lambda: deque(maxlen=RECORDS_SHOWN))
    late: deque[int] = field(default_factory=lambda: deque(maxlen=RECORDS_SHOWN))
    unusable: deque[int] = field(default_factory=lambda: deque(maxlen=RECORDS_SHOWN))
    stops: deque[int] = field(default_factory=lambda: deque(maxlen=RECORDS_SHOWN))
    """Records of faults that stopped its process, and of reports that it stood still while it was silent."""
    states: dict[str, deque[int]] = field(default_factory=dict)
    """The latest records with which it entered each state."""
    progress: int = 0
    """The record of its latest report of progress, and below that of its first start."""
    first_start: int = 0


@dataclass(frozen=True, slots=True)
class _Look:
    """The facts that one diagnosis is made from. ``total`` is all island time, ``interval_s`` how long H steps usually take.

    ``long_merges`` is empty unless they took a good part of the time.
    """

    summary: Figures
    figures: Mapping[IslandId, IslandFigures]
    culprits: Culprits
    total: Duration
    span_s: Duration
    interval_s: Duration
    long_merges: Sequence[tuple[Duration, Duration]]

    def beside(self, island: str, figure: str) -> tuple[str, str]:
        """Return this figure of an island and the median of the others', in words."""
        own = getattr(self.figures[IslandId(island)], figure)
        values = (getattr(one, figure) for one in self.figures.values() if one.island != island)
        in_words = percent if figure.endswith("_ratio") else seconds
        return in_words(own), in_words(median([value for value in values if value is not None]))


class Diagnostician:
    """The fold. ``apply`` every record in order, then ask for a ``diagnosis``."""

    def __init__(self, policy: JobPolicy) -> None:
        self._policy = policy
        self._groups = {plan.island: str(plan.node_group) for plan in policy.islands}
        self._goodput = Goodput(policy)
        self._failures = Failures(plan.island for plan in policy.islands)
        self._islands = {plan.island: _Island() for plan in policy.islands}
        self._merged_at: Instant | None = None
        self._intervals: Series[Duration] = Series(256)
        self._merges, self._pulls = MergeTimes(), Pulls()
        self._short_s: Duration = 0.0
        """How long fewer islands trained than the quorum, after the first merge and before the islands' last work."""
        self._flushing, self._last_record = False, 0
        self._end: tuple[int, str, str] | None = None

    def apply(self, number: int, event: e.Event, effects: tuple[f.Effect, ...]) -> None:
        if self._end is not None:
            return
        self._last_record = number
        if self._merged_at is not None and not self._flushing and self._lacks_quorum():
            self._short_s += event.at - self._goodput.at
        self._hear(number, event)
        for effect in effects:
            if isinstance(effect, f.RefuseContribution) and effect.contribution.island in self._islands:
                self._refused(number, effect)
            elif isinstance(effect, f.MergeFragment):
                self._merges.ordered[effect.fragment, effect.version] = event.at
            elif isinstance(effect, f.FlushIsland):
                self._flushing = True
            elif isinstance(effect, f.FinishJob):
                self._end = (number, effect.outcome.value, effect.reason)
        for change in self._failures.apply(number, event, effects):
            self._changed(number, change)
        self._goodput.apply(event, effects)

    # ── taking in ─────────────────────────────────────────────────────────────────────────────────────────────

    def _hear(self, number: int, event: e.Event) -> None:
        if isinstance(event, e.MergeCompleted):
            if self._merged_at is not None:
                self._intervals.add(event.at - self._merged_at)
            self._merged_at = event.at
            self._merges.completed(event)
        elif isinstance(event, e.MergeFailed):
            self._merges.ordered.pop((event.fragment, event.version), None)
        elif isinstance(event, (e.SynchroniserRestarted, FragmentRestored)):
            self._merges.ordered.clear()  # merges under way are lost with the process, or given up
        elif isinstance(event, JobSalvaged):
            for one in event.islands:
                self._islands[one.island].counted = one.incarnation, one.steps_total
        elif isinstance(event, (e.ContributionArrived, e.ContributionUnusable)):
            own = self._islands.get(event.contribution.island)
            if own is not None:
                own.offer_count += 1
                if self._pulls.had_bytes(event):
                    when = next((at for step, at in own.reached if step >= event.contribution.step), event.at)
                    own.pulls.add(max(0.0, event.at - when))
        elif isinstance(event, (e.IslandReported, e.FaultInjected, e.ConnectionLost)):
            if (own := self._islands.get(event.island)) is None:
                return
            if isinstance(event, e.IslandReported):
                self._reported(number, event, own)
            elif isinstance(event, e.ConnectionLost):
                own.silent_since = None if event.dead else event.at
            elif event.kind == FaultKind.STOP.value:
                own.stops.append(number)

    def _reported(self, number: int, event: e.IslandReported, own: _Island) -> None:
        match event.report:
            case Progress() as report:
                own.reached.append((report.step, event.at))
                own.progress = number
                incarnation, steps = own.counted
                more = max(0, report.steps_total - (steps if incarnation == event.incarnation else 0))
                own.step_count += more
                own.gaps_s += more * max(0.0, report.gap_max_seconds - report.step_seconds_median)
                own.counted = event.incarnation, report.steps_total
                if own.silent_since is not None and report.gap_max_seconds > (event.at - own.silent_since) / 2.0:
                    own.stops.append(number)  # a process that was only cut off would have stepped on
                own.silent_since = None
            case Adopted() as report:
                if (merged_at := self._merges.completed_at.get((report.fragment, report.version))) is not None:
                    own.deliveries.add(event.at - merged_at)
            case Saved() as report:
                own.held_s += report.held_seconds
            case Overdue():
                own.overdue.append(number)

    def _refused(self, number: int, effect: f.RefuseContribution) -> None:
        own = self._islands[effect.contribution.island]
        if effect.reason in _LATE_REASONS:
            own.late.append(number)
        elif effect.reason in _UNUSABLE_REASONS:
            own.unusable.append(number)

    def _changed(self, number: int, change: Change) -> None:
        own = self._islands[change.island]
        own.states.setdefault(change.after, deque(maxlen=RECORDS_SHOWN)).append(number)
        if change.after == IslandState.STARTING.value and not own.first_start:
            own.first_start = number
        if change.after == IslandState.PLACING.value:
            own.reached.clear()

    # ── judging ───────────────────────────────────────────────────────────────────────────────────────────────

    def diagnosis(self) -> Diagnosis:
        """Return the diagnosis as of the last record."""
        look = self._look()
        costs = self._costs(look)
        findings = [self._finding(look, *name, spent) for name, spent in costs.items() if spent > 0.0]
        findings.sort(key=lambda one: (-one.island_seconds, one.cause.name, one.subject))
        ending = self._ending(findings, look)
        leading = ending or (findings[0] if findings and findings[0].share >= SHARE_MIN else None)
        return Diagnosis(
            outcome=self._end[1] if self._end else None,
            reason=self._end[2] if self._end else "",
            goodput_ratio=look.summary["goodput_ratio"],
            cause=leading,
            others=tuple(one for one in findings if leading is None or _name(one) != _name(leading)),
            islands=tuple(look.figures.values()),
            node_failures=failure_counts(self._failures.all, self._goodput.at),
        )

    def _look(self) -> _Look:
        summary = self._goodput.summary()
        figures = {one.island: one for one in self._figures(summary)}
        steps = [one.step_s for one in figures.values() if one.step_s]
        interval_s = self._goodput.policy.sync_interval_steps * median(steps) if steps else 0.0
        long_merges, busy_s = self._merges.long(LONG_MERGE_RATIO * interval_s, self._goodput.at)
        span_s = self._goodput.at - self._goodput.started_at
        return _Look(
            summary,
            figures,
            culprits={
                i: culprit(self._failures, i, self._groups[i], self._goodput.at, stood_still=bool(own.stops))
                for i, own in self._islands.items()
            },
            total=summary["island_seconds"]["total"],
            span_s=span_s,
            interval_s=interval_s,
            long_merges=long_merges if busy_s >= SHARE_MIN * self._policy.fragment_count * span_s else (),
        )

    def _figures(self, summary: Figures) -> tuple[IslandFigures, ...]:
        placed = {i: self._islands[i] for i, nodes in self._failures.nodes().items() if nodes}
        steps = {i: _stepping(summary["islands"][i]) / own.step_count for i, own in placed.items() if own.step_count}
        pulls = {i: median(own.pulls.all()) for i, own in placed.items() if own.pulls.count}
        deliveries = {
            i: max(0.0, median(own.deliveries.all()) - steps.get(i, 0.0))
            for i, own in placed.items()
            if own.deliveries.count
        }
        waits = {i: _waiting_ratio(summary["islands"][i]) for i in placed}
        step_z, waiting_z = distances(steps), distances(waits, WAITING_SPREAD_MIN)
        pull_z = distances(pulls, PULL_SPREAD_MIN_S)
        delivery_z = distances(deliveries, max(DELIVERY_SPREAD_MIN_S, *steps.values(), 0.0))
        failures = Counter(one.island for one in self._failures.all)
        return tuple(
            IslandFigures(
                *(i, self._failures.node_of(i), steps.get(i), step_z.get(i), pulls.get(i), pull_z.get(i)),
                *(deliveries.get(i), delivery_z.get(i), waits[i], waiting_z.get(i), failures[i]),
            )
            for i in placed
        )

    def _costs(self, look: _Look) -> dict[tuple[Cause, str], Duration]:
        costs: dict[tuple[Cause, str], list[Duration]] = {}
        thin = [one for one in look.figures.values() if _stands_out(one.line_z)]
        thinnest = max(thin, key=lambda one: one.line_z or 0.0, default=None)
        unmerged = self._unmerged(look)
        for island, own in look.summary["islands"].items():
            for label, spent in own["badput_seconds"].items():
                key = self._key(island, label, look)
                if label in _OF_THE_END and self._short_s >= SHARE_MIN * look.span_s:
                    key = Cause.NO_QUORUM, ""
                elif label == UNFINISHED and island in unmerged:
                    key = unmerged[island][0]
                elif label in _OF_THE_END and thinnest is not None:  # islands wait for the work that travels longest
                    key = Cause.THIN_LINE, thinnest.island
                elif look.long_merges and (label in _OF_THE_END or key[0] is Cause.LATE_WORK):
                    key = Cause.SLOW_MERGES, ""
                elif label == NOT_STEPPING and key[0] is not Cause.HUNG_STEP:
                    held = min(spent, self._islands[island].held_s)
                    costs.setdefault((Cause.CHECKPOINTS, ""), []).append(held)
                    spent -= held
                costs.setdefault(key, []).append(spent)
        for island, spent in self._lost_to_slowness(look).items():
            costs.setdefault((Cause.STRAGGLER, island), []).append(spent)
        for key, spent in unmerged.values():
            costs.setdefault(key, []).append(spent)
        return {key: fsum(spent) for key, spent in costs.items()}

    def _unmerged(self, look: _Look) -> dict[IslandId, tuple[tuple[Cause, str], Duration]]:
        """Return why much of the work of these islands is in no merge, and for how long more of it is open than usual.

        If merges are slow, that is why. Else an island must have more of it than the others, and a slow line, or half as
        many contributions that arrived.
        """
        islands = {i: own for i, own in look.summary["islands"].items() if i in look.figures and _stepping(own) > 0.0}
        opened = {i: own["seconds"]["in_flight"] for i, own in islands.items()}
        unmerged = {i: opened[i] + own["badput_seconds"].get(UNFINISHED, 0.0) for i, own in islands.items()}
        much = {i for i, spent in unmerged.items() if spent > UNMERGED_INTERVALS_MIN * look.interval_s > 0.0}
        if look.long_merges:
            return {i: ((Cause.SLOW_MERGES, ""), max(0.0, opened[i] - look.interval_s)) for i in much}
        usual, arrivals = median([0.0, *opened.values()]), {i: self._islands[i].offer_count for i in islands}
        result = {}
        for island, z in distances(unmerged, look.interval_s).items():
            few = 2 * arrivals[island] < median([arrivals[other] for other in islands if other != island])
            thin = _stands_out(look.figures[island].line_z)
            if _stands_out(z) and island in much and (few or thin):
                key = Cause.THIN_LINE if thin else Cause.NOT_ARRIVING, island
                result[island] = key, max(0.0, opened[island] - usual)
        return result

    def _key(self, island: IslandId, label: str, look: _Look) -> tuple[Cause, str]:
        own, seen = look.figures.get(island), self._islands[island]
        if label in _UNUSABLE:
            return Cause.UNUSABLE_WORK, island
        if label.startswith("recovering: ") or label in (AWAY, LOST_WITH_ISLAND):
            without = Cause.ENDING if label == LOST_WITH_ISLAND else Cause.DEPARTURES
            return look.culprits[island] or (without, "")
        if label.startswith("starting: "):
            return Cause.STARTING, ""
        if label in _NOT_IN_TIME and own is not None and _stands_out(own.line_z):
            return Cause.THIN_LINE, island
        if label == SILENT:
            return Cause.HUNG_STEP if seen.stops else Cause.LINK, island
        if label == NOT_STEPPING:
            if seen.overdue or seen.stops:
                return Cause.HUNG_STEP, island
            if own is None or not _stands_out(own.waiting_z):
                return Cause.WAITING, ""
            waited_s = look.summary["islands"][island]["badput_seconds"][NOT_STEPPING]
            return (Cause.HELD_UP if waited_s < 2.0 * seen.gaps_s else Cause.THIN_LINE), island  # its reports come late
        late = label in _LATE or label.startswith("refused: ")
        cause = Cause.LATE_WORK if late else _PLAIN_CAUSES.get(label, Cause.OTHER)
        return cause, self._groups[island] if cause in (Cause.NO_NODE, Cause.CORDONED) else ""

    def _lost_to_slowness(self, look: _Look) -> dict[IslandId, float]:
        """Return what each straggler's stepping lacks of the others' tokens a second and accelerator, in seconds."""
        accelerators = {plan.island: plan.accelerator_count for plan in self._policy.islands}
        stepping = {i: spent for i, own in look.summary["islands"].items() if (spent := _stepping(own)) > 0.0}
        trained = {i: own["tokens"]["trained"] for i, own in look.summary["islands"].items()}
        rates = {i: trained[i] / (spent * accelerators[i]) for i, spent in stepping.items()}
        lost = {}
        for island, own in look.figures.items():
            others = [rate for other, rate in rates.items() if other != island]
            if not others or island not in rates or not _stands_out(own.step_z):
                continue
            usual = median(others)
            if rates[island] * RATIO_MIN < usual:
                lost[island] = stepping[island] * (1.0 - rates[island] / usual)
        return lost

    def _ending(self, findings: Iterable[Finding], look: _Look) -> Finding | None:
        """Return the cause of a job that failed, or that merges no more."""
        if self._end is not None:
            record, outcome, reason = self._end
            if outcome != JobOutcome.FAILED.value:
                return None
            cause, subject, records = self._killer(reason, look.culprits)
            records = (*(n for n in records if n != record), record)[-RECORDS_SHOWN:]
            return Finding(cause, subject, look.total, 1.0, f"the job failed: {reason}", cause.remedy, records)
        if self._merged_at is None or not self._intervals.count:
            return None
        since = self._goodput.at - self._merged_at
        if since < max(STALL_MIN_S, STALL_INTERVALS * median(self._intervals.all())):
            return None
        training = self._failures.lifecycle.training_count
        quorum = self._policy.quorum_of(training)
        if training < quorum:
            placed = (island for island, nodes in self._failures.nodes().items() if nodes)
            away = [i for i in placed if self._state(i) != IslandState.TRAINING.value]
            text = f"no merge for {seconds(since)}: {training} of {quorum} islands train, without {some_of(away, 8)}"
            records = tuple(sorted(own.states[self._state(i)][-1] for i, own in self._islands.items() if i in away))
            cause = Cause.NO_QUORUM
        elif any(ordered_at <= self._merged_at for ordered_at in self._merges.ordered.values()):
            text = f"no merge for {seconds(since)}: {counted(len(self._merges.ordered), 'merge')} ordered and not done"
            cause, records = Cause.SLOW_MERGES, (self._last_record,)
        else:
            text = f"no merge for {seconds(since)}, though {training} islands train and the quorum is {quorum}"
            cause, records = Cause.STALL, (self._last_record,)
        worst = max(findings, key=lambda one: one.island_seconds, default=None)
        spent = worst.island_seconds if worst is not None else 0.0
        if cause is Cause.NO_QUORUM and worst is not None and worst.island_seconds > 0.0:
            text = f"{text}; most time is lost by {worst.cause}{f': {worst.subject}' if worst.subject else ''}"
        return Finding(
            cause, "", spent, spent / look.total if look.total else 0.0, text, cause.remedy, records[-RECORDS_SHOWN:]
        )

    def _lacks_quorum(self) -> bool:
        return (training := self._failures.lifecycle.training_count) < self._goodput.policy.quorum_of(training)

    def _state(self, island: IslandId) -> str:
        return self._failures.lifecycle.lives[island].state

    def _killer(self, reason: str, culprits: Culprits) -> tuple[Cause, str, tuple[int, ...]]:
        if "nothing was ever merged" in reason:
            return Cause.NO_QUORUM, "", ()
        of_code = tuple(one.record for one in self._failures.all if one.origin is Origin.CODE)
        if of_code and (shared_error(self._failures) is not None or self._failures.all[-1].origin is Origin.CODE):
            return Cause.CODE, "", of_code
        blamed = Counter(culprit for one in self._failures.all if (culprit := culprits[one.island]))
        if not blamed:
            return Cause.OTHER, "", ()
        (cause, subject), _ = blamed.most_common(1)[0]
        return cause, subject, tuple(one.record for one in self._failures.all)

    def _finding(self, look: _Look, cause: Cause, subject: str, spent: Duration) -> Finding:
        statement, records = self._evidence(look, cause, subject)
        share = spent / look.total if look.total else 0.0
        text = f"{statement}: {seconds(spent)} of island time, {percent(share)} of all"
        return Finding(cause, subject, spent, share, text, cause.remedy, tuple(sorted(set(records)))[-RECORDS_SHOWN:])

    def _evidence(self, look: _Look, cause: Cause, subject: str) -> tuple[str, tuple[int, ...]]:
        """Return a statement with the figures that show the cause, and the numbers of the records."""
        own = self._islands.get(IslandId(subject))
        blamed = [one for one in self._failures.all if look.culprits[one.island] == (cause, subject)]
        if cause is Cause.BAD_NODE:
            blamed = [one for one in blamed if one.node == subject]
        records = tuple(one.record for one in blamed)
        if blamed and (words := evidence(self._failures, blamed, cause, subject)):
            return words, records
        match cause:
            case Cause.NO_NODE | Cause.CORDONED:
                state = IslandState.WAITING.value if cause is Cause.NO_NODE else IslandState.CORDONED.value
                return f"islands wait because of node group {subject}", (*self._entered(state), *records)
            case Cause.LINK if own is not None:
                return f"{subject} was silent", (*own.states.get(IslandState.SUSPECT.value, ()), *records)
            case Cause.NO_QUORUM:
                return f"fewer islands trained than the quorum for {seconds(self._short_s)}", ()
            case Cause.SLOW_MERGES if look.long_merges:
                took, written = (median(values) for values in zip(*look.long_merges, strict=True))
                of_journal = f", {seconds(written)} of it in the journal" if written else ""
                return f"merges take {seconds(took)}{of_journal}, where {seconds(look.interval_s)} are H steps", ()
            case Cause.NOT_ARRIVING if own is not None:
                others = median([x.offer_count for i, x in self._islands.items() if i != subject])
                return f"{own.offer_count} contributions of {subject} arrived, of others {others:g}", (own.progress,)
            case Cause.STRAGGLER if own is not None:
                mean, usual = look.beside(subject, "step_s")
                return f"{subject} takes {mean} a step where the others take {usual}", (own.progress,)
            case Cause.THIN_LINE if own is not None:
                figures = look.figures[IslandId(subject)]
                if _stands_out(figures.pull_z):
                    median_s, usual = look.beside(subject, "pull_s")
                    return f"contributions of {subject} travel {median_s}, those of others {usual}", tuple(own.late)
                if _stands_out(figures.delivery_z):
                    median_s, usual = look.beside(subject, "delivery_s")
                    return f"versions reach {subject} after {median_s}, others after {usual}", tuple(own.late)
                return f"reports of {subject} come late", (own.progress,)
            case Cause.HUNG_STEP if own is not None:
                return f"{subject} did not step for long at a time", (*own.overdue, *own.stops, *records)
            case Cause.HELD_UP if own is not None:
                part, usual = look.beside(subject, "waiting_ratio")
                return f"{subject} does not step in {part} of its time, the others in {usual}", ()
            case Cause.UNUSABLE_WORK if own is not None:
                return f"contributions of {subject} were refused as unusable", (*own.unusable, *records)
            case Cause.LATE_WORK:
                return "work came too late to be merged", tuple(n for x in self._islands.values() for n in x.late)
            case Cause.STARTING:
                first = tuple(own.first_start for own in self._islands.values() if own.first_start)
                parts = Counter[str]()
                for label, took in look.summary["badput_seconds"].items():
                    if label.startswith("starting: "):
                        parts[label.removeprefix("starting: ")] += took
                return f"islands were started for the first time, which was mostly {parts.most_common(1)[0][0]}", first
            case _:
                return cause.value, ()

    def _entered(self, state: str) -> tuple[int, ...]:
        return tuple(n for own in self._islands.values() for n in own.states.get(state, ()))


def _name(finding: Finding) -> tuple[Cause, str]:
    return finding.cause, finding.subject


def _stands_out(z: float | None) -> bool:
    return z is not None and z >= Z_MIN


def _stepping(own: Figures) -> Duration:
    return fsum(own["seconds"][name] for name in ("productive", "discarded", "in_flight"))


def _waiting_ratio(own: Figures) -> float:
    idle = own["badput_seconds"].get(NOT_STEPPING, 0.0)
    whole = idle + _stepping(own)
    return idle / whole if whole > 0.0 else 0.0
