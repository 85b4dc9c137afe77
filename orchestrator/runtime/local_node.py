"""The Ray node of this machine, or of this container, as somebody sees it who is no process of it: to end it politely.

Responsible for finding it by its raylet, for having the head drain it, and for knowing when nothing works there any more.
Refuses to end processes, and to know who started it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import psutil

from orchestrator.errors import ConfigurationError, InfrastructureError, first_line
from orchestrator.runtime import cluster
from orchestrator.runtime.node_agent import RAYLET, workers_of

LOOK_S = 0.5
AGAIN_S = 1.0
RAY_PREFIX = "RAY_"


@dataclass(frozen=True, slots=True)
class LocalNode:
    """``environment`` are its own settings of Ray, by which whoever asks its head has the cluster's token."""

    raylet: int
    id: str
    head: str
    environment: Mapping[str, str]

    def drain(self, cause: str, deadline: float) -> None:
        """Its islands are to give their work and go on elsewhere until ``deadline``, in seconds since 1970.

        Raises InfrastructureError when the head does not answer.
        """
        os.environ.update(self.environment)
        try:
            cluster.drain(cluster.client_of(self.head), self.id, cause, deadline)
        except Exception as error:  # whatever Ray raises where its head is away
            raise InfrastructureError(
                detail=f"The head at {self.head} does not drain this node: {first_line(error)}.",
                remedy="The node can be ended all the same; what its islands have not given by then is lost.",
            ) from error

    def works(self) -> bool:
        """Whether an island, or another actor, has a process there."""
        return bool(workers_of(self.raylet))


def started_by(pid: int) -> LocalNode | None:
    """The node that this process, or one that it started, has begun; None before that, and once its raylet has ended."""
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return None
    return next((node for child in children if (node := _node_of(child)) is not None), None)


def only() -> LocalNode:
    """The one node of this machine. Raises ConfigurationError where there is none, or more than one."""
    nodes = [node for process in psutil.process_iter() if (node := _node_of(process)) is not None]
    if len(nodes) != 1:
        pids = ", ".join(str(node.raylet) for node in nodes) or "none"
        raise ConfigurationError(
            detail=f"There are {len(nodes)} Ray nodes here (raylets: {pids}), and exactly one can leave. Call this where "
            "one runs: on its machine, or in its container."
        )
    return nodes[0]


def leave(node: LocalNode, cause: str, deadline: float) -> bool:
    """Have the node drained, and wait until nothing works there, or ``deadline``. True if nothing works there any more.

    A head that does not answer is asked again. Raises InfrastructureError where it did not answer at all.
    """
    refused: InfrastructureError | None = None
    drained = False
    while True:
        if not drained:
            try:
                node.drain(cause, deadline)
                drained = True
            except InfrastructureError as error:
                refused = error
        elif not node.works():
            return True
        left_s = deadline - time.time()
        if left_s <= 0.0:
            break
        time.sleep(min(left_s, LOOK_S if drained else AGAIN_S))
    if refused is not None and not drained:
        raise refused
    return False


def _node_of(process: psutil.Process) -> LocalNode | None:
    with suppress(psutil.Error):
        if process.name() != RAYLET or process.status() == psutil.STATUS_ZOMBIE:
            return None
        words = [word.lstrip("-").replace("-", "_", 1).partition("=") for word in process.cmdline()[1:]]
        options = {name.replace("-", "_"): value for name, equals, value in words if equals}
        environment = {name: value for name, value in process.environ().items() if name.startswith(RAY_PREFIX)}
        if options.get("node_id") and options.get("gcs_address"):
            return LocalNode(process.pid, options["node_id"], options["gcs_address"], environment)
    return None
