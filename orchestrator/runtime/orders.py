"""An operator's command as the event that tells of it, by the name it has in calls.

Refuses to know whether it can be done: the core answers each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestrator.core import events, saving
from orchestrator.core.vocabulary import CommandId, Instant, IslandId

OF_THE_JOB = frozenset({"cancel", "checkpoint"})
"""Commands that name no island."""


def order(
    kind: str, command: CommandId, caller: str, island: IslandId, restart: bool
) -> Callable[[Instant], events.Event]:
    """Makes the event, once it is known when it happened."""
    match kind:
        case "kill":
            return lambda at: events.KillRequested(at, command, caller, island, restart)
        case "drain":
            return lambda at: events.DrainRequested(at, command, caller, island)
        case "readd":
            return lambda at: events.ReaddRequested(at, command, caller, island)
        case "checkpoint":
            return lambda at: saving.CheckpointRequested(at, command, caller)
        case _:
            return lambda at: events.CancelRequested(at, command, caller)


def rollback(command: CommandId, caller: str, checkpoint: int) -> Callable[[Instant], events.Event]:
    return lambda at: saving.RollbackRequested(at, command, caller, checkpoint)


def noted(kind: str, island: str | None, caller: str, at: Instant) -> dict[str, Any]:
    """A command that was not answered yet, as ``api.jobs.control.CommandRecord`` has it."""
    return {"kind": kind, "island": island, "caller": caller, "at": at, "accepted": None, "detail": ""}
