"""What a synchroniser that died knew, from its tape: its events, fed to a core, without acting on anything.

The core is a fresh one, or that of a snapshot and then only what came behind it is fed.

Responsible for: that the new core stands where the old one stood (what it decides is compared with what was recorded,
and one difference ends it, for this build would then go on from a state in which nobody was), and for what the old
process had promised and not kept: timers, answers to commands. Refuses to know: files, Θ, what was lost (``core.recovery``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.core.synchroniser import Synchroniser
from orchestrator.core.vocabulary import Epoch, Instant
from orchestrator.errors import DataError
from orchestrator.tape.driver import Fold
from orchestrator.tape.promises import Promises
from orchestrator.tape.replay import Decider, replay
from orchestrator.tape.schema import FleetHeader, Header, Mark, Tape
from orchestrator.tape.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Remembered:
    """``core`` and ``folds`` after the last record, ``count`` of them, at ``at``; ``promises`` go on being folded, too.

    For the first ``before`` of the records a snapshot stood.
    """

    core: Synchroniser
    before: int
    count: int
    at: Instant
    folds: tuple[Fold, ...]
    promises: Promises

    @property
    def started(self) -> bool:
        """False for a job whose synchroniser died before it began."""
        return self.promises.started

    @property
    def next_epoch(self) -> Epoch:
        return Epoch(self.core.state.epoch + 1)


def remember(tape: Tape, folds: Iterable[Fold] = (), snapshot: Snapshot | None = None) -> Remembered:
    """What was known at the tape's end. ``snapshot`` is that of a tape which lacks its beginning; its folds go on, then.

    Raises DataError, with the story, where this build decides otherwise than the one that wrote the tape.
    """
    if isinstance(tape.header, FleetHeader):
        raise DataError(detail=f"The tape of {tape.header.job} is a fleet's: nobody's process wrote it.")
    if snapshot is None or not tape.before:
        snapshot = Snapshot(
            Mark(0, 0, ""), 0.0, Synchroniser(tape.header.policy, Epoch(tape.header.epoch)), (Promises(), *folds)
        )
    core, (promises, *others) = snapshot.core, snapshot.folds
    assert snapshot.mark.count == tape.before
    assert isinstance(promises, Promises)

    def this_core(_: Header | FleetHeader) -> Decider:
        return core

    again = replay(tape, snapshot.folds, this_core)
    if again.divergence is not None:
        raise DataError(
            detail="This build decides otherwise than the one that wrote the tape, so it cannot go on from there. "
            f"Go on with the build that wrote it.\n{again.divergence}"
        )
    at = tape.records[-1].event.at if tape.records else snapshot.at
    return Remembered(core, tape.before, tape.count, at, tuple(others), promises)
