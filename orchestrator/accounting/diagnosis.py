"""The diagnosis of a job: the one cause that cost most island time, or ended the job, with the records that show it.

Island time comes from ``goodput``: each second of badput has a class and an island. The fold here asks who is to blame for
it. Failures of an island belong to a node if the node fails islands that live elsewhere, to the job's own code if islands
on several nodes die of the same error, to the island if it dies again and again without contributing, and to nobody in
particular otherwise. Work that came too late belongs to a thin line if that island's contributions travel much longer than
the others'. A straggler has no badput: what it costs is the time in which it trained less than its accelerators could.

An island stands out if its figure is at least ``Z_MIN`` spreads above the median of the others. The spread is the median
absolute deviation, scaled to a standard deviation, and at least a tenth of the median, so that two islands suffice.

What a failure is, and which node is bad, is defined in ``failures``: the service cordons nodes by the same rule.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import fsum
from typing import Any

from orchestrator.accounting.failures import Failures, bad_nodes, failure_counts
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
from orchestrator.accounting.series import Series, median
from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.faults import Kind as FaultKind
from orchestrator.core.messages import Overdue, Progress
from orchestrator.core.vocabulary import (
    Duration,
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
Z_MIN, RATIO_MIN, SPREAD_MIN = 3.0, 1.25, 0.1
PULL_SPREAD_MIN_S = 0.5
"""The least spread of the time that contributions travel: reports, from which it is measured, come about twice a second."""
LOOP_LENGTH = 3
"""So many incarnations in a row that failed without a contribution are a crash loop."""
STALL_MIN_S, STALL_INTERVALS = 30.0, 10.0
RECORDS_SHOWN = 5


Figures = Mapping[str, Any]
"""Figures of ``Goodput.summary``, of the job or of an island in it."""


class Cause(StrEnum):
    """A cause of slowness or death. The value is its name for people; ``remedy`` says what to do."""

    remedy: str

    def __new__(cls, name: str, remedy: str) -> Cause:
        member = str.__new__(cls, name)
        member._value_, member.remedy = name, remedy
        return member

    CODE = "an error in the job's own code", "Read the traceback with `atoll logs`, and try the job with `atoll check`."
    CRASH_LOOP = "a crash loop", "Read the island's log with `atoll logs`, and drain it if its machine is to blame."
    BAD_NODE = (
        "a bad node",
        "Take the machine out: `atoll cordon GROUP --node NODE`, or `atoll leave` on it. Read its log.",
    )
    FAILURES = "failures of islands", "Keep standbys, and offer more often (a smaller H), so that less is lost."
    DEPARTURES = "islands that left and came back", "Their machines were taken back, or drained: standbys shorten this."
    ON_PURPOSE = "deliberate kills", "Nothing: an operator or chaos killed these islands."
    NO_NODE = "a node group without room", "Add nodes to the group (`atoll join`), or `atoll scale` another one."
    CORDONED = "a cordoned node group", "`atoll uncordon` the group, or scale the job down on it."
    LINK = "a lost connection", "Look at the line between the island and the synchroniser: `atoll doctor --lines`."
    STRAGGLER = "a straggler", "Look for heat, clocks and other processes on its machine, or drain the island."
    THIN_LINE = (
        "a thin line",
        "`atoll doctor --lines` names a codec of fewer bits, a larger H or a longer grace window.",
    )
    OVERWRITTEN = "work that adopted versions overwrote", "Adopt by `rebase`, which keeps own work, or use a smaller H."
    LATE_WORK = (
        "work that came too late",
        "Lengthen the grace window (`atoll set JOB grace=…`) or allow more staleness.",
    )
    UNUSABLE_WORK = "unusable contributions", "Read the island's log; values that are not finite mean a too high rate."
    HUNG_STEP = "a hung or stopped process", "Look at the island's machine; its log names the step that hung."
    WAITING = (
        "islands that wait between steps",
        "Use a larger H, or give the process more cores beside the accelerator.",
    )
    EVALUATION = "evaluations on training islands", "Evaluate more rarely, on fewer sequences, or on a node of its own."
    STARTING = "the start of islands", "Keep the compile cache across restarts. In a longer job this share falls."
    ENDING = "the end of the job", "Nothing: islands wait for each other's last work. In a longer job this share falls."
    UNDONE = (
        "work before a rollback or resume",
        "Take checkpoints more often, so that less work lies behind the newest.",
    )
    NO_QUORUM = "too few islands for the quorum", "Lower it (`atoll set JOB quorum=…`), or bring the islands back."
    STALL = "no merge for a long time", "`atoll status` names a pause. Otherwise read `atoll logs JOB synchroniser`."
    OTHER = "another cause", "Read `atoll logs JOB synchroniser`."


_LATE_REASONS = RefusalReason.LATE, RefusalReason.STALE_BASE, RefusalReason.ALREADY_MERGED
_LATE = frozenset({SUPERSEDED, *map(refused, _LATE_REASONS)})
_NOT_IN_TIME = _LATE | {OVERWRITTEN, UNFINISHED}
_UNUSABLE_REASONS = RefusalReason.CORRUPT, RefusalReason.WRONG_SHAPE, RefusalReason.NON_FINITE, RefusalReason.EXPLODING
_UNUSABLE = frozenset({QUARANTINED, *map(refused, _UNUSABLE_REASONS)})
_PLAIN_CAUSES = {
    OVERWRITTEN: Cause.OVERWRITTEN,
    NO_NODE: Cause.NO_NODE,
    HELD: Cause.CORDONED,
    SILENT: Cause.LINK,
    EVALUATING: Cause.EVALUATION,
    ENDING: Cause.ENDING,
    DRAINING: Cause.ENDING,
    UNFINISHED: Cause.ENDING,
    ROLLED_BACK: Cause.UNDONE,
    NOT_TAKEN_UP: Cause.UNDONE,
}
Culprits = Mapping[IslandId, tuple[Cause, str] | None]
"""What the failures of each island are put down to; None if it had none."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause. ``island_seconds`` is what it cost, ``share`` its part of all island time, ``records`` are tape lines."""

    cause: Cause
    subject: str
    island_seconds: Duration
    share: float
    statement: str
    remedy: str
    records: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class IslandFigures:
    """The figures of an island beside the others'.

    ``pull_s`` is the median time a contribution travels, ``waiting_ratio`` the part of the time in training in which the
    island did not step. Each has its distance ``z`` from the others in spreads.
    """

    island: IslandId
    node: str
    step_s: Duration | None
    step_z: float | None
    pull_s: Duration | None
    pull_z: float | None
    waiting_ratio: float
    waiting_z: float | None
    failure_count: int


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
    """The facts about one island. ``reached`` are its latest (step, instant) by its reports."""

    steps: Series[Duration] = field(default_factory=lambda: Series(256))
    pulls: Series[Duration] = field(default_factory=lambda: Series(256))
    reached: deque[tuple[int, Instant]] = field(default_factory=lambda: deque(maxlen=512))
    overdue: deque[int] = field(default_factory=lambda: deque(maxlen=RECORDS_SHOWN))
    late: deque[int] = field(default_factory=lambda: deque(maxlen=RECORDS_SHOWN))
    unusable: deque[int] = field(default_factory=lambda: deque(maxlen=RECORDS_SHOWN))
    stops: deque[int] = field(default_factory=lambda: deque(maxlen=RECORDS_SHOWN))
    """Records of faults that stopped its process."""
    states: dict[str, deque[int]] = field(default_factory=dict)
    """The latest records with which it entered each state."""
    progress: int = 0
    """The record of its latest report of progress, and below that of its first start."""
    first_start: int = 0


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
        self._last_record = 0
        self._end: tuple[int, str, str] | None = None

    def apply(self, number: int, event: e.Event, effects: tuple[f.Effect, ...]) -> None:
        if self._end is not None:
            return
        self._last_record = number
        self._hear(number, event)
        for effect in effects:
            if isinstance(effect, f.RefuseContribution) and effect.contribution.island in self._islands:
                self._refused(number, effect)
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
        elif isinstance(event, (e.ContributionArrived, e.ContributionUnusable)):
            own = self._islands.get(event.contribution.island)
            if own is not None:
                when = next((at for step, at in own.reached if step >= event.contribution.step), event.at)
                own.pulls.add(max(0.0, event.at - when))
        elif isinstance(event, (e.IslandReported, e.FaultInjected)):
            own = self._islands.get(event.island)
            if own is None:
                return
            if isinstance(event, e.FaultInjected):
                if event.kind == FaultKind.STOP.value:
                    own.stops.append(number)
            elif isinstance(event.report, Progress):
                own.reached.append((event.report.step, event.at))
                own.progress = number
                if event.report.step_seconds_median > 0.0:
                    own.steps.add(event.report.step_seconds_median)
            elif isinstance(event.report, Overdue):
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
        summary = self._goodput.summary()
        total = summary["island_seconds"]["total"]
        figures = self._figures(summary)
        culprits = {island: self._culprit(island) for island in self._islands}
        costs = self._costs(summary, {one.island: one for one in figures}, culprits)
        findings = [self._finding(*name, spent, total, culprits) for name, spent in costs.items() if spent > 0.0]
        findings.sort(key=lambda one: (-one.island_seconds, one.cause.name, one.subject))
        ending = self._ending(findings, total, culprits)
        leading = ending or (findings[0] if findings and findings[0].share >= SHARE_MIN else None)
        return Diagnosis(
            outcome=self._end[1] if self._end else None,
            reason=self._end[2] if self._end else "",
            goodput_ratio=summary["goodput_ratio"],
            cause=leading,
            others=tuple(one for one in findings if leading is None or _name(one) != _name(leading)),
            islands=figures,
            node_failures=failure_counts(self._failures.all, self._goodput.at),
        )

    def _figures(self, summary: Figures) -> tuple[IslandFigures, ...]:
        placed = {i: self._islands[i] for i, nodes in self._failures.nodes().items() if nodes}
        steps = {i: median(own.steps.all()) for i, own in placed.items() if own.steps.count}
        pulls = {i: median(own.pulls.all()) for i, own in placed.items() if own.pulls.count}
        waits = {i: _waiting_ratio(summary["islands"][i]) for i in placed}
        step_z, pull_z = distances(steps), distances(pulls, PULL_SPREAD_MIN_S)
        waiting_z = distances(waits, SPREAD_MIN)
        failures = Counter(one.island for one in self._failures.all)
        return tuple(
            IslandFigures(
                *(i, self._failures.node_of(i), steps.get(i), step_z.get(i), pulls.get(i), pull_z.get(i)),
                *(waits[i], waiting_z.get(i), failures[i]),
            )
            for i in placed
        )

    def _costs(
        self, summary: Figures, figures: Mapping[IslandId, IslandFigures], culprits: Culprits
    ) -> dict[tuple[Cause, str], Duration]:
        costs: dict[tuple[Cause, str], list[Duration]] = {}
        thin = [one for one in figures.values() if _stands_out(one.pull_z)]
        thinnest = max(thin, key=lambda one: one.pull_z or 0.0, default=None)
        for island, own in summary["islands"].items():
            for label, spent in own["badput_seconds"].items():
                key = self._key(island, label, self._groups[island], figures.get(island), culprits[island])
                if label == ENDING and thinnest is not None:  # islands wait for the work that travels longest
                    key = Cause.THIN_LINE, thinnest.island
                costs.setdefault(key, []).append(spent)
        for island, spent in self._lost_to_slowness(summary, figures).items():
            costs.setdefault((Cause.STRAGGLER, island), []).append(spent)
        return {key: fsum(spent) for key, spent in costs.items()}

    def _key(
        self, island: IslandId, label: str, group: str, own: IslandFigures | None, culprit: tuple[Cause, str] | None
    ) -> tuple[Cause, str]:
        if label in _UNUSABLE:
            return Cause.UNUSABLE_WORK, island
        if label.startswith("recovering: ") or label in (AWAY, LOST_WITH_ISLAND):
            return culprit or (Cause.ENDING if label == LOST_WITH_ISLAND else Cause.DEPARTURES, "")
        if label.startswith("starting: "):
            return Cause.STARTING, ""
        if label in _NOT_IN_TIME and own is not None and _stands_out(own.pull_z):
            return Cause.THIN_LINE, island
        if label in _LATE:
            return Cause.LATE_WORK, ""
        if label == NOT_STEPPING:
            seen = self._islands[island]
            return (Cause.HUNG_STEP, island) if seen.overdue or seen.stops else (Cause.WAITING, "")
        cause = _PLAIN_CAUSES.get(label, Cause.LATE_WORK if label.startswith("refused: ") else Cause.OTHER)
        by_group = cause in (Cause.NO_NODE, Cause.CORDONED)
        return cause, group if by_group else island if cause is Cause.LINK else ""

    def _culprit(self, island: IslandId) -> tuple[Cause, str] | None:
        """Return what the failures of this island are put down to; None if it had none."""
        own = [one for one in self._failures.all if one.island == island]
        if not own:
            return None
        on_purpose = sum(one.on_purpose for one in own)
        if 2 * on_purpose > len(own):
            return Cause.ON_PURPOSE, ""
        if self._shared_error() is not None and any(one.is_of_code for one in own):
            return Cause.CODE, ""
        nodes = Counter(one.node for one in own if not one.on_purpose)
        node = nodes.most_common(1)[0][0] if nodes else ""
        if node in bad_nodes(self._failures.all, self._failures.nodes(), self._goodput.at):
            return Cause.BAD_NODE, node
        in_vain = longest = 0
        for one in own:
            in_vain = 0 if one.contributed or one.on_purpose else in_vain + 1
            longest = max(longest, in_vain)
        if longest < LOOP_LENGTH:
            return Cause.FAILURES, ""
        unplaced = 2 * sum(one.is_placement for one in own) > len(own)
        return (Cause.NO_NODE, self._groups[island]) if unplaced else (Cause.CRASH_LOOP, island)

    def _shared_error(self) -> str | None:
        """Return the error of user code that ended incarnations of several islands, or of the only one that failed so."""
        errors: dict[str, set[IslandId]] = {}
        for one in self._failures.all:
            if one.is_of_code:
                errors.setdefault(one.reason, set()).add(one.island)
        placed = sum(map(bool, self._failures.nodes().values()))
        return next((reason for reason, islands in errors.items() if len(islands) >= min(2, placed)), None)

    def _lost_to_slowness(self, summary: Figures, figures: Mapping[IslandId, IslandFigures]) -> dict[IslandId, float]:
        """Return what each straggler's stepping lacks of the others' tokens a second and accelerator, in seconds."""
        accelerators = {plan.island: plan.accelerator_count for plan in self._policy.islands}
        stepping = {i: spent for i, own in summary["islands"].items() if (spent := _stepping(own)) > 0.0}
        trained = {i: own["tokens"]["trained"] for i, own in summary["islands"].items()}
        rates = {i: trained[i] / (spent * accelerators[i]) for i, spent in stepping.items()}
        lost = {}
        for island, own in figures.items():
            others = [rate for other, rate in rates.items() if other != island]
            if not others or island not in rates or not _stands_out(own.step_z):
                continue
            usual = median(others)
            if rates[island] * RATIO_MIN < usual:
                lost[island] = stepping[island] * (1.0 - rates[island] / usual)
        return lost

    def _ending(self, findings: Iterable[Finding], total: Duration, culprits: Culprits) -> Finding | None:
        """Return the cause of a job that failed, or that merges no more."""
        if self._end is not None:
            record, outcome, reason = self._end
            if outcome != JobOutcome.FAILED.value:
                return None
            cause, subject, records = self._killer(reason, culprits)
            records = (*(n for n in records if n != record), record)[-RECORDS_SHOWN:]
            return Finding(cause, subject, total, 1.0, f"the job failed: {reason}", cause.remedy, records)
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
        else:
            text = f"no merge for {seconds(since)}, though {training} islands train and the quorum is {quorum}"
            cause, records = Cause.STALL, (self._last_record,)
        worst = max(findings, key=lambda one: one.island_seconds, default=None)
        spent = worst.island_seconds if worst is not None else 0.0
        return Finding(cause, "", spent, spent / total if total else 0.0, text, cause.remedy, records[-RECORDS_SHOWN:])

    def _state(self, island: IslandId) -> str:
        return self._failures.lifecycle.lives[island].state

    def _killer(self, reason: str, culprits: Culprits) -> tuple[Cause, str, tuple[int, ...]]:
        if "nothing was ever merged" in reason:
            return Cause.NO_QUORUM, "", ()
        of_code = tuple(one.record for one in self._failures.all if one.is_of_code)
        if of_code and (self._shared_error() is not None or self._failures.all[-1].is_of_code):
            return Cause.CODE, "", of_code
        blamed = Counter(culprit for one in self._failures.all if (culprit := culprits[one.island]))
        if not blamed:
            return Cause.OTHER, "", ()
        (cause, subject), _ = blamed.most_common(1)[0]
        return cause, subject, tuple(one.record for one in self._failures.all)

    def _finding(self, cause: Cause, subject: str, spent: Duration, total: Duration, culprits: Culprits) -> Finding:
        statement, records = self._evidence(cause, subject, culprits)
        share = spent / total if total else 0.0
        text = f"{statement}: {seconds(spent)} of island time, {percent(share)} of all"
        return Finding(cause, subject, spent, share, text, cause.remedy, tuple(sorted(set(records)))[-RECORDS_SHOWN:])

    def _evidence(self, cause: Cause, subject: str, culprits: Culprits) -> tuple[str, tuple[int, ...]]:
        """Return a statement with the figures that show the cause, and the numbers of the records."""
        own = self._islands.get(IslandId(subject))
        blamed = [one for one in self._failures.all if culprits[one.island] == (cause, subject)]
        records, lost = tuple(one.record for one in blamed), sorted({one.island for one in blamed})
        match cause:
            case Cause.CODE:
                return f"islands die of the same error ({self._shared_error()})", records
            case Cause.CRASH_LOOP:
                last = blamed[-1].reason if blamed else ""
                times = counted(len(blamed), "time")
                text = f"{subject} failed {times} and contributed nothing in {LOOP_LENGTH} lives in a row ({last})"
                return text, records
            case Cause.BAD_NODE:
                on_node = [one for one in blamed if one.node == subject]
                islands = some_of(sorted({one.island for one in on_node}), 8)
                records = tuple(one.record for one in on_node)
                return f"{counted(len(on_node), 'failure')} on node {subject} ({islands})", records
            case Cause.FAILURES | Cause.ON_PURPOSE:
                how = "failure" if cause is Cause.FAILURES else "deliberate kill"
                return f"{counted(len(blamed), how)} of {some_of(lost, 8) or 'islands'}", records
            case Cause.NO_NODE | Cause.CORDONED:
                state = IslandState.WAITING.value if cause is Cause.NO_NODE else IslandState.CORDONED.value
                return f"islands wait because of node group {subject}", (*self._entered(state), *records)
            case Cause.LINK if own is not None:
                return f"{subject} was silent", tuple(own.states.get(IslandState.SUSPECT.value, ()))
            case Cause.STRAGGLER if own is not None:
                usual = [median(x.steps.all()) for i, x in self._islands.items() if i != subject and x.steps.count]
                own_s, others_s = seconds(median(own.steps.all())), seconds(median(usual))
                return f"{subject} takes {own_s} a step where the others take {others_s}", (own.progress,)
            case Cause.THIN_LINE if own is not None:
                usual = [median(x.pulls.all()) for i, x in self._islands.items() if i != subject and x.pulls.count]
                own_s, others_s = seconds(median(own.pulls.all())), seconds(median(usual))
                return f"contributions of {subject} travel {own_s}, those of others {others_s}", tuple(own.late)
            case Cause.HUNG_STEP if own is not None:
                return f"{subject} did not step for long at a time", (*own.overdue, *own.stops)
            case Cause.UNUSABLE_WORK if own is not None:
                return f"contributions of {subject} were refused as unusable", tuple(own.unusable)
            case Cause.LATE_WORK:
                return "work came too late to be merged", tuple(n for x in self._islands.values() for n in x.late)
            case Cause.STARTING:
                first = tuple(own.first_start for own in self._islands.values() if own.first_start)
                return "islands were placed, started and compiled for the first time", first
            case _:
                return cause.value, ()

    def _entered(self, state: str) -> tuple[int, ...]:
        return tuple(n for own in self._islands.values() for n in own.states.get(state, ()))


def distances(values: Mapping[IslandId, float], spread_min: float = 0.0) -> dict[IslandId, float]:
    """Return how many spreads each value is above the median of the others. Empty for fewer than two values.

    The spread is the median absolute deviation of the others times 1.4826 (a normal distribution's standard deviation),
    and at least ``spread_min`` and a tenth of their median.
    """
    result = {}
    for island, value in values.items():
        others = [other for name, other in values.items() if name != island]
        if not others:
            continue
        middle = median(others)
        spread = max(1.4826 * median([abs(other - middle) for other in others]), SPREAD_MIN * middle, spread_min)
        result[island] = (value - middle) / spread if spread > 0.0 else 0.0
    return result


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
