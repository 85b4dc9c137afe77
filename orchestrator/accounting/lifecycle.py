"""The lifecycle of islands: each one's state over time, derived from events and effects alone.

Responsible for: the same states as ``core.island_record`` draws, seen from outside, so that a fold needs no look into the
core and a tape is enough. One state more than the core has: ``FLUSHED``, an island that gave all its work and waits for
the job's end. Refuses to know: tokens, classes of time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from orchestrator.core import commands
from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.messages import Drained, Flushed
from orchestrator.core.vocabulary import (
    NO_INCARNATION,
    CommandId,
    Incarnation,
    Instant,
    IslandId,
    IslandState,
    IslandTimer,
    IslandTimerKind,
)

FLUSHED = "flushed"
ACTIVE = frozenset(
    {
        IslandState.PLACING.value,
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

    def __init__(self, islands: tuple[IslandId, ...]) -> None:
        self.lives = {island: IslandStatus() for island in islands}
        self.finished_at = None

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
        life.state, life.since = after, at


StateEvent = e.IslandPlaced | e.PlacementFailed | e.ConnectionLost | e.ConnectionRestored | e.IslandReported
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
