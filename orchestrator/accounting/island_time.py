"""One island's time, put into classes so that they always add up to the time it was wanted.

Waiting states (placing, starting, suspect, …) are measured by the clock of the events. Within training, the island's own
``stepping_seconds`` say how much of the time it stepped, and its evaluations how long it measured Θ instead; the rest of its
time in training it stalled. What an island that died in training had not yet reported is counted as stepping in vain.

Refuses to know: tokens. What became of the stepping time (productive, discarded, in flight) is ``goodput``'s to split.

The lifecycle of islands: each one's state over time, derived from events and effects alone.

Responsible for: the same states as ``core.island_record`` draws, seen from outside, so that a fold needs no look into the
core and a tape is enough. One state more than the core has: ``FLUSHED``, an island that gave all its work and waits for
the job's end. Refuses to know: tokens, classes of time.

Recovery times of islands, by part: a recovery time is published with its parts or not at all.

    killed_at ──detect──▶ lost ──place──▶ placed ──start──▶ ready ──connect + transfer──▶ caught up ──first_merge──▶ merged

``killed_at`` is the operator's command, or, without one, the island's last report; for an island that an operator kept
away, it is the command to re-add it. ``place`` holds the back-off and every
attempt that failed on the way; ``connect`` is the wait for a donor and for it to answer, ``transfer`` the moving of bytes.
A recovery is complete when a merge includes work of the new incarnation. Until then it keeps the longest gap between two
steps of islands that were there all the time, which is what the loss of one island costs the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, get_args

from orchestrator.core import commands
from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.events import EvaluationCompleted
from orchestrator.core.messages import CaughtUp, Drained, Flushed, LeftState, Progress, Ready
from orchestrator.core.saving import SurvivingIsland
from orchestrator.core.vocabulary import (
    NO_INCARNATION,
    CommandId,
    Duration,
    FragmentId,
    Incarnation,
    Instant,
    IslandId,
    IslandState,
    IslandTimer,
    IslandTimerKind,
    PayloadId,
    Version,
)

FLUSHED = "flushed"
ACTIVE = frozenset(
    {
        IslandState.PLACING.value,
        IslandState.WAITING.value,
        IslandState.STARTING.value,
        IslandState.CATCHING_UP.value,
        IslandState.TRAINING.value,
        IslandState.STANDBY.value,
        IslandState.SUSPECT.value,
        IslandState.DRAINING.value,
        FLUSHED,
    }
)
"""States in which a process of the current incarnation may exist."""
KEPT_AWAY = frozenset({IslandState.STOPPED.value, IslandState.DRAINED.value})
"""States that an operator wanted."""
GONE = KEPT_AWAY | {IslandState.LOST.value, IslandState.FAILED.value, IslandState.CORDONED.value}
ABSENT = "absent"
"""Before an island was first placed."""


@dataclass(frozen=True, slots=True)
class Change:
    """An island went from one state to another. ``incarnation`` is the one it is in afterwards."""

    at: Instant
    island: IslandId
    incarnation: Incarnation
    before: str
    after: str


@dataclass(slots=True)
class IslandStatus:
    """The status of one island. ``wanted`` is false while an operator keeps it away."""

    state: str = ABSENT
    since: Instant = 0.0
    incarnation: Incarnation = NO_INCARNATION
    before_suspect: str = ABSENT
    wanted: bool = True


class Lifecycle:
    """The statuses of these islands, or standbys; events of others are ignored. ``apply`` returns what changed, in order."""

    lives: dict[IslandId, IslandStatus]
    finished_at: Instant | None
    training_count: int

    def __init__(self, islands: tuple[IslandId, ...]) -> None:
        self.lives = {island: IslandStatus() for island in islands}
        self.finished_at = None
        self.training_count = 0

    def apply(self, event: e.Event, effects: tuple[f.Effect, ...]) -> list[Change]:
        changes: list[Change] = []
        if self.finished_at is not None:
            return changes
        if isinstance(event, _STATE_EVENTS):
            self._reported(event, effects, changes)
        elif isinstance(event, e.CommandRequested) and _accepted(event.command, effects):
            self._commanded(event.request)
        for effect in effects:
            if isinstance(effect, f.FinishJob):
                self.finished_at = event.at
            elif not isinstance(effect, _OF_ISLANDS) or effect.island not in self.lives:
                continue
            elif isinstance(effect, f.HoldIsland):
                self._move(event.at, effect.island, self.lives[effect.island], IslandState.CORDONED.value, changes)
            elif isinstance(effect, f.WantIsland):
                self._want(event.at, effect, changes)
            else:
                self._decided(event.at, effect, effects, changes)
        return changes

    def _commanded(self, request: commands.OperatorCommand) -> None:
        if isinstance(request, commands.IslandCommand) and request.island in self.lives:
            readded = isinstance(request, commands.Readd)
            self.lives[request.island].wanted = request.restart if isinstance(request, commands.Kill) else readded

    def _want(self, at: Instant, effect: f.WantIsland, changes: list[Change]) -> None:
        life = self.lives[effect.island]
        life.wanted = effect.wanted
        if not effect.wanted and life.state in GONE - KEPT_AWAY:
            self._move(at, effect.island, life, IslandState.STOPPED.value, changes)

    def _reported(self, event: StateEvent, effects: tuple[f.Effect, ...], changes: list[Change]) -> None:
        if isinstance(event, e.IslandReported) and not isinstance(event.report, (Flushed, Drained)):
            return
        life = self.lives.get(event.island)
        if life is None or life.incarnation != event.incarnation or life.state not in ACTIVE:
            return
        after = life.state
        match event:
            case e.IslandPlaced():
                after = IslandState.STARTING.value
            case e.PlacementDelayed():
                after = IslandState.WAITING.value
            case e.PlacementFailed() | e.ConnectionLost(dead=True):
                after = _gone(event.island, life, effects)
            case e.ConnectionLost() if life.state != IslandState.SUSPECT.value:
                life.before_suspect, after = life.state, IslandState.SUSPECT.value
            case e.ConnectionRestored() if life.state == IslandState.SUSPECT.value:
                after = life.before_suspect
            case e.IslandReported(report=Drained()) if any(isinstance(effect, f.StopIsland) for effect in effects):
                after = (IslandState.LOST if _waits(event.island, effects) else IslandState.DRAINED).value
            case e.IslandReported(report=Flushed() | Drained()) if life.state == IslandState.SUSPECT.value:
                life.before_suspect = FLUSHED
            case e.IslandReported(report=Flushed() | Drained()):
                after = FLUSHED
        self._move(event.at, event.island, life, after, changes)

    def _decided(self, at: Instant, effect: StateEffect, effects: tuple[f.Effect, ...], changes: list[Change]) -> None:
        life = self.lives[effect.island]
        if isinstance(effect, f.PlaceIsland):
            life.incarnation = effect.incarnation
            self._move(at, effect.island, life, IslandState.PLACING.value, changes)
        elif life.incarnation != effect.incarnation or life.state not in ACTIVE:
            return
        elif isinstance(effect, f.BeginCatchUp):
            self._move(at, effect.island, life, IslandState.CATCHING_UP.value, changes)
        elif isinstance(effect, f.StandBy):
            self._move(at, effect.island, life, IslandState.STANDBY.value, changes)
        elif isinstance(effect, f.StartTraining):
            self._move(at, effect.island, life, IslandState.TRAINING.value, changes)
        elif isinstance(effect, f.DrainIsland):
            self._move(at, effect.island, life, IslandState.DRAINING.value, changes)
        else:
            finishing = any(isinstance(other, f.FinishJob) for other in effects)
            after = IslandState.STOPPED.value if finishing else _gone(effect.island, life, effects)
            self._move(at, effect.island, life, after, changes)

    def _move(self, at: Instant, island: IslandId, life: IslandStatus, after: str, changes: list[Change]) -> None:
        if after == life.state:
            return
        changes.append(Change(at, island, life.incarnation, life.state, after))
        training = IslandState.TRAINING.value
        self.training_count += (after == training) - (life.state == training)
        life.state, life.since = after, at


StateEvent = (
    e.IslandPlaced | e.PlacementFailed | e.PlacementDelayed | e.ConnectionLost | e.ConnectionRestored | e.IslandReported
)
StateEffect = f.PlaceIsland | f.BeginCatchUp | f.StandBy | f.StartTraining | f.DrainIsland | f.StopIsland
_STATE_EVENTS = get_args(StateEvent)
_OF_ISLANDS = (f.HoldIsland, f.WantIsland, *get_args(StateEffect))


def _gone(island: IslandId, life: IslandStatus, effects: tuple[f.Effect, ...]) -> str:
    """The state of an island that is gone: waiting to be placed again (a timer was set for it), kept away, or given up."""
    if not life.wanted:
        return IslandState.STOPPED.value
    return IslandState.LOST.value if _waits(island, effects) else IslandState.FAILED.value


def _waits(island: IslandId, effects: tuple[f.Effect, ...]) -> bool:
    """Return whether a timer was set that places the island again."""
    timer = IslandTimer(IslandTimerKind.BACKOFF, island)
    return any(isinstance(effect, f.SetTimer) and effect.timer == timer for effect in effects)


def _accepted(command: CommandId, effects: tuple[f.Effect, ...]) -> bool:
    return any(isinstance(x, f.ResolveCommand) and x.command == command and x.accepted for x in effects)


_TRAINING, _SUSPECT = IslandState.TRAINING.value, IslandState.SUSPECT.value
_DRAINING, _CORDONED = IslandState.DRAINING.value, IslandState.CORDONED.value
_WAITING = IslandState.WAITING.value
_WAITS = {
    IslandState.PLACING.value: "placing",
    IslandState.STARTING.value: "compiling",
    IslandState.CATCHING_UP.value: "catching up",
}
EVALUATING = "evaluating"
NOT_STEPPING = "alive, not stepping"
ENDING = "waiting for the job to end"
DRAINING = "draining"
AWAY = "away, waiting to be placed"
HELD = "away, its node group is cordoned"
NO_NODE = "away, its node group has no node free"
SILENT = "no connection"
DIED = "lost with the island"
_LOST, _SILENT_TIME = ("discarded", DIED), ("down", SILENT)

FREEZE_RATIO, FREEZE_MIN_S = 4.0, 1.0
"""A gap between steps this many times the median, and this long, was no step: the process was stopped."""

Key = tuple[str, str]
"""A class of goodput (``accounting.goodput``) and the cause within it."""


@dataclass(slots=True)
class Closed:
    """Time split as far as this file can: ``stepping`` is still to be split by what became of its tokens."""

    stepping: Duration = 0.0
    waits: dict[Key, Duration] = field(default_factory=dict)

    def add(self, key: Key, seconds: Duration) -> None:
        if seconds > 0.0:
            self.waits[key] = self.waits.get(key, 0.0) + seconds


@dataclass(slots=True)
class IslandTime:
    """The clock of one island. Feed it every change of state and every report, then ask for ``closed(at)``."""

    state: str = ABSENT
    since: Instant = 0.0
    incarnation: Incarnation = NO_INCARNATION
    past: Closed = field(default_factory=Closed)
    training: Duration = 0.0
    suspect: Duration = 0.0
    stepping: Duration = 0.0
    evaluating: Duration = 0.0
    measured_version: int = -1
    reported_stepping: Duration = 0.0
    reported_steps: int = 0
    heard_at: Instant = 0.0
    trained_until: Instant = 0.0
    stepped_before: tuple[Incarnation, Duration] = (NO_INCARNATION, 0.0)
    """The latest incarnation that is over, and how long it had stepped by its last report."""

    def change(self, at: Instant, after: str, incarnation: Incarnation) -> None:
        """The island is in ``after`` from now on."""
        self._charge(self.past, at)
        if self.state == _TRAINING:
            self.training += at - self.since
            self.trained_until = at
        elif self.state == _SUSPECT:
            self.suspect += at - self.since
        if after == _TRAINING and not self.training:
            self.heard_at = at
        if after in GONE and self.state not in GONE:
            self._settle(self.past, self.training, self.suspect, died=self.state not in (FLUSHED, _DRAINING))
            self.stepped_before = (self.incarnation, self.reported_stepping)
            self.training = self.suspect = self.stepping = self.evaluating = self.reported_stepping = 0.0
            self.reported_steps = 0
        self.state, self.since, self.incarnation = after, at, incarnation

    def report(self, at: Instant, incarnation: Incarnation, report: Progress) -> None:
        """Take over how long the island says it has stepped, but for the part in which it was frozen."""
        if incarnation != self.incarnation or self.state in GONE:
            return
        fresh = report.stepping_seconds - self.reported_stepping
        if fresh <= 0.0:
            return
        expected = (report.steps_total - self.reported_steps) * report.step_seconds_median
        excess = min(report.gap_max_seconds - report.step_seconds_median, fresh - expected)
        is_frozen = report.gap_max_seconds > max(FREEZE_MIN_S, FREEZE_RATIO * report.step_seconds_median)
        self.stepping += fresh - (max(0.0, excess) if is_frozen else 0.0)
        self.reported_stepping, self.reported_steps = report.stepping_seconds, report.steps_total
        self.heard_at = at

    def go_on(self, survivor: SurvivingIsland) -> None:
        """Count only what the island steps from now on: an earlier tape had the rest."""
        self.reported_stepping, self.reported_steps = survivor.stepping_seconds, survivor.steps_total

    def continued(self, left: LeftState) -> None:
        """Count as stepping what the earlier incarnation stepped unheard, not as lost with it or silent. At most once."""
        incarnation, reported = self.stepped_before
        if incarnation != left.incarnation:
            return
        self.stepped_before = (NO_INCARNATION, 0.0)
        unheard = max(0.0, left.stepping_seconds - reported)
        for key in (_LOST, _SILENT_TIME):
            stepped = min(unheard, self.past.waits.get(key, 0.0))
            self.past.stepping += stepped
            unheard -= stepped
            if stepped:
                self.past.waits[key] -= stepped

    def measured(self, event: EvaluationCompleted) -> None:
        """The island measured Θ between two steps. One that steps no more waited anyhow; a repeated event counts once."""
        is_news = event.global_version > self.measured_version
        if self.state == _TRAINING and event.incarnation == self.incarnation and is_news:
            self.evaluating += event.seconds
            self.measured_version = event.global_version

    def closed(self, at: Instant) -> Closed:
        """All time until ``at``, without changing anything."""
        total = Closed(self.past.stepping, dict(self.past.waits))
        self._charge(total, at)
        open_time = at - self.since
        training = self.training + (open_time if self.state == _TRAINING else 0.0)
        suspect = self.suspect + (open_time if self.state == _SUSPECT else 0.0)
        self._settle(total, training, suspect, died=False)
        return total

    def _charge(self, into: Closed, at: Instant) -> None:
        """Book the open span, if its class follows from the state alone."""
        seconds = at - self.since
        if self.state in _WAITS:
            kind = "starting" if self.incarnation <= 1 else "recovering"
            into.add((kind, _WAITS[self.state]), seconds)
        elif self.state == _WAITING:
            into.add(("down", NO_NODE), seconds)
        elif self.state == FLUSHED:
            into.add(("stalled", ENDING), seconds)
        elif self.state == _DRAINING:
            into.add(("stalled", DRAINING), seconds)
        elif self.state in GONE - KEPT_AWAY:
            into.add(("down", HELD if self.state == _CORDONED else AWAY), seconds)

    def _settle(self, into: Closed, training: Duration, suspect: Duration, *, died: bool) -> None:
        """Book the incarnation's time in training and under suspicion: what it stepped, and the rest."""
        stepping = min(self.stepping, training + suspect)
        idle = max(0.0, training - stepping)
        unreported = min(idle, max(0.0, self.trained_until - self.heard_at)) if died else 0.0
        into.stepping += stepping
        into.add(_LOST, unreported)
        evaluating = min(self.evaluating, idle - unreported)
        into.add(("stalled", EVALUATING), evaluating)
        into.add(("stalled", NOT_STEPPING), idle - unreported - evaluating)
        into.add(_SILENT_TIME, suspect - max(0.0, stepping - training))


# ── recovery times ────────────────────────────────────────────────────────────────────────────────────────────────────────


PARTS = ("detect", "place", "start", "connect", "transfer", "first_merge")


@dataclass(slots=True)
class Recovery:
    """One absence. ``incarnation`` is the latest attempt to come back."""

    island: IslandId
    killed_at: Instant
    lost_at: Instant
    incarnation: Incarnation
    attempts: int = 0
    placed_at: Instant | None = None
    ready_at: Instant | None = None
    caught_up_at: Instant | None = None
    transfer: Duration = 0.0
    merged_at: Instant | None = None
    others_gap_max: Duration | None = None

    def parts(self) -> dict[str, Duration]:
        """The parts that are over."""
        parts = {"detect": self.lost_at - self.killed_at}
        if self.placed_at is not None:
            parts["place"] = self.placed_at - self.lost_at
        if self.placed_at is not None and self.ready_at is not None:
            parts["start"] = self.ready_at - self.placed_at
        if self.ready_at is not None and self.caught_up_at is not None:
            catch_up_seconds = self.caught_up_at - self.ready_at
            parts["transfer"] = min(self.transfer, catch_up_seconds)
            parts["connect"] = catch_up_seconds - parts["transfer"]
        if self.caught_up_at is not None and self.merged_at is not None:
            parts["first_merge"] = self.merged_at - self.caught_up_at
        return {name: parts[name] for name in PARTS if name in parts}

    def summary(self) -> dict[str, Any]:
        complete = self.merged_at is not None
        return {
            "island": self.island,
            "incarnation": self.incarnation,
            "attempts": self.attempts,
            "killed_at": self.killed_at,
            "complete": complete,
            "parts": self.parts(),
            "total": self.merged_at - self.killed_at if self.merged_at is not None else None,
            "others_gap_max_s": self.others_gap_max,
        }


class Recoveries:
    """All absences of a job, in the order they were noticed; one that is open has its place in ``all`` by its island."""

    all: list[Recovery]
    _open: dict[IslandId, int]
    _killed_at: dict[IslandId, Instant]
    _heard_at: dict[IslandId, Instant]
    _payloads: dict[PayloadId, IslandId]
    _merging: dict[tuple[FragmentId, Version], list[IslandId]]

    def __init__(self) -> None:
        self.all = []
        self._open = {}
        self._killed_at = {}
        self._heard_at = {}
        self._payloads = {}
        self._merging = {}

    def apply(self, event: e.Event, effects: tuple[f.Effect, ...], changes: list[Change]) -> None:
        if isinstance(event, e.IslandReported) and isinstance(event.report, Progress):
            self._heard_at[event.island] = event.at
        elif isinstance(event, e.MergeCompleted):
            self._merged(event)
        for effect in effects:
            if isinstance(effect, f.KillIsland):
                self._killed_at.setdefault(effect.island, event.at)
        for change in changes:
            self._changed(change)
        if self._open:
            self._advance(event)
            self._follow(effects)

    def _changed(self, change: Change) -> None:
        if change.before == ABSENT or (change.before in GONE and change.incarnation == 1):
            return  # it comes for the first time
        if change.after in GONE and change.before not in GONE:
            if change.after in KEPT_AWAY:
                self._open.pop(change.island, None)
            elif change.island not in self._open:
                killed_at = self._killed_at.get(change.island, self._heard_at.get(change.island, change.at))
                self._begin(Recovery(change.island, killed_at, change.at, change.incarnation))
            self._killed_at.pop(change.island, None)
        elif change.before in GONE:
            if change.island not in self._open:  # it was kept away until now
                self._begin(Recovery(change.island, change.at, change.at, change.incarnation))
            recovery = self.all[self._open[change.island]]
            recovery.incarnation, recovery.attempts = change.incarnation, recovery.attempts + 1
            recovery.placed_at = recovery.ready_at = recovery.caught_up_at = None

    def _begin(self, recovery: Recovery) -> None:
        self._open[recovery.island] = len(self.all)
        self.all.append(recovery)

    def _advance(self, event: e.Event) -> None:
        if not isinstance(event, (e.IslandPlaced, e.IslandReported)):
            return
        if (
            isinstance(event, e.IslandReported)
            and isinstance(event.report, Progress)
            and event.island not in self._open
        ):
            for place in self._open.values():
                longest = self.all[place].others_gap_max or 0.0
                self.all[place].others_gap_max = max(longest, event.report.gap_max_seconds)
        recovery = self._of(event.island)
        if recovery is None or recovery.incarnation != event.incarnation:
            return
        if isinstance(event, e.IslandPlaced):
            recovery.placed_at = event.at
        elif isinstance(event.report, Ready):
            recovery.ready_at = event.at
        elif isinstance(event.report, CaughtUp):
            recovery.caught_up_at, recovery.transfer = event.at, event.report.transfer_seconds

    def _follow(self, effects: tuple[f.Effect, ...]) -> None:
        """Remember which payloads, and then which merges, hold work of an island that is coming back."""
        for effect in effects:
            if isinstance(effect, f.AdmitContribution):
                c = effect.contribution
                if (recovery := self._of(c.island)) is not None and recovery.incarnation == c.incarnation:
                    self._payloads[c.payload] = c.island
            elif isinstance(effect, f.MergeFragment):
                back = [self._payloads[item.payload] for item in effect.inputs if item.payload in self._payloads]
                if back:
                    self._merging[effect.fragment, effect.version] = back
            elif isinstance(effect, f.ReleasePayload):
                self._payloads.pop(effect.payload, None)

    def _merged(self, event: e.MergeCompleted) -> None:
        for island in self._merging.pop((event.fragment, event.version), ()):
            recovery = self._of(island)
            if recovery is not None and recovery.caught_up_at is not None:
                recovery.merged_at = event.at
                del self._open[island]

    def _of(self, island: IslandId) -> Recovery | None:
        """The island's open one."""
        place = self._open.get(island)
        return None if place is None else self.all[place]
