"""Statistics of a job, as figures and curves: loss, steps, gaps, merges, recoveries, and each island's timeline.

A fold over (event, effects) like ``goodput``; bounded in memory but for one entry per change of an island's state.
"""

from __future__ import annotations

from typing import Any

from orchestrator.accounting.bystanders import Bystanders
from orchestrator.accounting.data_flaws import DataFlawCounts
from orchestrator.accounting.epochs import Epochs
from orchestrator.accounting.evaluations import Evaluations
from orchestrator.accounting.lifecycle import ABSENT, GONE, Change, Lifecycle
from orchestrator.accounting.merges import Merges
from orchestrator.accounting.recovery import PARTS, Recoveries
from orchestrator.accounting.series import Series, median
from orchestrator.accounting.traffic import Traffic
from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.vocabulary import Duration, Incarnation, Instant, IslandId, IslandState, JobPolicy

_AWAY = GONE | {IslandState.SUSPECT.value}


class Statistics:
    """The fold. ``apply`` every step, then ask for a ``summary``."""

    _islands: tuple[IslandId, ...]
    at: Instant
    merges: Merges
    recoveries: Recoveries
    bystanders: Bystanders
    traffic: Traffic
    evaluations: Evaluations
    data_flaws: DataFlawCounts
    training_loss: Series[tuple[float, float, Instant]]
    parameter_count: int | None
    deaths: int
    damages: int
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
        self.recoveries = Recoveries()
        self.bystanders = Bystanders()
        self.traffic = Traffic(policy)
        self.evaluations = Evaluations()
        self.data_flaws = DataFlawCounts()
        self.training_loss = Series()
        self.parameter_count = None
        self.deaths = self.damages = 0
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
        self.merges.apply(event, effects)
        self.recoveries.apply(event, effects, changes)
        self.bystanders.apply(event)
        self.data_flaws.apply(event)
        self.traffic.apply(event, effects)
        for change in changes:
            self._changed(change)
        if isinstance(event, e.ProgressReported):
            self._progressed(event)
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

    def _progressed(self, event: e.ProgressReported) -> None:
        island = event.island
        life = self._lifecycle.lives.get(island)
        if life is None or life.incarnation != event.incarnation:
            return
        incarnation, tokens, before = self._tokens.get(island, (event.incarnation, 0, 0))
        if incarnation != event.incarnation:
            tokens, before = 0, before + tokens
        if event.tokens_total < tokens:
            return  # an older report, come late
        self._tokens[island] = (event.incarnation, event.tokens_total, before)
        self._tokens_all += event.tokens_total - tokens
        self.training_loss.add((float(self._tokens_all), event.loss, event.at))
        if island not in self._gaps or event.gap_max_seconds > self._gaps[island]:
            self._gaps[island], self._gaps_at[island] = event.gap_max_seconds, event.at
        if event.step_seconds_median > 0.0:
            self._step_seconds[island].add(event.step_seconds_median)


def _median(series: Series[Duration]) -> Duration | None:
    return median(series.points) if series.points else None


def _slowest(recoveries: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The longest complete recovery: every part, their total, and whose it was."""
    complete = [recovery for recovery in recoveries if recovery["complete"]]
    if not complete:
        return None
    worst = max(complete, key=lambda recovery: recovery["total"])
    return {
        "island": worst["island"],
        **{part: worst["parts"][part] for part in PARTS},
        "total": worst["total"],
    }
