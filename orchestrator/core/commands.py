"""What operators ask of a job: events like all others, each under an id, so that it is done once however often it is said.

``caller`` is who asked. Every command is answered by one ``ResolveCommand``.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.core.saving import SavingCommand
from orchestrator.core.vocabulary import CommandId, Instant, IslandId, NodeGroupId


@dataclass(frozen=True, slots=True)
class KillRequested:
    """SIGKILL the island's process, no warning. With ``restart`` false it stays away until it is re-added."""

    at: Instant
    command: CommandId
    caller: str
    island: IslandId
    restart: bool


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """Have the island step no more, see all its work merged, then end its process. It stays away until it is re-added."""

    at: Instant
    command: CommandId
    caller: str
    island: IslandId


@dataclass(frozen=True, slots=True)
class ReaddRequested:
    """Place an island that is away, now: forget its back-off and its failures. One that is draining trains on."""

    at: Instant
    command: CommandId
    caller: str
    island: IslandId


@dataclass(frozen=True, slots=True)
class CordonRequested:
    """Place nothing new on the node group. What trains there, or is being placed, goes on."""

    at: Instant
    command: CommandId
    caller: str
    node_group: NodeGroupId


@dataclass(frozen=True, slots=True)
class UncordonRequested:
    """The node group takes islands again, and first those that wait for it."""

    at: Instant
    command: CommandId
    caller: str
    node_group: NodeGroupId


@dataclass(frozen=True, slots=True)
class ScaleRequested:
    """Have ``count`` islands on the node group: place more, or drain the last of them."""

    at: Instant
    command: CommandId
    caller: str
    node_group: NodeGroupId
    count: int


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """Stop the job without waiting for the work in flight."""

    at: Instant
    command: CommandId
    caller: str


IslandCommand = KillRequested | DrainRequested | ReaddRequested
NodeGroupCommand = ScaleRequested | CordonRequested | UncordonRequested
Command = IslandCommand | NodeGroupCommand | SavingCommand | CancelRequested
