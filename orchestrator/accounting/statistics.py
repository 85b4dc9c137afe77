"""Statistics of a job, as figures and curves: loss, steps, gaps, merges, recoveries, and each island's timeline.

A fold over (event, effects) like ``goodput``; bounded in memory but for one entry per change of an island's state.

    Bystanders       the longest gap of islands that a fault did not hit: "an island's death never stops another"
    Evaluations      the curve of held-out loss, and what measuring it took
    DataFlawCounts   the text that islands could not read as it is in its files

A *bystander* is an island while it trains undisturbed: connected, not stopped by chaos, and neither just before. Its longest
time between two steps is what a fault may not lengthen. The report's survivors are islands that were never harmed in the
whole job. Every island is a bystander most of the time, so this figure exists however many faults follow one another.

Each incarnation reports its own totals of text that it could not read (``core.vocabulary.DataFlaws``). It reads some text
again that the incarnation before had read, and flaws in that text count in both.

Traffic between islands and synchroniser, and its outcome: payloads each way, admissions, states handed over.

    up     the bytes of a contribution, held on the synchroniser's side
    down   a published fragment for one recipient, or one fragment of a whole state taken from the synchroniser; also one
           that is published again to an island which holds it, and is therefore sent no bytes

Counts payloads by fragment. Their sizes are not on the tape: the shell knows them (``orchestrator.status``), and
the exporter of bytes multiplies. A state that comes from a peer passes the synchroniser by and is counted as a catch-up
only. Refuses to know: rounds (``merges``), time, and how often what was asked for arrived (a publication may be overtaken).
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any

from orchestrator.accounting.island_time import ABSENT, GONE, PARTS, Change, Lifecycle, Recoveries
from orchestrator.accounting.merges import Merges, Mixtures
from orchestrator.accounting.series import Epochs, Histogram, Series, median
from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.effects import Evaluate
from orchestrator.core.events import EvaluationCompleted, EvaluationFailed
from orchestrator.core.messages import CarriedReport, CatchUpFailure, CaughtUp, Drained, Flushed, Progress
from orchestrator.core.saving import JobSalvaged
from orchestrator.core.vocabulary import (
    NO_FLAWS,
    DataFlaws,
    Duration,
    Incarnation,
    Instant,
    IslandId,
    IslandState,
    JobPolicy,
    Preference,
    SourceFlaws,
    SourceLoss,
)

STALENESS_BOUNDS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0)
PEER, SYNCHRONISER, LEFT = "peer", "synchroniser", "left state"


class Pulls:
    """Tells whether the bytes of a contribution travelled: they do not where it is refused for its age alone.

    Those that come are measured. On tapes of builds that measured nothing, all of them came.
    """

    _measures: bool

    def __init__(self) -> None:
        self._measures = False

    def had_bytes(self, event: e.ContributionArrived | e.ContributionUnusable) -> bool:
        """Return whether they did. Events must be given in their order."""
        if isinstance(event, e.ContributionUnusable):
            return True
        self._measures = self._measures or event.displacement is not None
        return event.displacement is not None or not self._measures


class Traffic:
    """The fold."""

    _pulls: Pulls
    _up: list[int]
    _down: list[int]
    _admitted: Counter[IslandId]
    _refused: Counter[IslandId]
    _staleness: Histogram
    _catch_ups: Counter[str]
    _catch_up_failures: int
    _placement_failures: int
    _merge_failures: int
    _quarantines: Counter[IslandId]

    def __init__(self, policy: JobPolicy) -> None:
        self._pulls = Pulls()
        self._up = [0] * policy.fragment_count
        self._down = [0] * policy.fragment_count
        self._admitted = Counter()
        self._refused = Counter()
        self._staleness = Histogram(STALENESS_BOUNDS)
        self._catch_ups = Counter({PEER: 0, SYNCHRONISER: 0})
        self._catch_up_failures = 0
        self._placement_failures = 0
        self._merge_failures = 0
        self._quarantines = Counter()

    def apply(self, event: e.Event, effects: tuple[f.Effect, ...]) -> None:
        if isinstance(event, (e.ContributionArrived, e.ContributionUnusable)):
            if self._pulls.had_bytes(event) and 0 <= event.contribution.fragment < len(self._up):
                self._up[event.contribution.fragment] += 1
        elif isinstance(event, e.IslandReported):
            self._reported(event.report)
        elif isinstance(event, e.PlacementFailed):
            self._placement_failures += 1
        elif isinstance(event, e.MergeFailed):
            self._merge_failures += 1
        for effect in effects:
            if isinstance(effect, f.AdmitContribution):
                self._admitted[effect.contribution.island] += 1
                self._staleness.observe(effect.version - 1 - effect.contribution.base_version)
            elif isinstance(effect, f.RefuseContribution):
                self._refused[effect.contribution.island] += 1
            elif isinstance(effect, f.QuarantineIsland):
                self._quarantines[effect.island] += 1
            elif isinstance(effect, f.PublishFragment):
                self._down[effect.fragment] += len(effect.recipients)

    def _reported(self, report: CarriedReport) -> None:
        if isinstance(report, CaughtUp):
            source = PEER if report.donor is not None else SYNCHRONISER
            self._catch_ups[source if report.left is None else LEFT] += 1
            if report.donor is None or report.left is not None:
                self._down = [count + 1 for count in self._down]
        elif isinstance(report, CatchUpFailure):
            self._catch_up_failures += 1

    def summary(self) -> dict[str, Any]:
        """Return the figures as plain data. ``staleness`` is in versions by which admitted bases were behind."""
        return {
            "payloads_up": list(self._up),
            "payloads_down": list(self._down),
            "admitted": dict(sorted(self._admitted.items())),
            "refused": dict(sorted(self._refused.items())),
            "staleness": self._staleness.summary(),
            "catch_ups": dict(sorted(self._catch_ups.items())),
            "catch_up_failures": self._catch_up_failures,
            "placement_failures": self._placement_failures,
            "merge_failures": self._merge_failures,
            "quarantines": dict(sorted(self._quarantines.items())),
        }


KINDS = tuple(field.name for field in fields(DataFlaws) if field.name != "sources")
STOP, CONTINUE = "stop", "continue"
SETTLE_S: Duration = 2.0
"""For so long after a disturbance an island's reports do not count, nor does the next one: one of them holds the
disturbance, and reports that were under way before it come first."""
_AWAY = GONE | {IslandState.SUSPECT.value}


class Statistics:
    """The fold. ``apply`` every step, then ask for a ``summary``."""

    _islands: tuple[IslandId, ...]
    at: Instant
    merges: Merges
    mixtures: Mixtures
    recoveries: Recoveries
    bystanders: Bystanders
    traffic: Traffic
    evaluations: Evaluations
    data_flaws: DataFlawCounts
    training_loss: Series[tuple[float, float, Instant]]
    parameter_count: int | None
    deaths: int
    damages: int
    failures: Counter[IslandId]
    """Incarnations that failed, by island. One that left after a notice or a drain did not."""
    _noticed: dict[IslandId, Incarnation]
    _epochs: Epochs
    outcome: str | None
    reason: str
    _lifecycle: Lifecycle
    _spans: list[tuple[IslandId, Instant, Instant, str]]
    _entered: dict[IslandId, tuple[Instant, str]]
    _harmed: set[IslandId]
    _tokens: dict[IslandId, tuple[Incarnation, int, int]]
    _tokens_all: int
    _gaps: dict[IslandId, Duration]
    _gaps_at: dict[IslandId, Instant]
    _step_seconds: dict[IslandId, Series[Duration]]

    def __init__(self, policy: JobPolicy) -> None:
        self._islands = tuple(plan.island for plan in policy.islands)
        self.at = 0.0
        self.merges = Merges(policy)
        self.mixtures = Mixtures()
        self.recoveries = Recoveries()
        self.bystanders = Bystanders()
        self.traffic = Traffic(policy)
        self.evaluations = Evaluations()
        self.data_flaws = DataFlawCounts()
        self.training_loss = Series()
        self.parameter_count = None
        self.deaths = self.damages = 0
        self.failures = Counter()
        self._noticed = {}
        self._epochs = Epochs()
        self.outcome = None
        self.reason = ""
        self._lifecycle = Lifecycle(self._islands)
        self._spans = []
        self._entered = {}
        self._harmed = set()
        self._tokens = {}
        self._tokens_all = 0
        self._gaps = {}
        self._gaps_at = {}
        self._step_seconds = {island: Series(256) for island in self._islands}

    @property
    def finished_at(self) -> Instant | None:
        return self._lifecycle.finished_at

    def apply(self, event: e.Event, effects: tuple[f.Effect, ...]) -> None:
        if self.finished_at is not None:
            return
        self.at = event.at
        changes = self._lifecycle.apply(event, effects)
        self.merges.apply(event, effects, self._lifecycle.training_count)
        self.mixtures.apply(event)
        self.recoveries.apply(event, effects, changes)
        self.bystanders.apply(event)
        self.data_flaws.apply(event)
        self.traffic.apply(event, effects)
        for change in changes:
            self._changed(change)
            self._count_failure(event, change)
        if isinstance(event, e.NoticeReceived):
            self._noticed[event.island] = event.incarnation
        elif isinstance(event, e.IslandReported):
            if isinstance(event.report, Progress):
                self._progressed(event.at, event.island, event.incarnation, event.report)
        elif isinstance(event, JobSalvaged):
            self._tokens |= {one.island: (one.incarnation, one.tokens_total, 0) for one in event.islands}
        elif isinstance(event, e.EvaluationCompleted):
            self.evaluations.completed(event, self._tokens_all)
        elif isinstance(event, e.EvaluationFailed):
            self.evaluations.failed(event)
        elif isinstance(event, e.OuterStateSeeded):
            self.parameter_count = event.parameter_count
        elif isinstance(event, e.SynchroniserRestarted) and self._epochs.begins(event):
            self.deaths += 1
            self.damages += bool(event.damage)
        for effect in effects:
            if isinstance(effect, f.Evaluate):
                self.evaluations.began(effect, self._tokens_all, unmerged=not self.merges.count)
            elif isinstance(effect, f.FinishJob):
                self.outcome, self.reason = effect.outcome.value, effect.reason

    def summary(self, at: Instant | None = None) -> dict[str, Any]:
        """Everything as plain data. ``survivors`` are the islands that trained and were never lost or suspect."""
        until = self.at if at is None or self.finished_at is not None else max(at, self.at)
        steps = {island: _median(series) for island, series in self._step_seconds.items()}
        survivors = [island for island in self._islands if island in self._gaps and island not in self._harmed]
        worst = max(survivors, key=lambda island: self._gaps[island], default=None)
        medians = [seconds for seconds in steps.values() if seconds is not None]
        return {
            **self.merges.summary(),
            **self.mixtures.summary(),
            "outcome": self.outcome,
            "reason": self.reason,
            "duration_s": until,
            "parameter_count": self.parameter_count,
            "loss_initial": self.evaluations.initial,
            "loss_final": self.evaluations.curve.last[1] if self.evaluations.curve.last else None,
            "loss_curve": [list(point) for point in self.evaluations.curve.all()],
            "evaluations": self.evaluations.summary(),
            "data_flaws": self.data_flaws.summary(),
            "training_loss_curve": [list(point) for point in self.training_loss.all()],
            "step_time_median_s": median(medians) if medians else None,
            "step_times_s": steps,
            "gaps_max_s": {island: self._gaps[island] for island in self._islands if island in self._gaps},
            "survivors": survivors,
            "survivor_gap_max_s": self._gaps[worst] if worst else None,
            "survivor_gap": {"seconds": self._gaps[worst], "at": self._gaps_at[worst], "island": worst}
            if worst
            else None,
            "survivor_step_time_median_s": median([steps[i] or 0.0 for i in survivors]) if survivors else None,
            "recoveries": [recovery.summary() for recovery in self.recoveries.all],
            "recovery_s": _slowest([recovery.summary() for recovery in self.recoveries.all]),
            "synchroniser": {"deaths": self.deaths, "damages": self.damages},
            "failures": dict(sorted(self.failures.items())),
            **self.bystanders.summary(),
            "timeline": self._timeline(until),
            "traffic": self.traffic.summary(),
        }

    def _timeline(self, until: Instant) -> list[list[Any]]:
        """[island, from, to, state], by island in the order of the job, then by time."""
        open_spans = [(island, since, until, state) for island, (since, state) in self._entered.items()]
        order = {island: n for n, island in enumerate(self._islands)}
        spans = sorted([*self._spans, *open_spans], key=lambda span: (order[span[0]], span[1]))
        return [list(span) for span in spans if span[2] > span[1]]

    def _changed(self, change: Change) -> None:
        if change.before != ABSENT:
            since, state = self._entered[change.island]
            self._spans.append((change.island, since, change.at, state))
        self._entered[change.island] = (change.at, change.after)
        if change.after in _AWAY and self.finished_at is None:
            self._harmed.add(change.island)

    def _count_failure(self, event: e.Event, change: Change) -> None:
        if change.before == ABSENT or change.after not in (IslandState.LOST.value, IslandState.FAILED.value):
            return
        noticed = isinstance(event, e.NoticeReceived) or self._noticed.get(change.island) == change.incarnation
        drained = isinstance(e.report_of(event), (Drained, Flushed))
        if not noticed and not drained:
            self.failures[change.island] += 1

    def _progressed(self, at: Instant, island: IslandId, incarnation: Incarnation, report: Progress) -> None:
        life = self._lifecycle.lives.get(island)
        if life is None or life.incarnation != incarnation:
            return
        last_incarnation, tokens, before = self._tokens.get(island, (incarnation, 0, 0))
        if last_incarnation != incarnation:
            tokens, before = 0, before + tokens
        if report.tokens_total < tokens:
            return  # an older report, come late
        self._tokens[island] = (incarnation, report.tokens_total, before)
        self._tokens_all += report.tokens_total - tokens
        self.training_loss.add((float(self._tokens_all), report.loss, at))
        if island not in self._gaps or report.gap_max_seconds > self._gaps[island]:
            self._gaps[island], self._gaps_at[island] = report.gap_max_seconds, at
        if report.step_seconds_median > 0.0:
            self._step_seconds[island].add(report.step_seconds_median)


class Bystanders:
    """The fold. One entry is kept for each fault, so memory grows with what chaos does, not with the job."""

    _faults: list[dict[str, float | str]]
    _disconnected: set[IslandId]
    _disturbed_until: dict[IslandId, Instant]
    _longest: tuple[Duration, Instant, IslandId] | None

    def __init__(self) -> None:
        self._faults = []
        self._disconnected = set()
        self._disturbed_until = {}
        self._longest = None

    def apply(self, event: e.Event) -> None:
        match event:
            case e.FaultInjected():
                self._injected(event)
            case e.IslandPlaced():  # another process: nothing of the last one's disturbance is in its steps
                self._disturbed_until.pop(event.island, None)
                self._disconnected.discard(event.island)
            case e.ConnectionLost():
                self._disconnected.add(event.island)
            case e.ConnectionRestored():
                self._disconnected.discard(event.island)
                self._disturb(event.island, event.at)
            case e.IslandReported(report=Progress() as report):
                self._progressed(event.at, event.island, report.gap_max_seconds)

    def summary(self) -> dict[str, Any]:
        """``bystander_gap`` is None until a bystander has reported."""
        gap, at, island = self._longest or (None, None, None)
        longest = None if gap is None else {"seconds": gap, "at": at, "island": island}
        return {"bystander_gap_max_s": gap, "bystander_gap": longest, "faults": list(self._faults)}

    def _injected(self, event: e.FaultInjected) -> None:
        if event.kind == CONTINUE:  # the end of a fault, not another one
            self._disturbed_until[event.island] = event.at
            return
        if event.kind == STOP:
            self._disturb(event.island, event.at + event.duration)
        names = ("at", "kind", "island", "duration", "bytes_per_second", "payloads", "caller")
        self._faults.append({name: getattr(event, name) for name in names})

    def _disturb(self, island: IslandId, until: Instant) -> None:
        self._disturbed_until[island] = max(until, self._disturbed_until.get(island, until))

    def _progressed(self, at: Instant, island: IslandId, gap: Duration) -> None:
        until = self._disturbed_until.get(island)
        if until is not None:
            if at >= until + SETTLE_S:
                del self._disturbed_until[island]
        elif island not in self._disconnected and (self._longest is None or gap > self._longest[0]):
            self._longest = (gap, at, island)


class Evaluations:
    """``curve`` holds (tokens trained, loss, instant) of each: the tokens that were trained when it began, because Θ is
    measured as it was then, and the instant at which the loss was known. The rest, but the sums, is of the last one.

    ``initial`` is the loss of what training began with: of version 0, or of the checkpoint that the job continues.
    """

    curve: Series[tuple[float, float, Instant]]
    initial: float | None
    count: int
    failures: int
    seconds: Duration
    last_seconds: Duration
    last_sequence_count: int
    last_place: str
    last_remark: str
    last_bits_per_byte: float | None
    last_sources: tuple[SourceLoss, ...]
    last_preference: Preference | None
    _begun: tuple[int, int, bool]

    def __init__(self) -> None:
        self.curve = Series()
        self.initial = None
        self._begun = (-1, 0, False)
        self.count = self.failures = self.last_sequence_count = 0
        self.seconds = self.last_seconds = 0.0
        self.last_place = self.last_remark = ""
        self.last_bits_per_byte, self.last_sources, self.last_preference = None, (), None

    def began(self, effect: Evaluate, tokens: int, *, unmerged: bool) -> None:
        """Θ is to be measured as it is now, when so many tokens are trained; ``unmerged``: as training began with it."""
        self._begun = (effect.global_version, tokens, unmerged)

    def completed(self, event: EvaluationCompleted, tokens: int) -> None:
        """Count an evaluation. ``tokens`` are trained by now, for tapes that do not say when the evaluation began."""
        version, tokens_before, unmerged = self._begun
        if version == event.global_version:
            tokens = tokens_before
            self.initial = event.loss if unmerged else self.initial
        self.curve.add((float(tokens), event.loss, event.at))
        self.count += 1
        self.seconds += event.seconds
        self.last_seconds, self.last_sequence_count = event.seconds, event.sequence_count
        self.last_place, self.last_remark = event.place, event.remark
        self.last_bits_per_byte, self.last_sources = event.bits_per_byte, event.sources
        self.last_preference = event.preference

    def failed(self, event: EvaluationFailed) -> None:
        self.failures += 1
        self.last_remark = event.reason

    def summary(self) -> dict[str, Any]:
        """All but ``count``, ``failures`` and ``seconds`` are of the last one."""
        return {
            "count": self.count,
            "failures": self.failures,
            "seconds": self.seconds,
            "last_seconds": self.last_seconds,
            "sequence_count": self.last_sequence_count,
            "place": self.last_place,
            "remark": self.last_remark,
            "bits_per_byte": self.last_bits_per_byte,
            "sources": [
                {"source": one.source, "loss": one.loss, "bits_per_byte": one.bits_per_byte}
                for one in self.last_sources
            ],
            "preference": None if (pairs := self.last_preference) is None else asdict(pairs),
        }


class DataFlawCounts:
    """The fold."""

    _now: dict[IslandId, tuple[Incarnation, DataFlaws]]
    _before: dict[IslandId, DataFlaws]

    def __init__(self) -> None:
        self._now = {}
        self._before = {}

    def apply(self, event: e.Event) -> None:
        if not isinstance(event, e.IslandReported) or not isinstance(event.report, Progress):
            return
        incarnation, flaws = self._now.get(event.island, (event.incarnation, NO_FLAWS))
        if event.incarnation < incarnation:
            return  # a life that another has followed
        if event.incarnation > incarnation:
            self._before[event.island], flaws = self._sum(event.island), NO_FLAWS
        self._now[event.island] = (event.incarnation, _each(max, flaws, event.report.flaws))

    def summary(self) -> dict[str, Any]:
        """Return the counts of each island with flaws and of all together, as plain data; ``remark`` says it in words.

        ``sources`` are the records that could not be read, by source.
        """
        flaws = {island: self._sum(island) for island in sorted(self._now) if self._sum(island) != NO_FLAWS}
        islands = {island: _plain(one) for island, one in flaws.items()}
        total = {kind: sum(counts[kind] for counts in islands.values()) for kind in KINDS}
        by_source = tuple[SourceFlaws, ...]()
        for one in flaws.values():
            by_source = _each_source(operator.add, by_source, one.sources)
        sources = {
            one.source: {"unreadable_records": one.unreadable_records, "not_utf8_records": one.not_utf8_records}
            for one in by_source
        }
        return {"total": total, "islands": islands, "sources": sources, "remark": _remark(total, by_source)}

    def _sum(self, island: IslandId) -> DataFlaws:
        return _each(operator.add, self._before.get(island, NO_FLAWS), self._now[island][1])


def _each(of_two: Callable[[int, int], int], one: DataFlaws, other: DataFlaws) -> DataFlaws:
    counts = {kind: of_two(getattr(one, kind), getattr(other, kind)) for kind in KINDS}
    return DataFlaws(**counts, sources=_each_source(of_two, one.sources, other.sources))


def _each_source(
    of_two: Callable[[int, int], int], some: Iterable[SourceFlaws], others: Iterable[SourceFlaws]
) -> tuple[SourceFlaws, ...]:
    left, right = ({each.source: each for each in flaws} for flaws in (some, others))
    both = []
    for name in sorted(left.keys() | right.keys()):
        one, other = (flaws.get(name, SourceFlaws(name, 0, 0)) for flaws in (left, right))
        unreadable = of_two(one.unreadable_records, other.unreadable_records)
        both.append(SourceFlaws(name, unreadable, of_two(one.not_utf8_records, other.not_utf8_records)))
    return tuple(both)


def _plain(flaws: DataFlaws) -> dict[str, int]:
    return {kind: getattr(flaws, kind) for kind in KINDS}


def _remark(total: Mapping[str, int], sources: Iterable[SourceFlaws]) -> str:
    phrases = (
        ("unreadable_records", "records or pieces of files could not be read and were skipped"),
        ("cut_pieces", "pieces of files were cut for their size"),
        ("repeated_sequences", "sequences were drawn a second time in the same epoch"),
        ("omitted_sequences", "sequences were skipped in their epoch"),
    )
    counts = [f"{total[kind]:,} {what}" for kind, what in phrases if total[kind]]
    counts += [
        f"of {one.source} {one.not_utf8_records:,} of {one.unreadable_records:,} because they are not UTF-8"
        for one in sources
        if one.not_utf8_records
    ]
    remark = ", ".join(counts)
    if total["repeated_sequences"] or total["omitted_sequences"]:
        remark += "; `atoll data index` counts the text, so that each occurs once"
    return remark


def _median(series: Series[Duration]) -> Duration | None:
    return median(series.points) if series.points else None


def _slowest(recoveries: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the longest complete recovery: every part, their total, whose it was, and the longest gap of the others."""
    complete = [recovery for recovery in recoveries if recovery["complete"]]
    if not complete:
        return None
    worst = max(complete, key=lambda recovery: recovery["total"])
    return {
        "island": worst["island"],
        **{part: worst["parts"][part] for part in PARTS},
        "total": worst["total"],
        "others_gap_max_s": worst["others_gap_max_s"],
    }
