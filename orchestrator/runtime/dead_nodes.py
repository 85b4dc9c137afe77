"""The nodes of an embedded cluster whose processes are dead, while its head believes them alive: they are unregistered.

A head that is started again reads from its storage which nodes there were. It is configured to tolerate long partitions,
and so believes for eleven minutes in a node whose raylet died with it. Whatever it hands to such a node to place, a
synchroniser's restart among others, waits as long (seen in Ray 2.60, GcsActorScheduler::SelectForwardingNode). Nobody but
this machine can tell a dead node from one that is cut off: its processes are here, or they are not.

Responsible for: which nodes are this cluster's, by their sockets' folder; which of those live, by the command lines of
their processes; and telling the head. Refuses to judge nodes of other machines. Runs in a fork of ``ray_command``, which
has Ray's environment and its token.
"""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

from orchestrator.runtime import processes

VERB = "unregister-dead"
NODE_ID = re.compile(r"--node[-_]id=([0-9a-f]{20,})")
"""On the command lines of a raylet's own agents, which it starts before it registers, and which do not outlive it."""
PATIENCE_S = 60.0
CALL_TIMEOUT_S = 5.0
RETRY_S = 0.2
ALIVE = 0
UNEXPECTED = 2
"""Ray's ``GcsNodeInfo.ALIVE`` and ``NodeDeathInfo.UNEXPECTED_TERMINATION``."""
CAUSE = "its processes are dead (atoll up)"


@dataclass(frozen=True, slots=True)
class Registered:
    """A node in the head's books. ``socket`` is its raylet's, a path of the machine that it is on."""

    id: str
    name: str
    socket: str


def main(arguments: Sequence[str]) -> None:
    """``ADDRESS CLUSTER_ID TEMP_DIR``: print the name of each node that was unregistered. Raises what the head answers."""
    address, cluster_id, temp_dir = arguments
    deadline = time.monotonic() + PATIENCE_S
    head = _Head(address)
    while True:
        try:
            registered = _registered(head)  # before the look at processes: what registers meanwhile lives
            for node in dead(registered, living(cluster_id), temp_dir):
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


def living(cluster_id: str) -> frozenset[str]:
    """The ids of nodes that have processes here."""
    ids: set[str] = set()
    for process in processes.marked(cluster_id):
        with suppress(psutil.Error):
            ids.update(NODE_ID.findall(" ".join(process.cmdline())))
    return frozenset(ids)


def _registered(head: _Head) -> list[Registered]:
    return [
        Registered(node.node_id.hex(), node.node_name, node.raylet_socket_name)
        for node in head.nodes()
        if node.state == ALIVE
    ]


class _Head:
    """The head's service of nodes, of which Ray's own clients can ask less than it answers."""

    def __init__(self, address: str) -> None:
        grpc: Any = importlib.import_module("grpc")
        channels: Any = importlib.import_module("ray._private.grpc_utils")
        self._messages: Any = importlib.import_module("ray.core.generated.gcs_service_pb2")
        stubs: Any = importlib.import_module("ray.core.generated.gcs_service_pb2_grpc")
        self.error: type[Exception] = grpc.RpcError
        self._stub = stubs.NodeInfoGcsServiceStub(channels.init_grpc_channel(address))

    def nodes(self) -> list[Any]:
        answer = self._stub.GetAllNodeInfo(self._messages.GetAllNodeInfoRequest(), timeout=CALL_TIMEOUT_S)
        return list(answer.node_info_list)

    def unregister(self, node_id: str) -> None:
        request = self._messages.UnregisterNodeRequest(node_id=bytes.fromhex(node_id))
        request.node_death_info.reason = UNEXPECTED
        request.node_death_info.reason_message = CAUSE
        self._stub.UnregisterNode(request, timeout=CALL_TIMEOUT_S)
