"""One Ray node's processes: the head's or a node group's, started by ``ray start`` in a place of this machine.

Responsible for the arguments, for a folder and a log of its own for each node, and for a mark in the environment of all
its processes by which the node's, and only they, are found again. Refuses to know which nodes there should be.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.environment import built
from orchestrator.runtime.clusterfile import ClusterFile
from orchestrator.runtime.groups import NodeGroup
from orchestrator.runtime.ray_command import MODULE, WITH_DASHBOARD
from orchestrator.runtime.settings import CLUSTER_MARKER, CONTROL_GROUP, GROUP_LABEL, NODE_MARKER, REGION_LABEL

LOOPBACK = "127.0.0.1"
PASSED = "passed-environment.json"
OBJECT_STORE_BYTES_MAX = 2 << 30
"""Per node. It is reserved address space; memory is used only for what is in it."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a node runs: its address, and the command that starts a program there, as one in a network namespace needs."""

    address: str = LOOPBACK
    enter: tuple[str, ...] = ()


def start_head(cluster: ClusterFile, place: Place, *, dashboard: bool) -> subprocess.Popen[bytes]:
    """The head; one that died at this address before goes on from what it kept."""
    # Ray takes raylets of ours that wait for this head for a head that runs, if this file says where it was
    Path(cluster.temp_dir, CONTROL_GROUP, "ray_current_cluster").unlink(missing_ok=True)
    port = cluster.address.rpartition(":")[2]
    arguments = [
        *("--head", "--port", port, "--num-cpus", "0", "--no-monitor"),
        *("--include-dashboard", str(dashboard).lower(), "--dashboard-host", LOOPBACK),
        *("--dashboard-port", str(free_port())),
        *("--labels", f"{GROUP_LABEL}={CONTROL_GROUP}"),
    ]
    return _start(cluster, CONTROL_GROUP, place, arguments, dashboard=dashboard)


def start_node(
    cluster: ClusterFile, name: str, group: NodeGroup, place: Place, *, dashboard: bool
) -> subprocess.Popen[bytes]:
    arguments = ["--address", cluster.address, "--num-cpus", str(group.cpus)]
    if group.accelerator == "gpu":
        arguments += ["--num-gpus", str(group.accelerators)]
    elif group.accelerators:
        arguments += ["--resources", json.dumps({"TPU": group.accelerators})]
    labels = f"{GROUP_LABEL}={group.name},{REGION_LABEL}={group.region}"
    return _start(cluster, name, place, [*arguments, "--labels", labels], dashboard=dashboard)


def log_of(cluster: ClusterFile, name: str) -> Path:
    """What ``ray start`` said for this node."""
    return Path(cluster.temp_dir, f"{name}.log")


def passed_to(cluster: ClusterFile) -> tuple[str, ...]:
    """What this cluster's processes get of the caller's environment besides what they need, by name."""
    path = Path(cluster.temp_dir, PASSED)
    return tuple(json.loads(path.read_text())) if path.exists() else ()


def pass_on(cluster: ClusterFile, names: Sequence[str]) -> None:
    """The processes that are started from now on get these too."""
    if names:
        Path(cluster.temp_dir, PASSED).write_text(json.dumps(sorted({*names, *passed_to(cluster)})))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def _start(
    cluster: ClusterFile, name: str, place: Place, arguments: list[str], *, dashboard: bool
) -> subprocess.Popen[bytes]:
    # a folder for each node: nodes that start at once in one folder take the same socket names
    folder = Path(cluster.temp_dir, name)
    folder.mkdir(exist_ok=True)
    shared_memory_bytes = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").exists() else 1 << 30
    environment = built(os.environ, passed_to(cluster))
    with log_of(cluster, name).open("wb") as log:
        return subprocess.Popen(
            [
                *(
                    *place.enter,
                    sys.executable,
                    "-m",
                    MODULE,
                    *([WITH_DASHBOARD] if dashboard else []),
                    "start",
                    *arguments,
                ),
                *("--node-ip-address", place.address, "--temp-dir", str(folder), "--node-name", name),
                *("--object-store-memory", str(max(100 << 20, min(OBJECT_STORE_BYTES_MAX, shared_memory_bytes // 8)))),
                *("--dashboard-agent-listen-port", "0", "--min-worker-port", "0", "--max-worker-port", "0"),
                *("--include-log-monitor", "false", "--disable-usage-stats"),
            ],
            env={**environment, **cluster.environment, CLUSTER_MARKER: cluster.id, NODE_MARKER: name},
            umask=0o077,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Ctrl-C at the terminal is not for the cluster. A group, not a session: Linux shares the processors between
            # sessions first (autogroups), and with one for each node an island's steps took up to ten times as long
            process_group=0,
        )
