"""Events: the facts about a job that the core decides on, in the past tense. Each is true before the core gets it.

Every event carries ``at``, the instant it was stamped on entry. The core has no other clock. Events from an island carry
its incarnation, so that a process which was replaced cannot speak for its successor.

Three groups: the life of the job, the life of an island, the life of a fragment. What an island can report is in
``messages``, what operators may ask for in ``commands``, events and effects of checkpoints in ``saving``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.core.commands import OperatorCommand
from orchestrator.core.messages import Broken, CarriedReport, Evaluated, EventReport, NotEvaluated
from orchestrator.core.saving import SavingEvent
from orchestrator.core.vocabulary import (
    NO_INCARNATION,
    UNWRITTEN_DEFAULT,
    CommandId,
    Contribution,
    Duration,
    Epoch,
    FailureExtent,
    FragmentId,
    Incarnation,
    Instant,
    IslandId,
    PayloadId,
    Preference,
    RefusalReason,
    SourceLoss,
    Timer,
    Version,
)


@dataclass(frozen=True, slots=True)
class JobStarted:
    """The first event of every tape, but for commands that say what is cordoned and how many islands are wanted."""

    at: Instant


@dataclass(frozen=True, slots=True)
class OuterStateSeeded:
    """Θ exists at version 0 for every fragment, so islands can be given a state.

    ``router_parameter_count`` of the parameters are in the last fragment, if that has a mixture's routers alone. 0: it has
    others, or the tape is of a build that did not say.
    """

    at: Instant
    parameter_count: int
    digest: str
    router_parameter_count: int = field(default=0, metadata=UNWRITTEN_DEFAULT)


@dataclass(frozen=True, slots=True)
class SynchroniserRestarted:
    """A new process of the synchroniser has replayed everything before this on the tape, and read Θ from the journal.

    Merges that the journal holds were completed on the tape before this. All that only the process knew is gone: payloads
    held, merges not journalled, calls under way. Island reports and payloads go to ``epoch`` from now on. ``damage`` says
    what could not be read at the ends of tape and journal, and was cut off. ``build`` is the release of the new process,
    and ``upgrade`` says what came of an upgrade, if one led to this.
    """

    at: Instant
    epoch: Epoch
    damage: str = ""
    build: str = field(default="", metadata=UNWRITTEN_DEFAULT)
    upgrade: str = field(default="", metadata=UNWRITTEN_DEFAULT)


@dataclass(frozen=True, slots=True)
class EvaluationCompleted:
    """Θ was measured on the held-out split. ``loss`` in nats per token; ``global_version`` is Σ_p version at the time.

    ``loss`` is over the first ``sequence_count`` held-out sequences, which took ``seconds`` (0 on tapes of earlier builds).
    ``place`` is where: the head, a node, or an island, which is then ``island``; ``remark`` says why not where it was to be.
    ``bits_per_byte`` is the loss for a byte of text, where it is known (on no tape of earlier builds); ``sources`` is by
    source, where there are several. ``preference`` is there if the job learns from pairs; ``loss`` is then in nats per pair.
    """

    at: Instant
    global_version: int
    loss: float
    sequence_count: int = 0
    seconds: Duration = 0.0
    place: str = ""
    remark: str = ""
    island: IslandId | None = None
    incarnation: Incarnation = NO_INCARNATION
    bits_per_byte: float | None = None
    sources: tuple[SourceLoss, ...] = ()
    preference: Preference | None = field(default=None, metadata=UNWRITTEN_DEFAULT)


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
class PlacementDelayed:
    """Its node group has no node, or no room, for the process, which starts once it has. That is no failure.

    ``reason`` says what was asked for and what the node group has. Repeated when the reason changes.
    """

    at: Instant
    island: IslandId
    incarnation: Incarnation
    reason: str


@dataclass(frozen=True, slots=True)
class IslandReported:
    """The island reported ``report``, which says what happened there.

    Repeated and late reports are safe: totals are of the incarnation, and every answer names what it answers. A tape calls
    this event after its report, and has the report's fields beside the island's: ``ProgressReported`` (``tape.codec``).
    """

    at: Instant
    island: IslandId
    incarnation: Incarnation
    report: CarriedReport


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

    The bytes of one that is based on too old a version are not pulled, because it is refused without them.

    ``displacement`` is the update norm ‖Θ_p − θ‖: how far the fragment is from the synchroniser's when the bytes came
    (Euclidean, over all its parameters). ``None`` where nobody measured it: without the bytes, and on older tapes.
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
    older tapes, and where only the journal knew of the merge. ``gradient_norm`` is the norm of the fragment's outer gradient
    before it was clipped; None in jobs without a limit, and where nothing was computed.

    In a mixture of experts, ``router_distance`` is how far apart the contributions had the fragment's routers, and
    ``router_travel`` how far they had moved them: root mean squares of norms, the first over pairs of contributions. None
    without routers, and for a merge of one contribution.
    """

    at: Instant
    fragment: FragmentId
    version: Version
    digest: str
    merge_seconds: Duration
    base_digest: str = ""
    journal_seconds: Duration | None = None
    gradient_norm: float | None = field(default=None, metadata=UNWRITTEN_DEFAULT)
    router_distance: float | None = field(default=None, metadata=UNWRITTEN_DEFAULT)
    router_travel: float | None = field(default=None, metadata=UNWRITTEN_DEFAULT)


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
class TimerFired:
    """A deadline set by ``SetTimer`` has passed. A timer that comes late carries the serial it belongs to."""

    at: Instant
    timer: Timer
    serial: int


# ── what chaos did ────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class FaultInjected:
    """Chaos injected a fault. For records, nothing to decide: a kill is decided on as the ``CommandRequested`` beside it.

    ``kind`` and what follows ``incarnation`` are the flat form of a fault (``core.faults``). A fault of no island
    (kill_synchroniser) has an empty one, and incarnation 0. Tapes of earlier builds lack the last three fields, or the last.
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


ObservedEvent = IslandPlaced | PlacementFailed | PlacementDelayed | ConnectionLost | ConnectionRestored | NoticeReceived
"""What others than the island saw of it."""
IslandEvent = IslandReported | ObservedEvent
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


def report_of(event: object) -> CarriedReport | None:
    """Return what an island reported by this event; ``None`` where it is another event."""
    return event.report if isinstance(event, IslandReported) else None


def event_of(report: EventReport, at: Instant, island: IslandId, incarnation: Incarnation) -> Event:
    """Return the event that this report of an island becomes. The live link, the laboratory and the simulation share it."""
    match report:
        case Evaluated():
            return EvaluationCompleted(
                at,
                report.global_version,
                report.loss,
                report.sequence_count,
                report.seconds,
                place=island,
                island=island,
                incarnation=incarnation,
                bits_per_byte=report.bits_per_byte,
                sources=report.sources,
                preference=report.preference,
            )
        case NotEvaluated():
            return EvaluationFailed(at, report.global_version, f"on {island}: {report.reason}")
        case Broken():
            reason = f"its own code failed: {report.detail}"
            return ConnectionLost(at, island, incarnation, True, reason, extent=report.extent)
        case _:
            return IslandReported(at, island, incarnation, report)
