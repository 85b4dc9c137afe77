"""The driver of a core: decide, record, fold. Live, simulated and replayed jobs all step through this one loop.

    effects = core.handle(event);  sink.append(record);  for fold in folds: fold.apply(event, effects)

Responsible for: that nothing the core decided is acted on before it is recorded (the caller acts on what ``step``
returns). Refuses to know: where events come from and who acts. When the core fails, the error carries the recent story.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

from orchestrator.core.effects import Effect
from orchestrator.core.events import Event
from orchestrator.tape.schema import Digest, FleetHeader, Header, Record, Tape, encode_header, encode_record

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
