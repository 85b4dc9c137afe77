"""The driver of a core: decide, record, fold. Live, simulated and replayed jobs all step through this one loop.

    effects = core.handle(event);  sink.append(record);  for fold in folds: fold.apply(event, effects)

Responsible for: that nothing the core decided is acted on before it is recorded (the caller acts on what ``step``
returns). Refuses to know: where events come from and who acts. When the core fails, the error carries the recent story.

Pending timers and answered commands, as a fold over a job's tape.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.effects import Effect
from orchestrator.core.events import Event
from orchestrator.core.vocabulary import CommandId, Timer
from orchestrator.tape.schema import Digest, FleetHeader, Header, Record, Tape, encode_header, encode_record

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


STORY_LENGTH = 12
"""Steps shown when something breaks: enough to see one round of every fragment of a small job."""


class Core(Protocol):
    """``core.synchroniser.Synchroniser``, as far as the loop is concerned."""

    def handle(self, event: Event) -> tuple[Effect, ...]: ...


CoreT = TypeVar("CoreT", bound=Core)


class Fold(Protocol):
    """An account of every step, which decides nothing."""

    def apply(self, event: Event, effects: tuple[Effect, ...]) -> None: ...


class Sink(Protocol):
    """The destination of records. ``append`` returns once the record is as durable as this sink makes any."""

    def append(self, record: Record) -> None: ...


class Driver(Generic[CoreT]):
    """Steps one core. ``count`` steps have been taken, those of an earlier process included."""

    def __init__(self, core: CoreT, folds: Iterable[Fold], sink: Sink, count: int = 0) -> None:
        self.core = core
        self.folds = tuple(folds)
        self.sink = sink
        self.count = count
        self._recent: deque[Record] = deque(maxlen=STORY_LENGTH)

    def step(self, event: Event) -> tuple[Effect, ...]:
        """Decide on one event, record the decision, and return it to be acted on."""
        try:
            effects = self.core.handle(event)
        except Exception as error:
            error.add_note(f"while deciding on step {self.count + 1}: {event}\nbefore it:\n{story_of(self._recent)}")
            raise
        self.count += 1
        record = Record(self.count, event, effects)
        self._recent.append(record)
        self.sink.append(record)
        for fold in self.folds:
            fold.apply(event, effects)
        return effects


class MemorySink:
    """Keeps the records; ``tape`` makes them one."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def append(self, record: Record) -> None:
        self.records.append(record)

    def tape(self, header: Header) -> Tape:
        return Tape(header, tuple(self.records))


class DigestSink:
    """Keeps only the digest, as a written tape would have it."""

    def __init__(self, header: Header | FleetHeader) -> None:
        self.digest = Digest()
        self.digest.add(encode_header(header))

    def append(self, record: Record) -> None:
        self.digest.add(encode_record(record))


def story_of(records: Iterable[Record]) -> str:
    """Steps as text for people, one line for the event and one for each effect."""
    lines = []
    for record in records:
        lines.append(f"  {record.n:>6}  {record.event}")
        lines += [f"          → {effect}" for effect in record.effects]
    return "\n".join(lines) or "  (nothing)"
