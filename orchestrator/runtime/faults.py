"""Chaos on a live job: a signal to an island's process, and what is put on the tape of it.

    kill       as an operator's kill, which the core decides on; beside it the record that it was chaos
    stop       SIGSTOP, and SIGCONT after the duration by the node's own warden
    continue   SIGCONT before that

Responsible for the signal being sent before it is recorded. Refuses to plan: when, whom and how many is ``chaos``' business.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError

from orchestrator.core.events import FaultInjected
from orchestrator.core.vocabulary import CommandId, Duration, Incarnation, Instant, IslandId
from orchestrator.errors import first_line

SIGNALS = ("stop", "continue")
ANSWER_TIMEOUT_S = 5.0


def send(controller: Any, kind: str, island: IslandId, incarnation: Incarnation, duration: Duration) -> str:
    """One of ``SIGNALS`` has reached the process when this returns; otherwise what is returned says why not."""
    life = (island, incarnation)
    asked = controller.stop.remote(*life, duration) if kind == "stop" else controller.go_on.remote(*life)
    try:
        answer: str = ray.get(asked, timeout=ANSWER_TIMEOUT_S)
        return answer
    except (RayError, TimeoutError) as error:
        return f"the controller did not answer: {first_line(error)}"


def recorded(
    kind: str, command: CommandId, caller: str, island: IslandId, incarnation: Incarnation, duration: Duration
) -> Callable[[Instant], FaultInjected]:
    """The record of a fault, once it is told when."""
    return lambda at: FaultInjected(at, command, caller, kind, island, incarnation, duration)
