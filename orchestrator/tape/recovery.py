"""Recovery of a synchroniser's state from its tape: the recorded events are replayed, and nothing is acted on.

The core is a fresh one, or that of a snapshot; then only what came after the snapshot is replayed.

Responsible for: a core in exactly the state that the dead process had. Any mismatch with the recorded effects aborts
recovery: this build would resume from a state the job never had. Also for what was pending: timers and commands. Refuses to
know: files, Θ, what was lost (``core.recovery``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.core.synchroniser import Synchroniser
from orchestrator.core.vocabulary import Epoch, Instant
from orchestrator.errors import DataError
from orchestrator.tape.driver import Fold
from orchestrator.tape.pending import Pending
from orchestrator.tape.replay import Decider, replay
from orchestrator.tape.schema import FleetHeader, Header, Mark, Tape
from orchestrator.tape.snapshot import Snapshot


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
        raise DataError(detail=f"The tape of {tape.header.job} is a fleet's: nobody's process wrote it.")
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
            detail="This build decides otherwise than the one that wrote the tape, so it cannot go on from there. "
            f"Go on with the build that wrote it.\n{again.divergence}"
        )
    at = tape.records[-1].event.at if tape.records else snapshot.at
    return Recovered(core, tape.before, tape.count, at, tuple(others), pending)
