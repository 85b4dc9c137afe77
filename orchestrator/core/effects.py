"""Effects: the requests of the core to its shell, as data. They are verbs, and each is idempotent by its name.

Ordering contract: the effects of one event are carried out in the order they are returned. A shell may run them
concurrently only where they concern different fragments or different islands. Nothing here waits: whatever comes of an
effect returns as an event. Every shell, live, simulated or a test's, is a ``Shell``: an effect that one of them does not
handle fails the type checker.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, assert_never

from orchestrator.core.commands import UNCHANGED, ChangedSettings
from orchestrator.core.saving import (
    BeginCheckpoint,
    DropCheckpoint,
    HandOver,
    RestoreFragments,
    SavingEffect,
    SealCheckpoint,
)
from orchestrator.core.vocabulary import (
    NO_ANCHOR,
    NO_INCARNATION,
    UNWRITTEN_DEFAULT,
    CloseReason,
    CommandId,
    Contribution,
    Duration,
    Epoch,
    FragmentId,
    Incarnation,
    Instant,
    IslandId,
    JobOutcome,
    Life,
    MergedOffer,
    NodeGroupId,
    PayloadId,
    RefusalReason,
    ReleaseReason,
    ScheduleAnchor,
    Timer,
    Version,
    WeightedPayload,
)


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Send ``TimerFired(timer, serial)`` at ``due_at`` or as soon after as possible. A new serial replaces the old."""

    timer: Timer
    serial: int
    due_at: Instant


# ── contributions and merges ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class AdmitContribution:
    """The contribution is part of the open round towards ``version``; keep its payload."""

    contribution: Contribution
    version: Version


@dataclass(frozen=True, slots=True)
class RefuseContribution:
    """The contribution is not used. ``ReleasePayload`` follows if its bytes are held."""

    contribution: Contribution
    reason: RefusalReason
    detail: str


@dataclass(frozen=True, slots=True)
class MergeFragment:
    """Merge these payloads into fragment ``fragment``, take the outer step to ``version``, make it durable.

    ``step`` is the highest logical step among the contributions: islands that receive the result raise theirs to it.
    The outer learning rate is ``outer_lr_ratio`` of the specification's. Named by (epoch, fragment, version): asked twice,
    the second asks for the result of the first.
    """

    epoch: Epoch
    fragment: FragmentId
    version: Version
    step: int
    inputs: tuple[WeightedPayload, ...]
    reason: CloseReason
    detail: str
    outer_lr_ratio: float = field(default=1.0, metadata=UNWRITTEN_DEFAULT)


@dataclass(frozen=True, slots=True)
class Recipient:
    """An island that a version is published to.

    ``merged_offer`` is its latest offer of this fragment whose work is in that version or an earlier one, 0 for none: what
    it trained since that offer's snapshot is in no version, and is its own to keep or to overwrite. After a rollback it is
    ``AllOffers`` (2⁶² on a tape): the island keeps nothing, whatever the rule of adoption.
    """

    island: IslandId
    incarnation: Incarnation
    merged_offer: MergedOffer


@dataclass(frozen=True, slots=True)
class PublishFragment:
    """Put exactly version ``version`` of the fragment into these islands' mailboxes.

    A shell that holds a newer version already leaves this one out: its own publication follows. ``fix`` anchors
    the learning-rate schedule.
    """

    fragment: FragmentId
    version: Version
    step: int
    recipients: tuple[Recipient, ...]
    fix: ScheduleAnchor = NO_ANCHOR


@dataclass(frozen=True, slots=True)
class ReleasePayload:
    payload: PayloadId
    reason: ReleaseReason


# ── islands ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class PlaceIsland:
    """Make a process for this incarnation on its node group. Answered by ``IslandPlaced`` or ``PlacementFailed``.

    ``PlacementDelayed`` may come first, if its node group has no node or no room.

    With ``standby`` (a standby and its incarnation) there is one: that process is this incarnation of the island from now
    on, with the island's data, and nothing that names the standby's incarnation concerns it any more.

    ``wait_s`` is how long to wait before the process is made.
    """

    island: IslandId
    incarnation: Incarnation
    node_group: NodeGroupId
    reason: str
    standby: tuple[IslandId, Incarnation] | None = None
    wait_s: Duration = field(default=0.0, metadata=UNWRITTEN_DEFAULT)


@dataclass(frozen=True, slots=True)
class WantIsland:
    """Note that the job, which was scaled, wants the island from now on, or does not."""

    island: IslandId
    wanted: bool
    reason: str


@dataclass(frozen=True, slots=True)
class HoldIsland:
    """The island is not placed while its node group is cordoned."""

    island: IslandId
    node_group: NodeGroupId
    reason: str


@dataclass(frozen=True, slots=True)
class FromStandby:
    """The state that the island's process has from its time as a standby."""


@dataclass(frozen=True, slots=True)
class FromCheckpoint:
    """The island's own state in the checkpoint that the job goes on from."""


@dataclass(frozen=True, slots=True)
class FromLeft:
    """The state that ``incarnation`` of the island left in a file of the machine, and Θ for what it has moved past."""

    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class FromPeers:
    """The donor's state. ``helpers`` give chunks of it, too; chunks of an earlier request stay."""

    donor: Life
    helpers: tuple[Life, ...] = ()


@dataclass(frozen=True, slots=True)
class FromSynchroniser:
    """Θ, and an inner optimizer that begins."""


StateSource = FromStandby | FromCheckpoint | FromLeft | FromPeers | FromSynchroniser


@dataclass(frozen=True, slots=True)
class BeginCatchUp:
    """Give the island a state: ``source`` says which, and ``state_from`` makes the effect of it.

    ``cursor`` is where its data goes on: the batches its earlier incarnations are known to have drawn. ``donor``, ``held``
    and ``helpers`` are the tape's encoding of the source: an incarnation 0 of the island itself is its checkpoint, an
    earlier one the state that this one left.
    """

    island: IslandId
    incarnation: Incarnation
    donor: Life | None
    cursor: int
    reason: str
    held: bool = False
    helpers: tuple[Life, ...] = ()

    @property
    def source(self) -> StateSource:
        if self.held:
            return FromStandby()
        if self.donor is None:
            return FromSynchroniser()
        if self.donor[0] != self.island:
            return FromPeers(self.donor, self.helpers)
        return FromCheckpoint() if self.donor[1] == NO_INCARNATION else FromLeft(self.donor[1])


def state_from(
    source: StateSource, island: IslandId, incarnation: Incarnation, cursor: int, reason: str
) -> BeginCatchUp:
    match source:
        case FromStandby():
            return BeginCatchUp(island, incarnation, None, cursor, reason, held=True)
        case FromCheckpoint():
            return BeginCatchUp(island, incarnation, (island, NO_INCARNATION), cursor, reason)
        case FromLeft(left):
            return BeginCatchUp(island, incarnation, (island, left), cursor, reason)
        case FromPeers(donor, helpers):
            return BeginCatchUp(island, incarnation, donor, cursor, reason, helpers=helpers)
        case FromSynchroniser():
            return BeginCatchUp(island, incarnation, None, cursor, reason)
        case _:
            assert_never(source)


@dataclass(frozen=True, slots=True)
class StandBy:
    """The standby holds a state, keeps what is published, and steps not."""

    island: IslandId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class StartTraining:
    """Take inner steps; ``fix`` anchors the learning-rate schedule. An island that steps already goes on unchanged."""

    island: IslandId
    incarnation: Incarnation
    fix: ScheduleAnchor = NO_ANCHOR


@dataclass(frozen=True, slots=True)
class AdjustIsland:
    """Offer each fragment every ``interval_steps`` from the next boundary on, and step at ``lr_ratio`` of the schedule.

    These are the settings that an operator changed, and the latest of them count. Given to an island that trains, and with
    every later order to train. The island keeps ``changed`` for a synchroniser that has lost its tape.
    """

    island: IslandId
    incarnation: Incarnation
    lr_ratio: float
    interval_steps: int
    changed: ChangedSettings = field(default=UNCHANGED, metadata=UNWRITTEN_DEFAULT)


@dataclass(frozen=True, slots=True)
class FlushIsland:
    """Step no more, offer what is left, and report ``Flushed``."""

    island: IslandId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class DrainIsland:
    """Step no more, offer what is left until versions hold it, and report ``Drained``. ``StartTraining`` calls it off."""

    island: IslandId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class KillIsland:
    """SIGKILL the process, if there is one; its death returns as ``ConnectionLost``."""

    island: IslandId
    incarnation: Incarnation
    reason: str


@dataclass(frozen=True, slots=True)
class QuarantineIsland:
    """The work of this incarnation cannot be used. ``StopIsland`` follows, and whatever becomes of the island."""

    island: IslandId
    incarnation: Incarnation
    reason: RefusalReason
    detail: str


@dataclass(frozen=True, slots=True)
class StopIsland:
    """End the process: the job is over, or this incarnation was replaced. No answer is expected."""

    island: IslandId
    incarnation: Incarnation
    reason: str


# ── the job ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Measure Θ as it stands on the held-out split. Answered by ``EvaluationCompleted`` or ``EvaluationFailed``.

    Where it would take longer than ``limit_s``, fewer sequences are measured; ``None``: all, however long that takes. On
    ``island``, if one is named, at its first boundary at which it holds Θ at ``versions`` or later ones.
    """

    global_version: int
    limit_s: Duration | None = None
    island: IslandId | None = None
    incarnation: Incarnation = NO_INCARNATION
    versions: tuple[Version, ...] = ()


@dataclass(frozen=True, slots=True)
class ResolveCommand:
    """The outcome of an operator's command. ``accepted`` false: nothing was done, and ``detail`` says why."""

    command: CommandId
    accepted: bool
    detail: str


@dataclass(frozen=True, slots=True)
class FinishJob:
    """The last effect of a job: write the report, keep Θ, let go of everything."""

    outcome: JobOutcome
    reason: str


Note = AdmitContribution | RefuseContribution | WantIsland | HoldIsland | StandBy | QuarantineIsland
"""A decision noted for readers of the tape. There is nothing to carry out."""
Effect = (
    SetTimer
    | MergeFragment
    | PublishFragment
    | ReleasePayload
    | PlaceIsland
    | BeginCatchUp
    | StartTraining
    | AdjustIsland
    | FlushIsland
    | DrainIsland
    | KillIsland
    | StopIsland
    | Evaluate
    | ResolveCommand
    | SavingEffect
    | FinishJob
    | Note
)


# ── carrying them out ─────────────────────────────────────────────────────────────────────────────────────────────


class Shell(Protocol):
    """The interpreter of effects: one method for each but notes. A shell that ignores an effect says why."""

    def set_timer(self, effect: SetTimer) -> None: ...
    def merge_fragment(self, effect: MergeFragment) -> None: ...
    def publish_fragment(self, effect: PublishFragment) -> None: ...
    def release_payload(self, effect: ReleasePayload) -> None: ...
    def place_island(self, effect: PlaceIsland) -> None: ...
    def begin_catch_up(self, effect: BeginCatchUp) -> None: ...
    def start_training(self, effect: StartTraining) -> None: ...
    def adjust_island(self, effect: AdjustIsland) -> None: ...
    def flush_island(self, effect: FlushIsland) -> None: ...
    def drain_island(self, effect: DrainIsland) -> None: ...
    def kill_island(self, effect: KillIsland) -> None: ...
    def stop_island(self, effect: StopIsland) -> None: ...
    def evaluate(self, effect: Evaluate) -> None: ...
    def resolve_command(self, effect: ResolveCommand) -> None: ...
    def begin_checkpoint(self, effect: BeginCheckpoint) -> None: ...
    def seal_checkpoint(self, effect: SealCheckpoint) -> None: ...
    def drop_checkpoint(self, effect: DropCheckpoint) -> None: ...
    def restore_fragments(self, effect: RestoreFragments) -> None: ...
    def hand_over(self, effect: HandOver) -> None: ...
    def finish_job(self, effect: FinishJob) -> None: ...


def carry_out(effect: Effect, shell: Shell) -> None:
    """Hand the effect to the shell's method for it. The most frequent come first."""
    match effect:
        case ReleasePayload():
            shell.release_payload(effect)
        case AdmitContribution() | RefuseContribution() | WantIsland() | HoldIsland() | StandBy() | QuarantineIsland():
            pass  # a note
        case PublishFragment():
            shell.publish_fragment(effect)
        case MergeFragment():
            shell.merge_fragment(effect)
        case SetTimer():
            shell.set_timer(effect)
        case PlaceIsland():
            shell.place_island(effect)
        case BeginCatchUp():
            shell.begin_catch_up(effect)
        case StartTraining():
            shell.start_training(effect)
        case AdjustIsland():
            shell.adjust_island(effect)
        case FlushIsland():
            shell.flush_island(effect)
        case DrainIsland():
            shell.drain_island(effect)
        case KillIsland():
            shell.kill_island(effect)
        case StopIsland():
            shell.stop_island(effect)
        case Evaluate():
            shell.evaluate(effect)
        case ResolveCommand():
            shell.resolve_command(effect)
        case BeginCheckpoint():
            shell.begin_checkpoint(effect)
        case SealCheckpoint():
            shell.seal_checkpoint(effect)
        case DropCheckpoint():
            shell.drop_checkpoint(effect)
        case RestoreFragments():
            shell.restore_fragments(effect)
        case HandOver():
            shell.hand_over(effect)
        case FinishJob():
            shell.finish_job(effect)
        case _:
            assert_never(effect)
