"""Events: the facts about a job that the core decides on, in the past tense. Each is true before the core gets it.

Every event carries ``at``, the instant it was stamped on entry. The core has no other clock. Events from an island carry
its incarnation, so that a process which was replaced cannot speak for its successor.

Three groups: the life of the job, the life of an island, the life of a fragment. What operators may ask for is in
``commands``, events and effects of checkpoints in ``saving``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.core.commands import OperatorCommand
from orchestrator.core.saving import IslandNotSaved, IslandSaved, SavingEvent
from orchestrator.core.vocabulary import (
    NO_ANCHOR,
    NO_FLAWS,
    UNWRITTEN_DEFAULT,
    CommandId,
    Contribution,
    DataFlaws,
    Duration,
    Epoch,
    FailureExtent,
    FragmentId,
    Incarnation,
    Instant,
    IslandId,
    PayloadId,
    RefusalReason,
    ScheduleAnchor,
    SourceLoss,
    Version,
)


@dataclass(frozen=True, slots=True)
class JobStarted:
    """The first event of every tape, but for commands that say what is cordoned and how many islands are wanted."""

    at: Instant


@dataclass(frozen=True, slots=True)
class OuterStateSeeded:
    """Θ exists at version 0 for every fragment, so islands can be given a state."""

    at: Instant
    parameter_count: int
    digest: str


@dataclass(frozen=True, slots=True)
class SynchroniserRestarted:
    """A new process of the synchroniser has replayed everything before this on the tape, and read Θ from the journal.

    Merges that the journal holds were completed on the tape before this. All that only the process knew is gone: payloads
    held, merges not journalled, calls under way. Island reports and payloads go to ``epoch`` from now on. ``damage`` says
    what could not be read at the ends of tape and journal, and was cut off.
    """

    at: Instant
    epoch: Epoch
    damage: str = ""


@dataclass(frozen=True, slots=True)
class EvaluationCompleted:
    """Θ was measured on the held-out split. ``loss`` in nats per token; ``global_version`` is Σ_p version at the time.

    ``loss`` is over the first ``sequence_count`` held-out sequences, which took ``seconds`` (0 on tapes of earlier builds).
    ``place`` is where: the head, a node, or an island, which is then ``island``; ``remark`` says why not where it was to be.
    ``bits_per_byte`` is the loss for a byte of text, where it is known (on no tape of earlier builds); ``sources`` is by
    source, where there are several.
    """

    at: Instant
    global_version: int
    loss: float
    sequence_count: int = 0
    seconds: Duration = 0.0
    place: str = ""
    remark: str = ""
    island: IslandId | None = None
    incarnation: Incarnation = Incarnation(0)
    bits_per_byte: float | None = None
    sources: tuple[SourceLoss, ...] = ()


@dataclass(frozen=True, slots=True)
class EvaluationFailed:
    at: Instant
    global_version: int
    reason: str


@dataclass(frozen=True, slots=True)
class CommandRequested:
    """An operator asked for ``request``. It is carried out once, however often it arrives: ``command`` is its id.

    Answered by one ``ResolveCommand``. On a tape it is called after its request: ``KillRequested``.
    """

    at: Instant
    command: CommandId
    caller: str
    request: OperatorCommand


# ── the life of an island ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class IslandPlaced:
    """A process for this incarnation exists and answers."""

    at: Instant
    island: IslandId
    incarnation: Incarnation
    node: str
    pid: int


@dataclass(frozen=True, slots=True)
class PlacementFailed:
    """No process could be made. ``reason`` says what was asked for and what the node group has."""

    at: Instant
    island: IslandId
    incarnation: Incarnation
    reason: str


@dataclass(frozen=True, slots=True)
class IslandReady:
    """The island has built and compiled its model; it holds no state worth keeping yet."""

    at: Instant
    island: IslandId
    incarnation: Incarnation
    device_count: int
    start_seconds: Duration


@dataclass(frozen=True, slots=True)
class IslandCaughtUp:
    """The island holds a state: parameters, inner optimizer, and the version vector it belongs to.

    ``donor`` is the peer it came from, ``None`` for the synchroniser. ``versions[p]`` is the version of fragment p. Where it
    came in chunks, ``sources[p]`` gave fragment p, and ``donor`` is the one whose clock was furthest.
    """

    at: Instant
    island: IslandId
    incarnation: Incarnation
    donor: IslandId | None
    versions: tuple[Version, ...]
    step: int
    transfer_seconds: Duration
    sources: tuple[IslandId, ...] = ()


@dataclass(frozen=True, slots=True)
class CatchUpFailed:
    at: Instant
    island: IslandId
    incarnation: Incarnation
    donor: IslandId | None
    reason: str


@dataclass(frozen=True, slots=True)
class ProgressReported:
    """The island trained. Totals are of this incarnation, so a repeated report changes nothing.

    ``stepping_seconds`` is the time spent inside inner steps, ``gap_max_seconds`` the longest time between the ends of
    two neighbouring steps since the previous report, ``loss`` the training loss of the last step in nats per token,
    ``flaws`` what of its text was not read as it lies in its files.
    """

    at: Instant
    island: IslandId
    incarnation: Incarnation
    step: int
    steps_total: int
    tokens_total: int
    stepping_seconds: Duration
    step_seconds_median: Duration
    gap_max_seconds: Duration
    loss: float
    flaws: DataFlaws = field(default=NO_FLAWS, metadata=UNWRITTEN_DEFAULT)


@dataclass(frozen=True, slots=True)
class StepOverdue:
    """The step that the island is in has taken ``seconds`` so far, far more than the ``usual_seconds`` of its median step.

    Said by another thread of its process, which counts only the time in which itself ran. Without a median, 0, it is one of
    the first steps of the process, an evaluation, or a boundary. Said again as the time doubles, and at the limit
    (``StepLimits``).
    """

    at: Instant
    island: IslandId
    incarnation: Incarnation
    seconds: Duration
    usual_seconds: Duration


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """The island stopped answering. ``dead`` is true only when its process is known to be gone, not guessed.

    ``cut_off`` says that where it runs cannot be reached: nothing there answers, not even by refusing. ``extent`` is more
    than the incarnation where the island said so itself, before its process ended.
    """

    at: Instant
    island: IslandId
    incarnation: Incarnation
    dead: bool
    reason: str
    cut_off: bool = False
    extent: FailureExtent = FailureExtent.INCARNATION


@dataclass(frozen=True, slots=True)
class ConnectionRestored:
    at: Instant
    island: IslandId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class IslandFlushed:
    """Asked to stop, the island has offered everything it had and steps no more."""

    at: Instant
    island: IslandId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class IslandDrained:
    """Asked to drain, the island steps no more, and has adopted versions that all its work went into."""

    at: Instant
    island: IslandId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class NoticeReceived:
    """A node of the island is about to go: its cloud, its queue or an operator said so. The process still answers.

    ``cause`` says who announced it. The node goes ``seconds`` after this; ``None`` where nobody said when.
    """

    at: Instant
    island: IslandId
    incarnation: Incarnation
    cause: str
    seconds: Duration | None


# ── the life of a fragment ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ContributionArrived:
    """The payload's bytes are held on the synchroniser's side, their checksum is good, and every value is a number.

    ``displacement`` is the update norm ‖Θ_p − θ‖: how far the fragment is from the synchroniser's when the bytes came
    (Euclidean, over all its parameters). ``None`` where nobody measured it: on tapes written before it was.
    """

    at: Instant
    contribution: Contribution
    displacement: float | None = None


@dataclass(frozen=True, slots=True)
class ContributionUnusable:
    """The bytes came but cannot be merged: corrupt, of the wrong shape, or not finite. They are not held."""

    at: Instant
    contribution: Contribution
    reason: RefusalReason
    detail: str


@dataclass(frozen=True, slots=True)
class MergeCompleted:
    """Fragment ``fragment`` now stands at ``version``; ``digest`` names its bytes, ``base_digest`` those it was made from.

    True only once the merge would survive the synchroniser's death. Tapes of builds without a journal know no base.
    ``journal_seconds`` is the part of ``merge_seconds`` that this took; None where nobody measured it: in simulations, on
    older tapes, and where only the journal knew of the merge.
    """

    at: Instant
    fragment: FragmentId
    version: Version
    digest: str
    merge_seconds: Duration
    base_digest: str = ""
    journal_seconds: Duration | None = None


@dataclass(frozen=True, slots=True)
class MergeFailed:
    """The outer step gave something that is not finite, which was thrown away: the fragment stands where it stood.

    ``inputs`` tell this attempt from a later one to make the same version.
    """

    at: Instant
    fragment: FragmentId
    version: Version
    inputs: tuple[PayloadId, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class FragmentAdopted:
    """The island took a published version at a step boundary.

    ``kept_tokens`` are those trained on this fragment that survive the adoption (0 when the published value replaces
    the island's own); the rest of its tokens since the last adoption that are not in a contribution are overwritten.
    ``fix`` is the latest schedule anchor that it knows; older tapes lack it.
    """

    at: Instant
    island: IslandId
    incarnation: Incarnation
    fragment: FragmentId
    version: Version
    step: int
    tokens_total: int
    kept_tokens: int
    fix: ScheduleAnchor = NO_ANCHOR


@dataclass(frozen=True, slots=True)
class TimerFired:
    """A deadline set by ``SetTimer`` has passed. A timer that comes late carries the serial it belongs to."""

    at: Instant
    timer: str
    serial: int


# ── what chaos did ────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class FaultInjected:
    """Chaos injected a fault. For records, nothing to decide: a kill is decided on as the ``CommandRequested`` beside it.

    ``kind`` is a kind of ``chaos.plan.Kind``, or continue, which ends what chaos did to the island; ``duration`` and what
    follows are its ``FaultSpec``. A fault of no island (kill_synchroniser) has an empty one, and incarnation 0. Tapes of
    earlier builds lack the last three fields, or the last.
    """

    at: Instant
    command: CommandId
    caller: str
    kind: str
    island: IslandId
    incarnation: Incarnation
    duration: Duration
    bytes_per_second: float = 0.0
    payloads: int = 0
    host: int | None = None


IslandEvent = (
    IslandPlaced
    | PlacementFailed
    | IslandReady
    | IslandCaughtUp
    | CatchUpFailed
    | ProgressReported
    | StepOverdue
    | ConnectionLost
    | ConnectionRestored
    | IslandFlushed
    | IslandDrained
    | NoticeReceived
    | FragmentAdopted
)
IncarnationEvent = IslandEvent | IslandSaved | IslandNotSaved
Event = (
    JobStarted
    | OuterStateSeeded
    | EvaluationCompleted
    | EvaluationFailed
    | IslandEvent
    | ContributionArrived
    | ContributionUnusable
    | MergeCompleted
    | MergeFailed
    | TimerFired
    | FaultInjected
    | SynchroniserRestarted
    | SavingEvent
    | CommandRequested
)
