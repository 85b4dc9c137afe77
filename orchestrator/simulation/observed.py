"""Observations of the world in which a tape was made, gathered in one pass: durations, speeds, and what went wrong.

A fold over (event, effects) like those of ``accounting``, of a live job or a simulated one. Responsible for pairing each
request with its answer and each report with the one before it; ``fit`` makes a world of what was seen. Refuses to guess.

Two reports of an island that speak of the same tokens were sent together, at one boundary: the time between them is the
carriage of the second alone.

Extraction of a tape's faults, to be injected again: commands, notices, crashes, silences, lost publications.

An operator's command is repeated as it was given. A crash is set where its end was heard of, less the usual time until that
is heard. A silence begins where the island's own gap says (it was frozen), or where it was last heard (it was cut off).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from orchestrator.accounting.series import median
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
    JobPolicy,
    NodeGroupId,
    PayloadId,
    Version,
)
from orchestrator.simulation.plan import Fault, FaultKind, WorldPlan
from orchestrator.simulation.speeds import Stop

LifeId = tuple[IslandId, Incarnation]


DatedProgress = tuple[Instant, Progress]
"""A report with the instant at which it was heard."""


@dataclass(slots=True)
class ObservedIncarnation:
    """One incarnation: when each part of its start was asked for and answered, and everything it reported."""

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
    """A connection that was lost without its process known to be dead. ``restored_at`` is ``None`` if it never came back."""

    island: IslandId
    incarnation: Incarnation
    heard_at: Instant
    lost_at: Instant
    restored_at: Instant | None = None

    def span(self, end: Instant) -> tuple[Instant, Instant]:
        """From when it was last heard until it was heard again, or until ``end``."""
        return self.heard_at, end if self.restored_at is None else self.restored_at


@dataclass(frozen=True, slots=True)
class Adoption:
    """``lag`` is from the publication of a version to hearing of its adoption."""

    island: IslandId
    lag: Duration


class Observed:
    """The fold. ``apply`` every step; then everything public is what was seen, in the order it was."""

    def __init__(self) -> None:
        self.until: Instant = 0.0
        self.seeded_at: Instant | None = None
        self.finished = False
        self.lives: dict[LifeId, ObservedIncarnation] = {}
        self.silences: list[Silence] = []
        self.commands: list[e.CommandRequested] = []
        self.notices: list[e.NoticeReceived] = []
        self.crashes: list[tuple[IslandId, Instant, bool]] = []
        """Island, when, and whether that is when it was asked for (and not when its end was heard of)."""
        self.report_delays: list[Duration] = []
        self.pulls: list[Duration] = []
        self.merges: list[Duration] = []
        self.evaluations: list[Duration] = []
        self.evaluations_alone: list[Duration] = []
        """From when the job began to end, or from being asked for if that was later."""
        self.kills: list[Duration] = []
        """From asking for a kill until the island was last heard."""
        self.detections: list[Duration] = []
        """From there until its end was."""
        self.report_gaps: list[Duration] = []
        """Stepping time between two reports of which the second was asked for by nothing but time."""
        self.adoptions: list[Adoption] = []
        self.published: dict[tuple[IslandId, FragmentId], list[tuple[Version, Instant, bool]]] = {}
        """To whom: version, when, and whether it was adopted."""
        self.arrived = self.repeated = self.unusable = 0
        self.catch_ups = self.catch_ups_failed = 0
        self.keeps_work = False
        self._last_reports: dict[LifeId, tuple[Instant, int]] = {}
        self._payloads: set[PayloadId] = set()
        self._merging: dict[tuple[FragmentId, Version], Instant] = {}
        self._evaluating: dict[int, Instant] = {}
        self._ending_at: Instant | None = None
        self._killed: dict[LifeId, Instant] = {}
        self._silent: dict[LifeId, Silence] = {}
        self._unasked: dict[LifeId, Duration] = {}
        """Gaps between reports of which it is not yet known whether something made the island say more."""

    def apply(self, event: e.Event, effects: tuple[f.Effect, ...]) -> None:
        self.until = max(self.until, event.at)
        match event:
            case e.OuterStateSeeded():
                self.seeded_at = event.at
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

    # ── what was asked ────────────────────────────────────────────────────────────────────────────────────────────

    def _effect(self, event: e.Event, effect: f.Effect) -> None:
        at = event.at
        match effect:
            case f.PlaceIsland():
                self.lives[effect.island, effect.incarnation] = ObservedIncarnation(at)
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
                    self.crashes.append((effect.island, at, True))  # it gave nothing since its step began
                self._end((effect.island, effect.incarnation), at)
            case f.MergeFragment():
                self._merging[effect.fragment, effect.version] = at
            case f.PublishFragment():
                for to in effect.recipients:
                    versions = self.published.setdefault((to.island, effect.fragment), [])
                    again = isinstance(event, e.ContributionArrived)  # the core holds the one before for lost
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

    # ── what was answered ─────────────────────────────────────────────────────────────────────────────────────────

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
            return  # told again, or overtaken
        self._settle_gap(key, report.tokens_total)
        if self._together(key, report.tokens_total):
            self.report_delays.append(event.at - self._last_reports[key][0])
        self._last_reports[key] = (event.at, report.tokens_total)
        if isinstance(report, Progress):
            latest = life.reports[-1][1] if life.reports else None
            if latest is not None and report.steps_total <= latest.steps_total:
                return
            if latest is not None:  # by its own clock: after a silence, much comes at once
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
        if self._together(key, c.tokens_total):
            self.pulls.append(event.at - self._last_reports[key][0])
        self._last_reports[key] = (event.at, c.tokens_total)

    def _together(self, key: LifeId, tokens_total: int) -> bool:
        return key in self._last_reports and self._last_reports[key][1] == tokens_total and key not in self._silent

    def _settle_gap(self, key: LifeId, tokens_total: int) -> None:
        """A progress report was due by time alone if the next report is of another boundary."""
        gap = self._unasked.pop(key, None)
        if gap is not None and self._last_reports[key][1] != tokens_total:
            self.report_gaps.append(gap)

    # ── what went wrong ───────────────────────────────────────────────────────────────────────────────────────────

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


DETECT_S: Duration = 0.01
"""For a crash when no death of known time was seen: a broken connection is noticed within this."""
LONG_NOTICE_S: Duration = 600.0
"""For a notice that did not say when."""
STEPS_TO_ADOPT = 3
"""An island that took so many steps after a version should have come, and did not adopt it, never got it."""


class FaultExtraction:
    """``stops`` are those of each island, by its own reports."""

    def __init__(self, seen: Observed, stops: Mapping[IslandId, Sequence[Stop]], policy: JobPolicy) -> None:
        self._seen, self._stops, self._policy = seen, stops, policy
        self.detect_s = median(seen.detections) if seen.detections else DETECT_S

    @property
    def silence_s(self) -> Duration:
        """From when nothing got through until that was noticed."""
        seen = [silence.lost_at - self._began(silence) for silence in self._seen.silences]
        return median(seen) if seen else WorldPlan(()).silence_s

    def _stop_in(self, silence: Silence) -> Stop | None:
        since, until = silence.span(self._seen.until)
        overlapping = [stop for stop in self._stops[silence.island] if stop.since < until and since < stop.until]
        return max(overlapping, key=lambda stop: stop.until - stop.since, default=None)

    def _began(self, silence: Silence) -> Instant:
        """When the island stopped, by its own gap; without one, a little after it was last heard."""
        stop = self._stop_in(silence)
        if stop is not None and silence.restored_at is not None:
            return min(silence.lost_at, silence.restored_at - (stop.until - stop.since))
        return silence.heard_at

    def faults(self) -> tuple[Fault, ...]:
        """Commands, notices, crashes and silences, in time order."""
        silence_s = self.silence_s
        faults = [fault for command in self._seen.commands if (fault := self._commanded(command)) is not None]
        for notice in self._seen.notices:
            lasts = LONG_NOTICE_S if notice.seconds is None else max(0.0, notice.seconds)
            faults.append(Fault(notice.at, FaultKind.NOTICE, notice.island, lasts))
        for island, at, is_request_time in self._seen.crashes:
            faults.append(Fault(at if is_request_time else max(0.0, at - self.detect_s), FaultKind.CRASH, island))
        for silence in self._seen.silences:
            at = max(0.0, silence.lost_at - silence_s)
            until = silence.restored_at
            if until is None:  # never heard again: silent until well after it was given up
                until = silence.lost_at + 2.0 * self._policy.suspect_timeout_s + silence_s
            stood = silence.restored_at is None or self._stop_in(silence) is not None
            kind = FaultKind.FREEZE if stood else FaultKind.CUT
            faults.append(Fault(at, kind, silence.island, until - at))
        return tuple(sorted(faults, key=lambda fault: (fault.at, fault.island, fault.kind)))

    def _commanded(self, command: e.CommandRequested) -> Fault | None:
        """None for a command about a node group that the job has no island in, and for one that strikes nobody."""
        match command.request:
            case commands.Kill(island, restart):
                return Fault(command.at, FaultKind.KILL if restart else FaultKind.KILL_AND_KEEP_AWAY, island)
            case commands.Drain(island):
                return Fault(command.at, FaultKind.DRAIN, island)
            case commands.Readd(island):
                return Fault(command.at, FaultKind.READD, island)
            case commands.Cordon(node_group):
                return self._about_group(command.at, node_group, FaultKind.CORDON)
            case commands.Uncordon(node_group):
                return self._about_group(command.at, node_group, FaultKind.UNCORDON)
            case commands.Scale(node_group, count):
                return self._about_group(command.at, node_group, FaultKind.SCALE, count)
            case commands.Cancel():
                return Fault(command.at, FaultKind.CANCEL, self._policy.islands[0].island)
            case _:
                return None

    def _about_group(self, at: Instant, node_group: NodeGroupId, kind: FaultKind, count: int = 0) -> Fault | None:
        there = [plan.island for plan in self._policy.islands if plan.node_group == node_group]
        return Fault(at, kind, there[0], count=count) if there else None

    def publication_loss(self) -> float:
        """Of the versions that an island had time to adopt before the next came, those it did not."""
        lags = sorted(adoption.lag for adoption in self._seen.adoptions)
        usual = lags[len(lags) * 19 // 20] if lags else 0.0
        lost = adopted = 0
        for (island, _), versions in self._seen.published.items():
            followers = [at for _, at, _ in versions[1:]]
            for (_, at, taken), until in zip(versions, [*followers, inf], strict=True):
                if taken:
                    adopted += 1
                elif until - at > usual and self._could_adopt(island, at + usual, until):
                    lost += 1
        return lost / (lost + adopted) if lost else 0.0

    def _could_adopt(self, island: IslandId, at: Instant, until: Instant) -> bool:
        for (name, _), life in self._seen.lives.items():
            if (
                name == island
                and life.training_ordered_at is not None
                and life.training_ordered_at <= at < life.ended_at
            ):
                after = [report for heard_at, report in life.reports if at < heard_at < until]
                quiet = any(s.island == island and s.heard_at < until for s in self._seen.silences if s.lost_at > at)
                return not quiet and bool(after) and after[-1].steps_total - after[0].steps_total >= STEPS_TO_ADOPT
        return False
