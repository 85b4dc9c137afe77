"""Fault injection into a live job: each fault is done to a process or a link, and recorded on the tape.

    kill                               as an operator's kill, which the core decides on; beside it the record of chaos
    stop                               SIGSTOP, and SIGCONT after the duration by the node's own agent
    cut, slow, corrupt, delay, drop    the impairment of the island's link, which ends by itself (``impairment``)
    continue                           the end of all these before that
    kill_host                          SIGKILL of the island's process on one of its hosts
    kill_node                          SIGKILL of the raylet by its node's agent
    kill_synchroniser                  SIGKILL of this very process, once the record is on the tape

Every fault but the last is injected before it is recorded, and every injected fault is recorded. If the process that injects
it answers late, on a busy machine, a thread of its own waits for the answer. Which fault is injected, when and into which
island is decided by ``chaos``. A link's impairment belongs to one incarnation: its successor has a link of its own.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import get_args

import ray
from ray.exceptions import RayError

from orchestrator.core import faults
from orchestrator.core.commands import Inject, Kill
from orchestrator.core.effects import ResolveCommand
from orchestrator.core.events import FaultInjected
from orchestrator.core.faults import Fault, JobFault, Kind
from orchestrator.core.vocabulary import CommandId, Incarnation, IslandId
from orchestrator.errors import Conflict, first_line
from orchestrator.host.job_context import Post
from orchestrator.runtime.controller import Controller
from orchestrator.runtime.interpreter import Interpreter
from orchestrator.runtime.node_agent import ANSWERED_S
from orchestrator.runtime.supervision import Helper

NAMES = frozenset(fault.kind.value for fault in get_args(JobFault))
"""The kinds of faults that a job takes."""
ANSWER_TIMEOUT_S = 5.0
"""Most faults are carried out within this time, so that a caller who gets the answer finds the fault recorded."""


def typed(job: str, request: Inject) -> Fault:
    """Return the fault of a command, which may come from a later build. Raises Conflict for an unknown one."""
    if request.fault not in NAMES:
        detail = f"The synchroniser of job {job} does not know the fault {request.fault!r}."
        raise Conflict(detail=detail, remedy=f"It knows {', '.join(sorted(NAMES))}.")
    return request.typed()


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

    def inject(self, command: CommandId, caller: str, fault: Fault) -> Kill | None:
        """Inject the fault and post its record. Return the command for the core, which decides on a kill itself.

        Returns within ``ANSWER_TIMEOUT_S``. A fault that takes longer is recorded, and its command answered, once the
        controller has answered.
        """
        form = faults.flat(fault)
        incarnation = self._incarnation_of(form.island) if form.island else Incarnation(0)
        kind, island = form.kind, form.island

        def record(why_not: str) -> None:
            if not why_not:
                self._post(
                    lambda at: FaultInjected(at, command, caller, kind.value, island, incarnation, *form.numbers)
                )
            if kind is not Kind.KILL:
                is_told = isinstance(fault, faults.Stop | faults.Continue)
                outcome = f"{island} is told to {kind}" if is_told else f"{kind} injected into {island}"
                outcome = outcome if island else f"{kind} injected"
                self._resolve(ResolveCommand(command, not why_not, why_not or outcome))

        injected = self._inject(fault, incarnation)
        if isinstance(injected, str):
            record(injected)
        elif (answer := _answer(injected, ANSWER_TIMEOUT_S)) is not None:
            record(answer)
        else:
            late = threading.Thread(target=lambda: record(_answer(injected) or ""), name="late fault", daemon=True)
            late.start()
        return Kill(island) if kind is Kind.KILL else None

    def _inject(self, fault: Fault, incarnation: Incarnation) -> str | ray.ObjectRef[str]:
        """Inject a fault. Return the reason why it could not be, empty if it was; or the controller's pending answer."""
        match fault:
            case faults.Kill() | faults.KillSynchroniser():
                return ""  # the core decides on the one, and the other follows its record (``kill_own_process``)
            case faults.Stop():
                return self._controller.call(Controller.stop, fault.island, incarnation, fault.duration_s)
            case faults.KillHost():
                return self._controller.call(Controller.kill_host, fault.island, incarnation, fault.host)
            case faults.KillNode():
                return self._controller.call(Controller.kill_node, fault.island, incarnation)
            case faults.KillApi():
                return "a job has no service to kill"
        impairment = self._interpreter.impairment(fault.island, incarnation)
        if impairment is None:
            return f"{fault.island} has no link"
        if isinstance(fault, faults.Continue):
            impairment.clear()
            return self._controller.call(Controller.go_on, fault.island, incarnation)
        impairment.inject(fault, time.monotonic())
        return ""


def _answer(call: ray.ObjectRef[str], timeout_s: float | None = None) -> str | None:
    """Return the controller's answer, or None if it has not answered yet."""
    try:
        return ray.get(call, timeout=timeout_s)
    except TimeoutError:
        return None
    except RayError as error:
        return f"the controller did not answer: {first_line(error)}"


def kill_own_process(fault: FaultInjected) -> None:
    """Kill this process if the fault, which is on the tape now, is chaos killing the synchroniser.

    In an instant, so that the caller gets its answer. Sent from inside it is no less sudden: no handler runs, nothing is
    closed, and the pump is wherever it is.
    """
    if fault.kind == Kind.KILL_SYNCHRONISER:
        threading.Timer(ANSWERED_S, os.kill, (os.getpid(), signal.SIGKILL)).start()
