"""What may happen to a job, in the past tense. An event is already true when the core hears of it.

Every event carries ``at``, the instant it was stamped on entry. The core has no other clock. Events from an island carry
its incarnation, so that a process which was replaced cannot speak for its successor.

Three groups: the life of the job, the life of an island, the life of a fragment. What operators may ask for is in
``commands``, what islands give in ``contributions``, what is made of it in ``outer_steps``.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.core.commands import OperatorCommand
from orchestrator.core.contributions import ContributionArrived as ContributionArrived
from orchestrator.core.contributions import ContributionUnusable as ContributionUnusable
from orchestrator.core.outer_steps import MergeCompleted as MergeCompleted
from orchestrator.core.outer_steps import MergeFailed as MergeFailed
from orchestrator.core.restart import SynchroniserRestarted as SynchroniserRestarted
from orchestrator.core.saving import SavingEvent
from orchestrator.core.vocabulary import (
    NO_FIX,
    CommandId,
    Duration,
    Fix,
    FragmentId,
    Incarnation,
    Instant,
    IslandId,
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
class EvaluationCompleted:
    """Θ was measured on the held-out split. ``loss`` in nats per token; ``global_version`` is Σ_p version at the time."""

    at: Instant
    global_version: int
    loss: float


@dataclass(frozen=True, slots=True)
class EvaluationFailed:
    at: Instant
    global_version: int
    reason: str


@dataclass(frozen=True, slots=True)
class CommandRequested:
    """An operator asked for ``request``. It is done once, however often it is said: ``command`` is its id.

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
    came in pieces, ``sources[p]`` gave fragment p, and ``donor`` is the one whose clock was furthest.
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
    two neighbouring steps since the previous report, ``loss`` the training loss of the last step in nats per token.
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


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """The island stopped answering. ``dead`` is true only when its process is known to be gone, not guessed.

    ``cut_off`` says that where it runs cannot be reached: nothing there answers, not even by refusing.
    """

    at: Instant
    island: IslandId
    incarnation: Incarnation
    dead: bool
    reason: str
    cut_off: bool = False


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


# ── the life of a fragment ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class FragmentAdopted:
    """The island took a published version at a step boundary.

    ``kept_tokens`` are those trained on this fragment that survive the adoption (0 when the published value replaces
    the island's own); the rest of its tokens since the last adoption that are not in a contribution are overwritten.
    ``fix`` is the latest that it has heard; older tapes lack it.
    """

    at: Instant
    island: IslandId
    incarnation: Incarnation
    fragment: FragmentId
    version: Version
    step: int
    tokens_total: int
    kept_tokens: int
    fix: Fix = NO_FIX


@dataclass(frozen=True, slots=True)
class TimerFired:
    """A deadline set by ``SetTimer`` has passed. A timer that comes late carries the serial it belongs to."""

    at: Instant
    timer: str
    serial: int


# ── what chaos did ────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class FaultInjected:
    """Chaos struck. For records, nothing to decide: a kill is decided on as the ``CommandRequested`` beside it.

    ``kind`` is a kind of ``chaos.plan.Kind``, or continue, which ends what chaos did to the island; ``duration``,
    ``bytes_per_second`` and ``payloads`` are its ``Dose``. What strikes no island (kill_synchroniser) has an empty one, and
    incarnation 0. Tapes of earlier builds lack the last two fields.
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


IslandEvent = (
    IslandPlaced
    | PlacementFailed
    | IslandReady
    | IslandCaughtUp
    | CatchUpFailed
    | ProgressReported
    | ConnectionLost
    | ConnectionRestored
    | IslandFlushed
    | IslandDrained
    | FragmentAdopted
)
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
