"""A whole Ray cluster on this machine: a head and one node per node group, all on loopback, for one home folder.

    python -m orchestrator.runtime.embedded up --home .atoll [--groups FILE] [--dashboard]
    python -m orchestrator.runtime.embedded down --home .atoll

Responsible for: nodes with labels and capacities as the group file says; processes that outlive whoever started them; a
file ``HOME/cluster.json`` that says how to join; and that after ``down`` no process and no temporary file is left.
Refuses to know jobs.

``ray start`` is used rather than Ray's test cluster, because its processes belong to nobody. Exit codes: 0 done, 1 the
machine failed us, 2 the settings are wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from orchestrator.errors import AtollError, ConfigurationError, InfrastructureError
from orchestrator.runtime import processes
from orchestrator.runtime.clusterfile import ClusterFile
from orchestrator.runtime.groups import NodeGroup, read_groups
from orchestrator.runtime.settings import (
    CLUSTER_MARKER,
    CONTROL_GROUP,
    GROUP_LABEL,
    PARTITION_TOLERANCE_S,
    REGION_LABEL,
    ray_environment,
)

LOOPBACK = "127.0.0.1"
NODE_ADDRESS = "127.0.0.2" if sys.platform == "linux" else LOOPBACK
"""Loopback too; Ray takes 127.0.0.1 for a mistake and uses the machine's outer address instead."""
START_TIMEOUT_S = 120.0
OBJECT_STORE_BYTES_MAX = 2 << 30
"""Per node. It is reserved address space; memory is used only for what is in it."""


def up(
    home: Path,
    groups: tuple[NodeGroup, ...],
    *,
    dashboard: bool = False,
    partition_tolerance_s: float = PARTITION_TOLERANCE_S,
) -> ClusterFile:
    """Start the cluster of ``home`` and wait until every node has joined. A cluster that is up already is left alone."""
    if (existing := ClusterFile.find(home)) is not None:
        if processes.marked(existing.id) and existing.answers():
            return existing
        down(home)  # also what is left of one whose head is gone
    # Ray's socket paths must stay below 107 bytes: not under HOME, which may be deep
    temp_dir = Path(tempfile.mkdtemp(prefix="atoll-"))
    cluster = ClusterFile(
        id=uuid.uuid4().hex,
        address=f"{NODE_ADDRESS}:{_free_port()}",
        temp_dir=str(temp_dir),
        environment=ray_environment(temp_dir / "token", partition_tolerance_s),
    )
    token = os.open(temp_dir / "token", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(token, "w") as file:
        file.write(secrets.token_hex(32))
    cluster.write(home)
    try:
        _start_nodes(cluster, groups, dashboard=dashboard)
    except BaseException:
        down(home)
        raise
    return cluster


def down(home: Path) -> int:
    """End every process of the cluster and remove its files. Returns how many processes were ended; 0 if none was up."""
    cluster = ClusterFile.find(home)
    if cluster is None:
        return 0
    count = processes.end_all(cluster.id)
    _clean(home, cluster)
    return count


def _clean(home: Path, cluster: ClusterFile) -> None:
    shutil.rmtree(cluster.temp_dir, ignore_errors=True)
    ClusterFile.path(home).unlink(missing_ok=True)


def _start_nodes(cluster: ClusterFile, groups: tuple[NodeGroup, ...], *, dashboard: bool) -> None:
    """The head first, as far as its port; then all nodes at once. Returns when all are up."""
    environment = {**os.environ, **cluster.environment, CLUSTER_MARKER: cluster.id}
    deadline = time.monotonic() + START_TIMEOUT_S
    # Ray starts a dashboard process of 3 cpu-seconds and 120 MB even where none is wanted, unless its port is taken: it
    # then says so in the node's log and goes on. So the port is held until the head is up.
    with socket.create_server((LOOPBACK, 0)) as held:
        dashboard_number = held.getsockname()[1]
        if dashboard:
            held.close()
        head = _ray_start(cluster, environment, CONTROL_GROUP, _head_arguments(cluster, dashboard, dashboard_number))
        starting = {CONTROL_GROUP: head}
        _wait_for_port(cluster, head, deadline)
        for group in groups:
            for number in range(group.nodes):
                name = group.name if group.nodes == 1 else f"{group.name}-{number}"
                starting[name] = _ray_start(cluster, environment, name, _node_arguments(cluster, group))
        for name, process in starting.items():
            try:
                code = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                code = None
            if code != 0:
                _raise_start_failure(cluster, name, code)


def _head_arguments(cluster: ClusterFile, dashboard: bool, dashboard_port: int) -> list[str]:
    port = cluster.address.rpartition(":")[2]
    return [
        *("--head", "--port", port, "--num-cpus", "0", "--no-monitor"),
        *("--include-dashboard", str(dashboard).lower(), "--dashboard-host", LOOPBACK),
        *("--dashboard-port", str(dashboard_port), "--ray-client-server-port", str(_free_port())),
        *("--labels", f"{GROUP_LABEL}={CONTROL_GROUP}"),
    ]


def _node_arguments(cluster: ClusterFile, group: NodeGroup) -> list[str]:
    arguments = ["--address", cluster.address, "--num-cpus", str(group.cpus)]
    if group.accelerator == "gpu":
        arguments += ["--num-gpus", str(group.accelerators)]
    elif group.accelerators:
        arguments += ["--resources", json.dumps({"TPU": group.accelerators})]
    return [*arguments, "--labels", f"{GROUP_LABEL}={group.name},{REGION_LABEL}={group.region}"]


def _ray_start(
    cluster: ClusterFile, environment: Mapping[str, str], name: str, arguments: list[str]
) -> subprocess.Popen[bytes]:
    # a folder for each node: nodes that start at once in one folder take the same socket names
    folder = Path(cluster.temp_dir, name)
    folder.mkdir()
    shared_memory_bytes = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").exists() else 1 << 30
    with Path(cluster.temp_dir, f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "start", *arguments),
                *("--node-ip-address", NODE_ADDRESS, "--temp-dir", str(folder), "--node-name", name),
                *("--object-store-memory", str(max(100 << 20, min(OBJECT_STORE_BYTES_MAX, shared_memory_bytes // 8)))),
                *("--dashboard-agent-listen-port", "0", "--min-worker-port", "0", "--max-worker-port", "0"),
                *("--include-log-monitor", "false", "--disable-usage-stats"),
            ],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Ctrl-C at the terminal is not for the cluster. A group, not a session: Linux shares the processors between
            # sessions first (autogroups), and with one for each node an island's steps took up to ten times as long
            process_group=0,
        )


def _wait_for_port(cluster: ClusterFile, head: subprocess.Popen[bytes], deadline: float) -> None:
    while not cluster.answers():
        if head.poll() not in (None, 0) or time.monotonic() > deadline:
            _raise_start_failure(cluster, CONTROL_GROUP, head.poll())
        time.sleep(0.05)


def _raise_start_failure(cluster: ClusterFile, name: str, code: int | None) -> None:
    log = Path(cluster.temp_dir, f"{name}.log").read_text(errors="replace").strip().splitlines()
    how = f"did not start within {START_TIMEOUT_S:.0f} s" if code is None else f"ended with code {code}"
    raise InfrastructureError(
        detail=f"The Ray node {name!r} {how}. Its last words: {' | '.join(log[-3:]) or '(none)'}",
        remedy="Check memory and disk, then try again.",
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m orchestrator.runtime.embedded", description="A local Ray cluster.")
    parser.add_argument("action", choices=("up", "down"))
    parser.add_argument("--home", type=Path, required=True, help="folder that remembers the cluster")
    parser.add_argument("--groups", type=Path, help="YAML file of node groups; four default ones without it")
    parser.add_argument("--dashboard", action="store_true", help="also start Ray's own dashboard, on loopback")
    parser.add_argument("--partition-tolerance-s", type=float, default=PARTITION_TOLERANCE_S)
    options = parser.parse_args(arguments)
    try:
        if options.action == "down":
            down(options.home)
        else:
            if os.getpid() != os.getsid(0) and os.getpid() != os.getpgid(0):
                os.setsid()  # one session for the whole cluster, that no terminal ends
            groups = read_groups(options.groups)
            up(
                options.home,
                groups,
                dashboard=options.dashboard,
                partition_tolerance_s=options.partition_tolerance_s,
            )
    except AtollError as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, ConfigurationError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
