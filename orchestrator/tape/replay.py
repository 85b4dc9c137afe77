"""Replay: a tape's events go to a fresh core of this build, and every effect is compared with the recorded one.

Responsible for: finding the first step at which the two part, and telling its story. Refuses to act on any effect, and
to go on after a divergence: from there on the recorded events answer requests that were never made. A changed policy is
for the same reason no question for replay; simulate it instead.

Recovery of a synchroniser's state from its tape: the recorded events are replayed, and nothing is acted on.

The core is a fresh one, or that of a snapshot; then only what came after the snapshot is replayed.

Responsible for: a core in exactly the state that the dead process had. Any mismatch with the recorded effects aborts
recovery: this build would resume from a state the job never had. Also for what was pending: timers and commands. Refuses to
know: files, Θ, what was lost (``core.recovery``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from orchestrator.core.effects import Effect
from orchestrator.core.events import Event
from orchestrator.core.synchroniser import Synchroniser
from orchestrator.core.vocabulary import Epoch, Instant
from orchestrator.elastic import ElasticJobs, FleetEffect, FleetEvent
from orchestrator.errors import DataError
from orchestrator.tape.driver import STORY_LENGTH, Fold, Pending, story_of
from orchestrator.tape.schema import Digest, FleetHeader, Header, Mark, Record, Tape, encode_header, encode_record
from orchestrator.tape.snapshot import Snapshot


class Decider(Protocol):
    """A job's core or a fleet's: whichever the header asks for understands the messages of its own tape."""

    def handle(self, event: Any) -> tuple[Any, ...]: ...


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first step where the builds disagree: what was recorded, what this build decides, what came before."""

    n: int
    event: Event | FleetEvent
    recorded: tuple[Effect | FleetEffect, ...]
    decided: tuple[Effect | FleetEffect, ...]
    failure: str
    story: str

    def __str__(self) -> str:
        decided = [self.failure] if self.failure else [f"    {effect}" for effect in self.decided]
        return "\n".join(
            [
                f"step {self.n}: {self.event}",
                "  recorded:",
                *([f"    {effect}" for effect in self.recorded] or ["    (nothing)"]),
                "  this build decides:",
                *(decided or ["    (nothing)"]),
                "  the steps before it:",
                self.story,
            ]
        )


@dataclass(frozen=True, slots=True)
class Replay:
    """``matching`` steps out of ``steps`` agree. ``digest`` is that of a tape written by this build up to there."""

    steps: int
    matching: int
    divergence: Divergence | None
    digest: str

    @property
    def exact(self) -> bool:
        return self.divergence is None


def fresh_core(header: Header | FleetHeader) -> Decider:
    """The core a tape with this header began with."""
    if isinstance(header, FleetHeader):
        return ElasticJobs(header.policy)
    return Synchroniser(header.policy, epoch=Epoch(header.epoch))


def replay(
    tape: Tape, folds: Iterable[Fold] = (), core_of: Callable[[Header | FleetHeader], Decider] = fresh_core
) -> Replay:
    """Replay a tape against this build, up to the first divergence; ``folds`` see every step that agrees."""
    core, folds = core_of(tape.header), tuple(folds)
    digest, recent = Digest(), deque[Record](maxlen=STORY_LENGTH)
    digest.add(encode_header(tape.header))
    for record in tape.records:
        event: Any = record.event
        decided: tuple[Any, ...] = ()
        failure = ""
        try:
            decided = core.handle(event)
        except Exception as error:  # a build that fails where the recorded one decided has diverged
            failure = f"    {type(error).__name__}: {error}"
        if failure or decided != record.effects:
            divergence = Divergence(record.n, record.event, record.effects, decided, failure, story_of(recent))
            return Replay(len(tape.records), record.n - 1, divergence, digest.hex())
        recent.append(record)
        digest.add(encode_record(Record(record.n, record.event, decided)))
        for fold in folds:
            fold.apply(event, decided)
    return Replay(len(tape.records), len(tape.records), None, digest.hex())


@dataclass(frozen=True, slots=True)
class Recovered:
    """``core`` and ``folds`` after the last record, ``count`` of them, at ``at``; ``pending`` goes on being folded, too.

    A snapshot stood for the first ``before`` of the records.
    """

    core: Synchroniser
    before: int
    count: int
    at: Instant
    folds: tuple[Fold, ...]
    pending: Pending

    @property
    def started(self) -> bool:
        """False for a job whose synchroniser died before it began."""
        return self.pending.started

    @property
    def next_epoch(self) -> Epoch:
        return Epoch(self.core.state.epoch + 1)


def recover(tape: Tape, folds: Iterable[Fold] = (), snapshot: Snapshot | None = None) -> Recovered:
    """The state at the tape's end. ``snapshot`` is that of a tape which lacks its beginning; its folds go on, then.

    Raises DataError, with the story, where this build decides otherwise than the one that wrote the tape.
    """
    if isinstance(tape.header, FleetHeader):
        raise DataError(detail=f"The tape of {tape.header.job} belongs to a fleet; no process of a job wrote it.")
    if snapshot is None or not tape.before:
        snapshot = Snapshot(
            Mark(0, 0, ""), 0.0, Synchroniser(tape.header.policy, Epoch(tape.header.epoch)), (Pending(), *folds)
        )
    core, (pending, *others) = snapshot.core, snapshot.folds
    assert snapshot.mark.count == tape.before
    assert isinstance(pending, Pending)

    def this_core(_: Header | FleetHeader) -> Decider:
        return core

    again = replay(tape, snapshot.folds, this_core)
    if again.divergence is not None:
        raise DataError(
            detail="This build decides differently from the one that wrote the tape, so it cannot continue from there. "
            f"Continue with the build that wrote it.\n{again.divergence}"
        )
    at = tape.records[-1].event.at if tape.records else snapshot.at
    return Recovered(core, tape.before, tape.count, at, tuple(others), pending)
