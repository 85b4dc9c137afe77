"""Pending timers and answered commands, as a fold over a job's tape."""

from __future__ import annotations

from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.vocabulary import CommandId, Timer

CommandOutcome = tuple[e.CommandRequested | e.FaultInjected, f.ResolveCommand | None]


class Pending:
    """``timers`` were set and have not fired; ``commands`` are all that were requested, each with its outcome so far."""

    started: bool
    _timers: dict[Timer, f.SetTimer]
    commands: dict[CommandId, CommandOutcome]

    def __init__(self) -> None:
        self.started = False
        self._timers = {}
        self.commands = {}

    def apply(self, event: e.Event, effects: tuple[f.Effect, ...]) -> None:
        if isinstance(event, e.TimerFired):
            waiting = self._timers.get(event.timer)
            if waiting is not None and waiting.serial == event.serial:
                del self._timers[event.timer]
        elif isinstance(event, (e.CommandRequested, e.FaultInjected)):
            self.commands.setdefault(event.command, (event, None))
        elif isinstance(event, e.JobStarted):
            self.started = True
        for effect in effects:
            if isinstance(effect, f.SetTimer):
                self._timers[effect.timer] = effect
            elif isinstance(effect, f.ResolveCommand) and effect.command in self.commands:
                self.commands[effect.command] = (self.commands[effect.command][0], effect)

    @property
    def timers(self) -> tuple[f.SetTimer, ...]:
        return tuple(self._timers[timer] for timer in sorted(self._timers, key=str))
