"""The interfaces of the actors of a job, and typed calls to them.

    reply = island.call(IslandInterface.reports, epoch, read, acknowledged, POLL_S)
    reports = ray.get(reply, timeout=3.0)       # list[tuple[int, IslandReport]]

``ActorHandle`` calls the methods of an actor's class or interface by name, so that type checkers compare name, arguments and
answer. The interfaces are those of actors whose class the caller does not import, because it is heavy or in a package
above. The classes say what each method does:

    IslandInterface        learners.island.Island; the synchroniser, the controller and islands that catch up call it
    EvaluatorInterface     learners.evaluator.Evaluator
    SynchroniserInterface  runtime.synchroniser_actor.SynchroniserActor; the control port and the controller call it. The
                           service may be of another build than the synchroniser, and needs nothing of a job's machinery

Names of methods travel between builds and stay as they are. Names of arguments do not travel, so interfaces take them by
position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypedDict, TypeVar

from orchestrator.core.commands import ChangedSettings
from orchestrator.core.messages import Announcement, IslandHoldings, IslandReport
from orchestrator.core.vocabulary import Epoch, FragmentId, IslandId, Preference, ScheduleAnchor, SourceLoss, Version
from orchestrator.parameters.pieces import Roles, Shape
from orchestrator.parameters.tensors import Tensors
from orchestrator.system.logbook import Logbook

if TYPE_CHECKING:
    import ray  # a process that joins a cluster imports it, once its environment is set

    from orchestrator.channel.endpoint import Carried, Membership
    from orchestrator.parameters.holding import Holding
    from orchestrator.parameters.parts import Bounds
    from orchestrator.status import StatusDocument  # islands need no models of a status

ActorT = TypeVar("ActorT")
Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")
Measured = tuple[float, int, float, float | None, tuple[SourceLoss, ...], Preference | None]
"""Loss in nats per token, of how many sequences, the seconds taken, bits per byte, and by source."""


@dataclass(frozen=True, slots=True)
class ActorHandle(Generic[ActorT]):
    """``ray_handle`` is Ray's own, on which nothing is typed."""

    ray_handle: Any

    def call(
        self,
        method: Callable[Concatenate[ActorT, Arguments], Answer],
        *arguments: Arguments.args,
        **named: Arguments.kwargs,
    ) -> ray.ObjectRef[Answer]:
        """Call the method and return at once with the reply to come. Raises AttributeError where the actor has none."""
        reply: ray.ObjectRef[Answer] = getattr(self.ray_handle, method.__name__).remote(*arguments, **named)
        return reply

    def has(self, method: Callable[Concatenate[ActorT, Arguments], Answer]) -> bool:
        """Return whether the actor, which may be of another build, has this method."""
        return hasattr(self.ray_handle, method.__name__)


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """The shapes of a model's tensors, and their roles where the names do not say them."""

    shapes: Mapping[str, Shape]
    roles: Roles

    @property
    def parameter_count(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())


@dataclass(frozen=True, slots=True)
class PartWindow:
    """Some bytes of the file ``name`` of an island's part of a checkpoint: the next ones. ``content`` is None at the end."""

    name: str
    byte_count: int
    content: Carried | None


PART_ENDS = PartWindow("", 0, None)


@dataclass(frozen=True, slots=True)
class SavedWindow:
    """Some bytes of a file of a checkpoint, which has ``file_bytes`` in all. ``content`` is None for no bytes."""

    file_bytes: int
    content: Carried | None


@dataclass(frozen=True, slots=True)
class SavedPlace:
    """A checkpoint to restore from: its path or URL, and the digest of its manifest.

    A process that does not see that folder reads the files from ``synchroniser``, the name of an actor.
    """

    url: str
    digest: str
    synchroniser: str


class ProfileRecord(TypedDict):
    """Says how far a trace of an island's steps is. It is complete once ``byte_count``, its size as a zip, is a number.

    ``stalled_s`` is how long the island stood still for it; ``problem`` says why there is no trace.
    """

    profile: str
    steps: int
    steps_taken: int
    seconds: float
    stalled_s: float
    byte_count: int | None
    problem: str


class EvaluatorInterface(Protocol):
    def outline(self) -> ModelOutline: ...

    def initial_pieces(self, names: Sequence[str], /) -> Tensors: ...

    def join_channel(self, epoch: Epoch, membership: Membership, /) -> None: ...

    def evaluate(self, epoch: Epoch, limit_s: float | None, /, *payloads: Carried) -> Measured: ...

    def unigram_loss(self) -> float: ...


EvaluatorFactory = Callable[[dict[str, Any], Mapping[str, str], Logbook, int], EvaluatorInterface]
"""How an evaluator's actor is made: the job's specification, its environment, its logbook, and its niceness."""


class SynchroniserInterface(Protocol):
    def ready(self) -> bool: ...

    def status(self) -> StatusDocument: ...

    def submit(self, command: str, caller: str, document: Mapping[str, Any], /) -> None: ...

    def save_parameters(self) -> str: ...

    def save_updates(self, held: Sequence[int], /) -> str: ...

    def notice(self, island: str, incarnation: int, cause: str, seconds: float | None, /) -> None: ...

    def read_saved(self, receiver: str, name: str, start: int, stop: int, /) -> SavedWindow | None: ...


@dataclass(frozen=True, slots=True)
class MeetingPlace:
    """The address at which the processes of an island of many hosts meet: rank 0's, for its link and for its devices."""

    host: str
    port: int
    devices_port: int


@dataclass(frozen=True, slots=True)
class Rank:
    """The place of a process in its island of ``size`` hosts, which meet at ``place``; ``key`` is the incarnation's own."""

    number: int
    size: int
    place: MeetingPlace
    key: bytes = field(repr=False)


class IslandInterface(Protocol):
    # ── to the controller ─────────────────────────────────────────────────────────────────────────────────────────

    def hello(self) -> dict[str, Any]: ...

    def meeting_place(self) -> MeetingPlace: ...

    def prepare(
        self,
        spec: dict[str, Any],
        shard_index: int,
        shard_count: int,
        normal_priority: bool,
        rank: Rank | None = None,
        /,
    ) -> None: ...

    def promote(self, island: IslandId, shard_index: int, book: Logbook, /) -> dict[str, Any]: ...

    # ── to the synchroniser, which says its epoch ─────────────────────────────────────────────────────────────────

    def reports(
        self, epoch: Epoch, read: int, acknowledged: int, timeout_s: float, /
    ) -> list[tuple[int, IslandReport]]: ...

    def join_channel(self, epoch: Epoch, membership: Membership, /) -> None: ...

    def hindrances(self, epoch: Epoch, /) -> tuple[str, ...]: ...

    def holding(self, epoch: Epoch, /) -> Holding: ...

    def take_payload(self, epoch: Epoch, fragment: FragmentId, offer: int, /) -> Carried | None: ...

    def announce(self, epoch: Epoch, announcement: Announcement, /) -> None: ...

    def holdings(self, epoch: Epoch, /) -> tuple[Epoch, IslandHoldings | None]: ...

    def give_outer(self, epoch: Epoch, fragment: FragmentId, version: Version, /) -> Carried | None: ...

    def release_payload(self, fragment: FragmentId, offer: int, /) -> None: ...

    def load(
        self, epoch: Epoch, versions: Sequence[Version], step: int, cursor: int, /, *payloads: Carried
    ) -> None: ...

    def load_left(
        self, epoch: Epoch, versions: Sequence[Version], step: int, cursor: int, /, *payloads: Carried
    ) -> None: ...

    def load_ranks(
        self,
        epoch: Epoch,
        versions: Sequence[Version],
        step: int,
        cursor: int,
        payloads: Sequence[Sequence[Carried]],
        /,
    ) -> None: ...

    def load_from(self, epoch: Epoch, count: int, donors: Mapping[str, IslandId], cursor: int, /) -> None: ...

    def load_saved(self, epoch: Epoch, place: SavedPlace, cursor: int, /) -> None: ...

    def resume(self, epoch: Epoch, cursor: int, /) -> None: ...

    def start(self, epoch: Epoch, anchor: ScheduleAnchor, /) -> None: ...

    def adjust(self, epoch: Epoch, lr_ratio: float, interval_steps: int, changed: ChangedSettings, /) -> None: ...

    def flush(self, epoch: Epoch, /) -> None: ...

    def drain(self, epoch: Epoch, /) -> None: ...

    def deliver(
        self,
        epoch: Epoch,
        fragment: FragmentId,
        version: Version,
        step: int,
        merged_offer: int,
        anchor: ScheduleAnchor,
        since: Version | None,
        digest: str,
        /,
        *payloads: Carried,
    ) -> int: ...

    def save(self, epoch: Epoch, checkpoint: int, folder: str, /) -> None: ...

    def give_part(
        self, epoch: Epoch, checkpoint: int, place: str, number: int, timeout_s: float, /
    ) -> PartWindow | None: ...

    def part_stored(self, epoch: Epoch, checkpoint: int, problem: str, /) -> None: ...

    def evaluate(
        self, epoch: Epoch, global_version: int, versions: tuple[Version, ...], limit_s: float | None, /
    ) -> None: ...

    # ── to the service ────────────────────────────────────────────────────────────────────────────────────────────

    def profile(self, profile: str, steps: int | None, /) -> ProfileRecord: ...

    def read_profile(self, profile: str, start: int, stop: int, /) -> bytes: ...

    # ── to another island ─────────────────────────────────────────────────────────────────────────────────────────

    def export_state(self, epoch: Epoch, fragment: int, receiver: str, in_parts: bool, /) -> dict[str, Any]: ...

    def export_part(
        self, epoch: Epoch, cut: str, fragment: int, receiver: str, wanted: Mapping[str, Bounds] | None, /
    ) -> dict[str, Any]: ...

    def forget_part(self, cut: str, fragment: int, /) -> None: ...

    def release_state(self, payload: str, /) -> None: ...


IslandFactory = Callable[[IslandId, Mapping[str, str], Logbook, float], IslandInterface]
"""How an island's actor is made: its name, its environment, its logbook, and when it counts as abandoned (seconds)."""
