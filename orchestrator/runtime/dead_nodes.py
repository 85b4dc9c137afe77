"""The nodes whose processes are dead while the head believes them alive: they are unregistered.

A head is configured to tolerate long partitions, and so believes for eleven minutes in a node whose raylet was killed. A
head that is started again reads from its storage which nodes there were, those that died with it included. Whatever it
hands to such a node to place, a synchroniser's restart among others, waits as long (seen in Ray 2.60,
GcsActorScheduler::SelectForwardingNode).

A node is dead, and not cut off, if

- it was started on this machine, in the folder of this cluster, and has no process here;
- its machine refuses connections to the port of its raylet: a node that is cut off does not answer at all;
- another node has registered later at the same address and port.

Runs in a fork of ``ray_command`` for `atoll up` and `atoll head`, and in the service, which both have Ray's environment and
its token.
"""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

from orchestrator.errors import InfrastructureError, first_line
from orchestrator.runtime import processes
from orchestrator.system.ports import Reach, reach

VERB = "unregister-dead"
NODE_ID = re.compile(r"--node[-_]id=([0-9a-f]{20,})")
"""On the command lines of a raylet's own agents, which it starts before it registers, and which do not outlive it."""
PATIENCE_S = 60.0
CALL_TIMEOUT_S = 5.0
RETRY_S = 0.2
ALIVE = 0
UNEXPECTED = 2
"""Ray's ``GcsNodeInfo.ALIVE`` and ``NodeDeathInfo.UNEXPECTED_TERMINATION``."""
CAUSE = "its processes are dead"


@dataclass(frozen=True, slots=True)
class Registered:
    """A node in the head's books. ``socket``, ``address`` and ``port`` are its raylet's.

    ``socket`` is a path of the machine that the node is on; ``started_at`` is in milliseconds since 1970.
    """

    id: str
    name: str
    socket: str
    address: str = ""
    port: int = 0
    started_at: int = 0


def main(arguments: Sequence[str]) -> None:
    """``ADDRESS CLUSTER_ID TEMP_DIR``: print the name of each node that was unregistered. Raises what the head answers."""
    address, cluster_id, temp_dir = arguments
    deadline = time.monotonic() + PATIENCE_S
    head = _Head(address)
    while True:
        try:
            registered = head.registered()  # before the look at processes: what registers meanwhile lives
            own = dead(registered, living(cluster_id), temp_dir)
            for node in {node.id: node for node in (*own, *refused(registered), *replaced(registered))}.values():
                head.unregister(node.id)
                print(node.name, flush=True)
            return
        except head.error:
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_S)  # it reads its storage


def dead(registered: Iterable[Registered], living_ids: frozenset[str], temp_dir: str) -> list[Registered]:
    """Return this cluster's own nodes, those with sockets below ``temp_dir``, to which no process belongs."""
    return [node for node in registered if node.socket.startswith(f"{temp_dir}/") and node.id not in living_ids]


def refused(registered: Sequence[Registered]) -> list[Registered]:
    """Return the nodes whose machine refuses connections to their raylet. Takes up to a second."""
    with ThreadPoolExecutor(max(1, len(registered)), "reach") as pool:
        reaches = pool.map(lambda node: reach(node.address, node.port), registered)
        return [node for node, seen in zip(registered, reaches, strict=True) if seen is Reach.REFUSED]


def replaced(registered: Iterable[Registered]) -> list[Registered]:
    """Return the nodes at whose address and port another one has registered later."""
    newest: dict[tuple[str, int], Registered] = {}
    nodes = list(registered)
    for node in sorted(nodes, key=lambda node: (node.started_at, node.id)):
        newest[node.address, node.port] = node
    return [node for node in nodes if newest[node.address, node.port] is not node]


def unregister_dead(address: str, suspects: Collection[str]) -> list[str]:
    """Have the head at this address forget those of the nodes ``suspects``, by id, that are dead. Return their names.

    Raises InfrastructureError if the head does not answer in time.
    """
    head = _Head(address)
    try:
        registered = head.registered()
        gone = {node.id: node for node in (*refused(registered), *replaced(registered)) if node.id in suspects}
        for node in gone.values():
            head.unregister(node.id)
    except head.error as error:
        raise InfrastructureError(detail=f"The head does not say which nodes it knows: {first_line(error)}.") from error
    return sorted(node.name for node in gone.values())


def living(cluster_id: str) -> frozenset[str]:
    """The ids of nodes that have processes here."""
    ids: set[str] = set()
    for process in processes.marked(cluster_id):
        with suppress(psutil.Error):
            ids.update(NODE_ID.findall(" ".join(process.cmdline())))
    return frozenset(ids)


class _Head:
    """The head's service of nodes, of which Ray's own clients can ask less than it answers."""

    def __init__(self, address: str) -> None:
        grpc: Any = importlib.import_module("grpc")
        channels: Any = importlib.import_module("ray._private.grpc_utils")
        self._messages: Any = importlib.import_module("ray.core.generated.gcs_service_pb2")
        stubs: Any = importlib.import_module("ray.core.generated.gcs_service_pb2_grpc")
        self.error: type[Exception] = grpc.RpcError
        self._stub = stubs.NodeInfoGcsServiceStub(channels.init_grpc_channel(address))

    def registered(self) -> list[Registered]:
        """Return the nodes that the head believes alive."""
        answer = self._stub.GetAllNodeInfo(self._messages.GetAllNodeInfoRequest(), timeout=CALL_TIMEOUT_S)
        return [
            Registered(
                node.node_id.hex(),
                node.node_name,
                node.raylet_socket_name,
                node.node_manager_address,
                node.node_manager_port,
                node.start_time_ms,
            )
            for node in answer.node_info_list
            if node.state == ALIVE
        ]

    def unregister(self, node_id: str) -> None:
        request = self._messages.UnregisterNodeRequest(node_id=bytes.fromhex(node_id))
        request.node_death_info.reason = UNEXPECTED
        request.node_death_info.reason_message = CAUSE
        self._stub.UnregisterNode(request, timeout=CALL_TIMEOUT_S)
