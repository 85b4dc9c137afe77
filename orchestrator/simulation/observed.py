"""Collects what a tape shows about the world in which it was recorded: durations, reports, and what went wrong.

This is a fold over (event, effects) like those of ``accounting``, for live and simulated jobs. It pairs each request with
its answer and each report with the one before it, and guesses nothing. ``fit`` makes a world of the observations.

Two reports of an island that name the same number of tokens were sent together, at one boundary. The time between them is
therefore the delivery time of the second.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from orchestrator.accounting.series import median
from orchestrator.accounting.statistics import Pulls
from orchestrator.core import commands
from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.messages import Adopted, CarriedReport, CatchUpFailure, CaughtUp, Overdue, Progress, Ready
from orchestrator.core.vocabulary import (
    Duration,
    FragmentId,
    Incarnation,
    Instant,
    IslandId,
    PayloadId,
    Version,
)

LifeId = tuple[IslandId, Incarnation]


DatedProgress = tuple[Instant, Progress]
"""A report with the instant at which it was heard."""


@dataclass(slots=True)
class ObservedIncarnation:
    """One incarnation: when each part of its start was requested and answered, and all its progress reports."""

    asked_at: Instant
    placed_at: Instant | None = None
    refused_at: Instant | None = None
    ready_at: Instant | None = None
    state_asked_at: Instant | None = None
    caught_up_at: Instant | None = None
    training_ordered_at: Instant | None = None
    ended_at: Instant = inf
    reports: list[DatedProgress] = field(default_factory=list)


@dataclass(slots=True)
class Silence:
    """A lost connection to a process that is not known to be dead. ``restored_at`` is None if it never came back."""

    island: IslandId
    incarnation: Incarnation
    heard_at: Instant
    lost_at: Instant
    restored_at: Instant | None = None

    def span(self, end: Instant) -> tuple[Instant, Instant]:
        """Return when it was last heard, and when it was heard again (or ``end``)."""
        return self.heard_at, end if self.restored_at is None else self.restored_at


@dataclass(frozen=True, slots=True)
class Adoption:
    """One adoption. ``lag`` is the time from the publication of the version until the report of its adoption."""

    island: IslandId
    lag: Duration


class Observed:
    """The fold. After ``apply`` of every step, the public attributes hold the observations in their order."""

    def __init__(self) -> None:
        self.until: Instant = 0.0
        self.seeded_at: Instant | None = None
        self.parameter_count: int | None = None
        self.router_parameter_count = 0
        self.finished = False
        self.lives: dict[LifeId, ObservedIncarnation] = {}
        self.silences: list[Silence] = []
        self.commands: list[e.CommandRequested] = []
        self.notices: list[e.NoticeReceived] = []
        self.crashes: list[tuple[IslandId, Instant, bool]] = []
        """(Island, instant, True if that is when its end was ordered and False if it is when its end was noticed)."""
        self.report_delays: list[Duration] = []
        self.pulls: list[Duration] = []
        self.merges: list[Duration] = []
        self.evaluations: list[Duration] = []
        self.evaluations_alone: list[Duration] = []
        """Durations since the job began to end, or since the request if that was later."""
        self.kills: list[Duration] = []
        """Durations from the order to kill until the island was last heard."""
        self.detections: list[Duration] = []
        """Durations from then until its end was noticed."""
        self.report_gaps: list[Duration] = []
        """Stepping time between two reports, where the second was due by time alone."""
        self.adoptions: list[Adoption] = []
        self.published: dict[tuple[IslandId, FragmentId], list[tuple[Version, Instant, bool]]] = {}
        """By recipient: (version, published at, adopted)."""
        self.arrived = self.repeated = self.unusable = 0
        self.catch_ups = self.catch_ups_failed = 0
        self.keeps_work = False
        self._last_reports: dict[LifeId, tuple[Instant, int]] = {}
        self._payloads: set[PayloadId] = set()
        self._pulled = Pulls()
        self._merging: dict[tuple[FragmentId, Version], Instant] = {}
        self._evaluating: dict[int, Instant] = {}
        self._ending_at: Instant | None = None
        self._killed: dict[LifeId, Instant] = {}
        self._silent: dict[LifeId, Silence] = {}
        self._unasked: dict[LifeId, Duration] = {}
        """Gaps between reports that may turn out to be due by time alone."""

    def apply(self, event: e.Event, effects: tuple[f.Effect, ...]) -> None:
        self.until = max(self.until, event.at)
        match event:
            case e.OuterStateSeeded():
                self.seeded_at, self.parameter_count = event.at, event.parameter_count
                self.router_parameter_count = event.router_parameter_count
            case e.IslandReported():
                self._reported(event, event.report)
            case e.ContributionArrived() | e.ContributionUnusable():
                self._contribution(event)
            case e.MergeCompleted():
                if (requested_at := self._merging.pop((event.fragment, event.version), None)) is not None:
                    self.merges.append(event.at - requested_at)
            case e.EvaluationCompleted() | e.EvaluationFailed():
                if (requested_at := self._evaluating.pop(event.global_version, None)) is not None:
                    alone = self._ending_at is not None
                    durations = self.evaluations_alone if alone else self.evaluations
                    durations.append(event.at - max(requested_at, self._ending_at or 0.0))
            case e.NoticeReceived():
                self.notices.append(event)
            case e.ConnectionLost():
                self._lost(event)
            case e.ConnectionRestored():
                if (silence := self._silent.pop((event.island, event.incarnation), None)) is not None:
                    silence.restored_at = event.at
            case e.IslandPlaced() | e.PlacementFailed():
                self._starting(event)
        for effect in effects:
            self._effect(event, effect)

    def step_times(self) -> list[Duration]:
        """Return the median step of each island that took steps, over its reports."""
        reported: dict[IslandId, list[Duration]] = {}
        for (island, _), life in self.lives.items():
            medians = (report.step_seconds_median for _, report in life.reports)
            reported.setdefault(island, []).extend(seconds for seconds in medians if seconds > 0.0)
        return [median(steps) for steps in reported.values() if steps]

    # ── requests ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _effect(self, event: e.Event, effect: f.Effect) -> None:
        at = event.at
        match effect:
            case f.PlaceIsland():
                self.lives[effect.island, effect.incarnation] = ObservedIncarnation(at + effect.wait_s)
            case f.BeginCatchUp():
                self.lives[effect.island, effect.incarnation].state_asked_at = at
                self.catch_ups += 1
            case f.StartTraining():
                life = self.lives[effect.island, effect.incarnation]
                life.training_ordered_at = at if life.training_ordered_at is None else life.training_ordered_at
            case f.KillIsland():
                key = (effect.island, effect.incarnation)
                asked_for = isinstance(event, e.CommandRequested) and isinstance(event.request, commands.Kill)
                if key not in self._killed and not asked_for and not isinstance(event, e.IslandPlaced):
                    self.crashes.append((effect.island, at, True))
                self._killed.setdefault(key, at)
            case f.StopIsland():
                if isinstance(event, e.IslandReported) and isinstance(event.report, Overdue):
                    self.crashes.append((effect.island, at, True))  # its step hung: it contributed nothing more
                self._end((effect.island, effect.incarnation), at)
            case f.MergeFragment():
                self._merging[effect.fragment, effect.version] = at
            case f.PublishFragment():
                for to in effect.recipients:
                    versions = self.published.setdefault((to.island, effect.fragment), [])
                    again = isinstance(event, e.ContributionArrived)  # published again: the first copy counts as lost
                    if not versions or versions[-1][0] < effect.version + again:
                        versions.append((effect.version, at, False))
            case f.Evaluate():
                self._evaluating[effect.global_version] = at
            case f.FlushIsland():
                self._ending_at = at if self._ending_at is None else self._ending_at
            case f.ResolveCommand(accepted=True):
                if isinstance(event, e.CommandRequested):
                    self.commands.append(event)
            case f.FinishJob():
                self.finished = True

    # ── answers ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _starting(self, event: e.IslandPlaced | e.PlacementFailed) -> None:
        life = self.lives.get((event.island, event.incarnation))
        if life is None:
            return
        if isinstance(event, e.IslandPlaced):
            life.placed_at = event.at
        else:
            life.refused_at = event.at

    def _reported(self, event: e.IslandReported, report: CarriedReport) -> None:
        life = self.lives.get((event.island, event.incarnation))
        if life is None:
            return
        match report:
            case Progress() | Adopted():
                self._trained(event, life, report)
            case Ready():
                life.ready_at = event.at
            case CaughtUp():
                life.caught_up_at = event.at
            case CatchUpFailure():
                self.catch_ups_failed += 1

    def _trained(self, event: e.IslandReported, life: ObservedIncarnation, report: Progress | Adopted) -> None:
        key = (event.island, event.incarnation)
        if report.tokens_total < self._last_reports.get(key, (0.0, 0))[1]:
            return  # repeated or overtaken
        self._settle_gap(key, report.tokens_total)
        if self._together(key, report.tokens_total):
            self.report_delays.append(event.at - self._last_reports[key][0])
        self._last_reports[key] = (event.at, report.tokens_total)
        if isinstance(report, Progress):
            latest = life.reports[-1][1] if life.reports else None
            if latest is not None and report.steps_total <= latest.steps_total:
                return
            if latest is not None:  # by the island's own clock: after a silence, many reports arrive at once
                self._unasked[key] = report.stepping_seconds - latest.stepping_seconds
            life.reports.append((event.at, report))
            return
        self.keeps_work = self.keeps_work or report.kept_tokens > 0
        versions = self.published.get((event.island, report.fragment), [])
        for n in reversed(range(len(versions))):
            version, at, adopted = versions[n]
            if version == report.version:
                if not adopted:
                    versions[n] = (version, at, True)
                    self.adoptions.append(Adoption(event.island, event.at - at))
                break

    def _contribution(self, event: e.ContributionArrived | e.ContributionUnusable) -> None:
        c = event.contribution
        key = (c.island, c.incarnation)
        if c.payload in self._payloads:
            self.repeated += 1
            return
        self._payloads.add(c.payload)
        self._settle_gap(key, c.tokens_total)
        self.arrived += isinstance(event, e.ContributionArrived)
        self.unusable += isinstance(event, e.ContributionUnusable)
        if self._pulled.had_bytes(event) and self._together(key, c.tokens_total):
            self.pulls.append(event.at - self._last_reports[key][0])
        self._last_reports[key] = (event.at, c.tokens_total)

    def _together(self, key: LifeId, tokens_total: int) -> bool:
        return key in self._last_reports and self._last_reports[key][1] == tokens_total and key not in self._silent

    def _settle_gap(self, key: LifeId, tokens_total: int) -> None:
        """Keep the gap if the progress report was due by time alone: the next report is of another boundary."""
        gap = self._unasked.pop(key, None)
        if gap is not None and self._last_reports[key][1] != tokens_total:
            self.report_gaps.append(gap)

    # ── losses ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _lost(self, event: e.ConnectionLost) -> None:
        key = (event.island, event.incarnation)
        life = self.lives.get(key)
        if life is None or event.at >= life.ended_at:
            return
        if event.dead:
            if (killed_at := self._killed.get(key)) is not None:
                died_at = max(killed_at, self._last_reports.get(key, (killed_at, 0))[0])
                self.kills.append(died_at - killed_at)
                self.detections.append(event.at - died_at)
            else:
                self.crashes.append((event.island, event.at, False))
            self._end(key, event.at)
        elif key not in self._silent:
            heard_at = self._last_reports.get(key, (life.placed_at or life.asked_at, 0))[0]
            silence = self._silent[key] = Silence(event.island, event.incarnation, heard_at, event.at)
            self.silences.append(silence)

    def _end(self, key: LifeId, at: Instant) -> None:
        life = self.lives.get(key)
        if life is not None:
            life.ended_at = min(life.ended_at, at)
