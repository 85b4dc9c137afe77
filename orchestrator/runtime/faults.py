"""Fault injection into a live job: each fault is done to a process or a link, and recorded on the tape.

    kill                               as an operator's kill, which the core decides on; beside it the record of chaos
    stop                               SIGSTOP, and SIGCONT after the duration by the node's own agent
    cut, slow, corrupt, delay, drop    the impairment of the island's link, which ends by itself (``impairment``)
    continue                           the end of all these before that
    kill_host                          SIGKILL of the island's process on one of its hosts
    kill_node                          SIGKILL of the raylet by its node's agent
    kill_synchroniser                  SIGKILL of this very process, once the record is on the tape

Responsible for a fault being injected before it is recorded, but for the last, and for none that was injected being left
out: whoever does it may answer late on a busy machine, and is then waited for in a thread of its own. Refuses to plan: when,
whom and how many is ``chaos``' business. A link's impairment is that of one incarnation: whoever is placed instead has a
link of its own.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import ray
from ray.exceptions import RayError

from orchestrator.chaos.kinds import CONTINUE, Kind
from orchestrator.core.commands import Inject, Kill
from orchestrator.core.effects import ResolveCommand
from orchestrator.core.events import Event, FaultInjected
from orchestrator.core.vocabulary import CommandId, FaultSpec, Incarnation, IslandId
from orchestrator.errors import first_line
from orchestrator.host.job_context import Post
from orchestrator.runtime.controller import Controller
from orchestrator.runtime.interpreter import Interpreter
from orchestrator.runtime.node_agent import ANSWERED_S
from orchestrator.runtime.supervision import Helper
from orchestrator.simulation.impairment import LinkFault

NAMES = frozenset({*(kind.value for kind in Kind if kind is not Kind.KILL_API), CONTINUE})
"""What ``Inject.fault`` may say to a job."""
ANSWER_TIMEOUT_S = 5.0
"""Within which most are answered, so that whoever asked for the fault finds it recorded."""


class Chaos:
    """The faults of one job. ``incarnation_of`` an island is its present one; ``resolve`` answers the command."""

    def __init__(
        self,
        controller: Helper[Controller],
        interpreter: Interpreter,
        post: Post,
        resolve: Callable[[ResolveCommand], None],
        incarnation_of: Callable[[IslandId], Incarnation],
    ) -> None:
        self._controller, self._interpreter = controller, interpreter
        self._post, self._resolve, self._incarnation_of = post, resolve, incarnation_of

    def inject(self, command: CommandId, caller: str, request: Inject) -> Kill | None:
        """Inject the fault, and post the record. A kill is returned: the core is still to decide on it.

        Returns within ``ANSWER_TIMEOUT_S``. A fault that is on its way to a process by then is recorded, and the command
        answered, once the controller says what became of it.
        """
        kind, island = request.fault, request.island or IslandId("")
        dose = FaultSpec(request.duration, request.bytes_per_second, request.payloads, request.host)
        incarnation = self._incarnation_of(island) if island else Incarnation(0)
        parts = (kind, island, incarnation, dose.duration, dose.bytes_per_second, dose.payloads, dose.host)

        def record(why_not: str) -> None:
            if not why_not:
                self._post(lambda at: FaultInjected(at, command, caller, *parts))
            if kind != Kind.KILL:
                outcome = f"{island} is told to {kind}" if kind in (Kind.STOP, CONTINUE) else f"{kind} strikes {island}"
                self._resolve(ResolveCommand(command, not why_not, why_not or outcome.strip()))

        injected = "" if kind in (Kind.KILL, Kind.KILL_SYNCHRONISER) else self._inject(kind, island, incarnation, dose)
        if isinstance(injected, str):
            record(injected)
        elif (answer := _answer(injected, ANSWER_TIMEOUT_S)) is not None:
            record(answer)
        else:
            late = threading.Thread(target=lambda: record(_answer(injected) or ""), name="late fault", daemon=True)
            late.start()
        return Kill(island) if kind == Kind.KILL else None

    def _inject(
        self, kind: str, island: IslandId, incarnation: Incarnation, dose: FaultSpec
    ) -> str | ray.ObjectRef[str]:
        """Empty once the fault is injected, else why it could not be; or the controller's answer to come, of both kinds."""
        life, impairment = (island, incarnation), self._interpreter.impairment(island, incarnation)
        match kind:
            case Kind.STOP:
                return self._controller.call(Controller.stop, *life, dose.duration)
            case Kind.KILL_HOST:
                return self._controller.call(Controller.kill_host, *life, dose.host)
            case Kind.KILL_NODE:
                return self._controller.call(Controller.kill_node, *life)
        if impairment is None:
            return f"{island} has no link"
        if kind == CONTINUE:
            impairment.clear()
            return self._controller.call(Controller.go_on, *life)
        impairment.inject(LinkFault(kind), dose, time.monotonic())
        return ""


def _answer(call: ray.ObjectRef[str], timeout_s: float | None = None) -> str | None:
    """Return the controller's answer, or None if it has not answered yet."""
    try:
        return ray.get(call, timeout=timeout_s)
    except TimeoutError:
        return None
    except RayError as error:
        return f"the controller did not answer: {first_line(error)}"


def kill_own_process(event: Event) -> None:
    """Kill this process if the event, which is on the tape now, is chaos killing the synchroniser.

    In an instant, so that whoever asked is answered. Sent from inside it is no less sudden: no handler runs, nothing is
    closed, and the pump is wherever it is.
    """
    if isinstance(event, FaultInjected) and event.kind == Kind.KILL_SYNCHRONISER:
        threading.Timer(ANSWERED_S, os.kill, (os.getpid(), signal.SIGKILL)).start()
