"""One Ray node's processes: the head's or a node group's, started by ``ray start`` in a place of this machine.

Responsible for the arguments, for a folder and a log of its own for each node, and for a mark in the environment of all
its processes by which the node's, and only they, are found again; and that nodes which start together import Ray's program
once (``RayProgram``). Refuses to know which nodes there should be.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol, Self

from orchestrator.runtime import dead_nodes
from orchestrator.runtime.clusterfile import ClusterFile
from orchestrator.runtime.groups import NodeGroup
from orchestrator.runtime.placement import SLICE_LABEL, TOPOLOGY_LABEL, WORKER_LABEL
from orchestrator.runtime.ray_command import EACH, MODULE, WITH_DASHBOARD, codes, request
from orchestrator.runtime.settings import CLUSTER_MARKER, CONTROL_GROUP, GROUP_LABEL, NODE_MARKER, REGION_LABEL
from orchestrator.system import python_process, signals, socket_room, user_packages
from orchestrator.system.ports import LOOPBACK, free_port
from orchestrator.system.python_process import built
from orchestrator.system.socket_room import SHARED_MEMORY, node_folder

PASSED, PACKAGES = "passed-environment.json", "package-folders.json"
OBJECT_STORE_BYTES_MAX = 2 << 30
"""Per node. It is reserved address space; memory is used only for what is in it."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a node: its address, and the command that starts a program there, such as one in a network namespace."""

    address: str = LOOPBACK
    enter: tuple[str, ...] = ()


class Start(Protocol):
    """The `ray start` of a node, with as much of a ``subprocess.Popen`` as a fork offers."""

    def poll(self) -> int | None: ...

    def wait(self, timeout: float) -> int: ...


class RayProgram:
    """Ray's program for nodes of one cluster: forks of one process, which has imported it (``ray_command``).

    A node that is in another place of the network than this one imports it in a process of its own.
    """

    def __init__(self, cluster: ClusterFile, *, dashboard: bool) -> None:
        self.cluster, self.dashboard = cluster, dashboard
        self._forking: subprocess.Popen[bytes] | None = None
        self._codes: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Leave running what was started. If a signal ends this process, start nothing more."""
        if self._forking is not None:
            if kind is not None and not issubclass(kind, Exception):
                self._forking.kill()
            for end in (self._forking.stdin, self._forking.stdout):
                assert end is not None
                end.close()
            self._forking.wait()

    def start(self, name: str, place: Place, arguments: list[str]) -> Start:
        log, mark = log_of(self.cluster, name), {NODE_MARKER: name}
        with log.open("wb") as file, signals.held():
            if place.enter:
                return self._process([*place.enter, *self._command(*arguments)], mark, file, subprocess.DEVNULL, file)
            if self._forking is None:
                self._forking = self._process(self._command(EACH), {}, file, subprocess.PIPE, subprocess.PIPE)
        assert self._forking.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, and its exit code is that of the start
            self._forking.stdin.write(request(arguments, mark, log))
        return Fork(self, log)

    def code(self, log: Path, timeout_s: float) -> int | None:
        """The exit code of the fork with this log. None if it has not ended when the time is over."""
        assert self._forking is not None
        assert self._forking.stdout is not None
        deadline = time.monotonic() + timeout_s
        output = select.poll()  # not `select`, which refuses a file whose number is above 1023
        output.register(self._forking.stdout)
        while str(log) not in self._codes:
            if not output.poll(1e3 * max(0.0, deadline - time.monotonic())):
                return None
            line = self._forking.stdout.readline()
            if not line:
                return self._forking.wait() or 1
            self._codes |= codes(line)
        return self._codes[str(log)]

    def _command(self, *arguments: str) -> list[str]:
        return python_process.module(MODULE, *([WITH_DASHBOARD] if self.dashboard else []), *arguments)

    def _process(
        self, command: list[str], mark: Mapping[str, str], log: IO[bytes], standard_input: int, output: int | IO[bytes]
    ) -> subprocess.Popen[bytes]:
        environment = {**built(os.environ, passed_to(self.cluster)), **self.cluster.environment}
        environment |= user_packages.variables(packages_of(self.cluster))
        return subprocess.Popen(
            command,
            bufsize=0,
            env={**environment, CLUSTER_MARKER: self.cluster.id, **mark},
            umask=0o077,
            stdin=standard_input,
            stdout=output,
            stderr=log,
            # Ctrl-C at the terminal is not for the cluster. A group, not a session: Linux shares the processors between
            # sessions first (autogroups), and with one for each node an island's steps took up to ten times as long
            process_group=0,
        )


@dataclass(frozen=True, slots=True)
class Fork:
    """A ``Start`` by its program, which tells forks apart by their logs."""

    program: RayProgram
    log: Path

    def poll(self) -> int | None:
        return self.program.code(self.log, 0.0)

    def wait(self, timeout: float) -> int:
        code = self.program.code(self.log, timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.log), timeout)
        return code


def start_head(program: RayProgram, place: Place) -> Start:
    """The head; one that died at this address before goes on from what it kept."""
    cluster = program.cluster
    # Ray takes raylets of ours that wait for this head for a head that runs, if this file says where it was
    Path(cluster.temp_dir, CONTROL_GROUP, "ray_current_cluster").unlink(missing_ok=True)
    port = int(cluster.address.rpartition(":")[2])
    return _start(program, CONTROL_GROUP, place, head_options(port, dashboard=program.dashboard))


def start_node(program: RayProgram, name: str, group: NodeGroup, number: int, place: Place) -> Start:
    """The node of this number in its group, from 0."""
    arguments = ["--address", program.cluster.address, "--num-cpus", str(group.cpus)]
    if group.accelerator == "gpu":
        arguments += ["--num-gpus", str(group.accelerators)]
    elif group.accelerators:
        arguments += ["--resources", json.dumps({"TPU": group.accelerators})]
    if group.memory_gib is not None:
        arguments += ["--memory", str(int(group.memory_gib * (1 << 30)))]
    labels = {GROUP_LABEL: group.name, REGION_LABEL: group.region}
    if group.accelerator == "tpu" and group.accelerators:
        slice_number, worker = divmod(number, group.slice_hosts)
        labels[SLICE_LABEL] = f"{group.name}-slice-{slice_number}"
        labels[WORKER_LABEL] = str(worker)
        labels[TOPOLOGY_LABEL] = f"{group.slice_hosts}x{group.accelerators}"
    listed = ",".join(f"{name}={value}" for name, value in labels.items())
    return _start(program, name, place, [*arguments, "--labels", listed])


def unregister_dead(program: RayProgram, place: Place) -> Start:
    """Have the head, which answers, take those of its nodes for dead that no process here belongs to."""
    cluster = program.cluster
    return program.start(dead_nodes.VERB, place, [dead_nodes.VERB, cluster.address, cluster.id, cluster.temp_dir])


def head_options(port: int, *, dashboard: bool = False) -> list[str]:
    """Return the options of ``ray start`` for a head, besides ``node_options``."""
    return [
        *("--head", "--port", str(port), "--num-cpus", "0", "--no-monitor"),
        *("--include-dashboard", str(dashboard).lower(), "--dashboard-host", LOOPBACK),
        *("--dashboard-port", str(free_port())),
        *("--labels", f"{GROUP_LABEL}={CONTROL_GROUP}"),
    ]


def node_options(folder: Path, name: str) -> list[str]:
    """Return the options of ``ray start`` for any node of this name with its files in ``folder``."""
    shared_memory_bytes = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.exists() else 1 << 30
    return [
        *("--temp-dir", str(folder), "--node-name", name),
        *("--object-store-memory", str(max(100 << 20, min(OBJECT_STORE_BYTES_MAX, shared_memory_bytes // 8)))),
        *("--dashboard-agent-listen-port", "0", "--min-worker-port", "0", "--max-worker-port", "0"),
        *("--include-log-monitor", "false", "--disable-usage-stats"),
        *socket_room.options(folder),
    ]


def log_of(cluster: ClusterFile, name: str) -> Path:
    """Return the path of the output of this node's ``ray start``."""
    return Path(cluster.temp_dir, f"{name}.log")


def passed_to(cluster: ClusterFile) -> tuple[str, ...]:
    """Return the names of the variables that this cluster's processes receive from the caller's environment."""
    path = cluster.state / PASSED
    return tuple(json.loads(path.read_text())) if path.exists() else ()


def pass_on(cluster: ClusterFile, names: Sequence[str]) -> None:
    """The processes that are started from now on get these too."""
    if names:
        (cluster.state / PASSED).write_text(json.dumps(sorted({*names, *passed_to(cluster)})))


def give_packages(cluster: ClusterFile, folders: Sequence[str]) -> bool:
    """The processes that are started from now on find packages there too. True if that is new to this cluster."""
    before = packages_of(cluster)
    if set(folders) <= set(before):
        return False
    (cluster.state / PACKAGES).write_text(json.dumps(list(dict.fromkeys([*before, *folders]))))
    return True


def packages_of(cluster: ClusterFile) -> tuple[str, ...]:
    """The folders in which this cluster's processes find packages of jobs."""
    path = cluster.state / PACKAGES
    return tuple(json.loads(path.read_text())) if path.exists() else ()


def _start(program: RayProgram, name: str, place: Place, arguments: list[str]) -> Start:
    # a folder for each node: nodes that start at once in one folder take the same socket names
    folder = Path(program.cluster.temp_dir, node_folder(name))
    folder.mkdir(exist_ok=True)
    options = ["--node-ip-address", place.address, *node_options(folder, name)]
    return program.start(name, place, ["start", *arguments, *options])
