"""What the core asks the shell to do, as data. Verbs; every one is idempotent by its name.

Ordering contract: the effects of one event are carried out in the order they are returned. A shell may run them
concurrently only where they concern different fragments or different islands. Nothing here waits: whatever comes of an
effect returns as an event.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.core.saving import SavingEffect
from orchestrator.core.vocabulary import (
    NO_FIX,
    CloseReason,
    CommandId,
    Contribution,
    Epoch,
    Fix,
    FragmentId,
    Incarnation,
    Instant,
    IslandId,
    JobOutcome,
    NodeGroupId,
    PayloadId,
    RefusalReason,
    ReleaseReason,
    Version,
    WeightedPayload,
)


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Send ``TimerFired(timer, serial)`` at ``due_at`` or as soon after as possible. A new serial replaces the old."""

    timer: str
    serial: int
    due_at: Instant


# ── contributions and merges ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class AdmitContribution:
    """The contribution is part of the open round towards ``version``; keep its payload. For records, nothing to do."""

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
    Named by (epoch, fragment, version): asked twice, the second asks for the result of the first.
    """

    epoch: Epoch
    fragment: FragmentId
    version: Version
    step: int
    inputs: tuple[WeightedPayload, ...]
    reason: CloseReason
    detail: str


@dataclass(frozen=True, slots=True)
class Recipient:
    """An island that a version is published to.

    ``merged_offer`` is its latest offer of this fragment whose work is in that version or an earlier one, 0 for none: what
    it trained since that offer's snapshot is in no version, and is its own to keep or to overwrite.
    """

    island: IslandId
    incarnation: Incarnation
    merged_offer: int


@dataclass(frozen=True, slots=True)
class PublishFragment:
    """Put exactly version ``version`` of the fragment into these islands' mailboxes.

    A shell that holds a newer version already leaves this one out: its own publication follows. ``fix`` says where the
    learning-rate schedule is.
    """

    fragment: FragmentId
    version: Version
    step: int
    recipients: tuple[Recipient, ...]
    fix: Fix = NO_FIX


@dataclass(frozen=True, slots=True)
class ReleasePayload:
    payload: PayloadId
    reason: ReleaseReason


# ── islands ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class PlaceIsland:
    """Make a process for this incarnation on its node group. Answered by ``IslandPlaced`` or ``PlacementFailed``.

    With ``standby`` (a standby and its incarnation) there is one: that process is this incarnation of the island from now
    on, with the island's data, and nothing that names the standby's incarnation concerns it any more.
    """

    island: IslandId
    incarnation: Incarnation
    node_group: NodeGroupId
    reason: str
    standby: tuple[IslandId, Incarnation] | None = None


@dataclass(frozen=True, slots=True)
class WantIsland:
    """From now on the island is wanted, or is not, because the job was scaled. For records, nothing to do."""

    island: IslandId
    wanted: bool
    reason: str


@dataclass(frozen=True, slots=True)
class HoldIsland:
    """The island is not placed while its node group is cordoned. For records, nothing to do."""

    island: IslandId
    node_group: NodeGroupId
    reason: str


@dataclass(frozen=True, slots=True)
class BeginCatchUp:
    """Give the island a state, from ``donor`` (island, incarnation), or from the synchroniser when ``None``.

    Incarnation 0 is the island as the checkpoint has it that the job goes on from. ``helpers`` give pieces of it, too; what
    an earlier request brought already is kept.

    ``cursor`` is where its data goes on: the batches its earlier incarnations are known to have drawn. With ``held`` it goes
    on from the state that its process has from its time as a standby, and ``donor`` is ``None``.
    """

    island: IslandId
    incarnation: Incarnation
    donor: tuple[IslandId, Incarnation] | None
    cursor: int
    reason: str
    held: bool = False
    helpers: tuple[tuple[IslandId, Incarnation], ...] = ()


@dataclass(frozen=True, slots=True)
class StandBy:
    """The standby holds a state, keeps what is published, and steps not. For records, nothing to do."""

    island: IslandId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class StartTraining:
    """Step, from where ``fix`` says that the learning-rate schedule is; to an island that steps it says nothing."""

    island: IslandId
    incarnation: Incarnation
    fix: Fix = NO_FIX


@dataclass(frozen=True, slots=True)
class FlushIsland:
    """Step no more, offer what is left, and say ``IslandFlushed``."""

    island: IslandId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class DrainIsland:
    """Step no more, offer what is left until versions hold it, and say ``IslandDrained``. ``StartTraining`` calls it off."""

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
    """What this incarnation computes cannot be used. For records: ``StopIsland`` follows, and what else becomes of it."""

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
    """Measure Θ as it stands on the held-out split. Answered by ``EvaluationCompleted`` or ``EvaluationFailed``."""

    global_version: int


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


Effect = (
    SetTimer
    | AdmitContribution
    | RefuseContribution
    | MergeFragment
    | PublishFragment
    | ReleasePayload
    | PlaceIsland
    | WantIsland
    | HoldIsland
    | BeginCatchUp
    | StandBy
    | StartTraining
    | FlushIsland
    | DrainIsland
    | KillIsland
    | QuarantineIsland
    | StopIsland
    | Evaluate
    | ResolveCommand
    | SavingEffect
    | FinishJob
)
