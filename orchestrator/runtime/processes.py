"""The processes of one embedded cluster, found by a mark in their environment and ended by their ids.

A Ray cluster is a few dozen processes that start one another and may outlive their parents. All of them inherit the mark, so
none is missed and no other process is touched.

The clusters of a home are found without its ``cluster.json``, by the marks of their processes and of their folders:

    TEMP_DIR/home             the mark of the home
    TEMP_DIR/cluster.json     a copy of HOME/cluster.json, in case that one is lost
    TEMP_DIR/token            a copy of HOME/cluster/token, likewise

So a damaged file makes no cluster an orphan, and nothing is removed that is not a cluster's own. Knows nothing of Ray.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from orchestrator.errors import DataError, InfrastructureError
from orchestrator.runtime.clusterfile import TOKEN, ClusterFile
from orchestrator.runtime.settings import CLUSTER_MARKER, FOLDER_VARIABLE, NODE_MARKER, TOKEN_VARIABLE
from orchestrator.system import home_files, socket_room
from orchestrator.system.marks import is_of, mark_of, of_home
from orchestrator.system.socket_room import CLUSTER_PREFIX

SIGHTING_TOLERANCE_S = 1.0
START_SILENCE_S, START_MAX_S = 60.0, 600.0
"""An actor that is being made is given up once its process has used no processor time for so long, or after this in all."""
KILL_TIMEOUT_S = 10.0
EXEC_S = 0.05
"""A process that is just becoming another program has no environment for an instant, and so no mark."""
MARK = "home"


def marked(cluster_id: str, node: str | None = None) -> list[psutil.Process]:
    """Every live process that carries this cluster's mark, and this node's if one is given, but this one."""
    return [
        process
        for process, environment in marked_by_any()
        if environment[CLUSTER_MARKER] == cluster_id
        and node in (None, environment.get(NODE_MARKER))
        and process.pid != os.getpid()
    ]


def nodes_with(cluster_id: str, name: str) -> set[str]:
    """The nodes of this cluster, by their marks, that have a live process of this name."""
    nodes = set()
    for process, environment in marked_by_any():
        with suppress(psutil.NoSuchProcess):
            if environment[CLUSTER_MARKER] == cluster_id and NODE_MARKER in environment and process.name() == name:
                nodes.add(environment[NODE_MARKER])
    return nodes


def marked_by_any() -> Iterator[tuple[psutil.Process, dict[str, str]]]:
    """Every live process that carries some cluster's mark, with its environment. Zombies are over; only their parent can
    remove them."""
    return _with_variable(CLUSTER_MARKER)


def end_all(cluster_id: str, polite_s: float = 0.5) -> int:
    """End every marked process: by SIGTERM first, then by SIGKILL until none is left. Returns how many there were.

    Raises InfrastructureError when some cannot be ended.
    """
    running = marked(cluster_id)
    for process in running:
        _signal(process, signal.SIGTERM)
    psutil.wait_procs(running, timeout=polite_s)
    ended = {process.pid for process in running} | kill_all(cluster_id)
    time.sleep(EXEC_S)
    return len(ended | kill_all(cluster_id))


def kill_all(cluster_id: str, node: str | None = None, timeout_s: float = KILL_TIMEOUT_S) -> set[int]:
    """SIGKILL every marked process, of this node if one is given, until none is left. Returns which there were.

    Raises InfrastructureError when some cannot be ended.
    """
    return _kill_all(lambda: marked(cluster_id, node), timeout_s)


def kill_marked(name: str, value: str) -> set[int]:
    """Kill the processes that have this variable in their environment, as ``kill_all`` does."""

    def left() -> list[psutil.Process]:
        return [process for process, environment in _with_variable(name) if environment[name] == value]

    killed = _kill_all(left, KILL_TIMEOUT_S)
    time.sleep(EXEC_S)
    return killed | _kill_all(left, KILL_TIMEOUT_S)


def _kill_all(find: Callable[[], list[psutil.Process]], timeout_s: float) -> set[int]:
    killed = set()
    deadline = time.monotonic() + timeout_s
    while left := find():  # again and again: those that live may start others meanwhile
        if time.monotonic() > deadline:
            pids = ", ".join(str(process.pid) for process in left)
            raise InfrastructureError(detail=f"Processes {pids} do not end.", remedy="Look at them with ps.")
        killed |= {process.pid for process in left}
        for process in left:
            _signal(process, signal.SIGKILL)
        psutil.wait_procs(left, timeout=1.0)
    return killed


class StartWatch:
    """Tells whether the process of an actor that is being made still works towards its start. That may take minutes.

    Its process is one on the node that was not there ``before``, or that has ``name`` in its title. On another machine no
    process is visible; then the start counts as silent.
    """

    def __init__(self, cluster_id: str, node: str, name: str, now: float, before: frozenset[int]) -> None:
        self._cluster_id, self._node, self._name, self._before = cluster_id, node, name, before
        self._began = self._worked_at = now
        self._seconds: dict[int, float] = {}

    def given_up(self, now: float) -> str:
        """Look at the processes, and return why the start will not be waited for any longer; empty if it will."""
        seconds = self._processor_seconds()
        if any(used > self._seconds.get(pid, used) for pid, used in seconds.items()):
            self._worked_at = now
        self._seconds = seconds
        if now - self._began > START_MAX_S:
            return f"it was not ready after {START_MAX_S:.0f} s"
        if now - self._worked_at > START_SILENCE_S:
            return f"no process of it did anything for {START_SILENCE_S:.0f} s"
        return ""

    def _processor_seconds(self) -> dict[int, float]:
        seconds = {}
        for process in marked(self._cluster_id, self._node):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if process.pid not in self._before or any(self._name in word for word in process.cmdline()):
                    used = process.cpu_times()
                    seconds[process.pid] = used.user + used.system
        return seconds


def signal_seen(pid: int, seen_at: float, number: signal.Signals) -> bool:
    """Send the signal to the process that had this id at ``seen_at``, in seconds since the machine was started.

    False, and nothing is sent, if it is gone: also where another process has its id by now.
    """
    try:
        process = psutil.Process(pid)
        if _began(pid) > seen_at + SIGHTING_TOLERANCE_S:
            return False
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return False
    return True


def _began(pid: int) -> float:
    """When the process began, in seconds since the machine was started, as ``CLOCK_BOOTTIME`` has them.

    A time of day would not do: the kernel reckons it from its clock as that is now, so that a change of the clock makes
    every process younger or older. Raises psutil.NoSuchProcess. Source: proc(5), /proc/PID/stat, field 22.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError) as error:
        raise psutil.NoSuchProcess(pid) from error
    ticks = int(text.rpartition(")")[2].split()[19])  # behind the name, which may have any character
    return ticks / os.sysconf("SC_CLK_TCK")


def _with_variable(name: str) -> Iterator[tuple[psutil.Process, dict[str, str]]]:
    """Every live process that has this variable in its environment, as far as this user may look."""
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            environment = process.environ()
            if name in environment and _alive(process):
                yield process, environment


def _alive(process: psutil.Process) -> bool:
    return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)


@dataclass(slots=True)
class HomeCluster:
    """A cluster of a home. ``id`` is empty where only a folder that does not say it is left; ``copy`` is its own file."""

    id: str
    temp_dirs: set[Path] = field(default_factory=set)
    pids: list[int] = field(default_factory=list)
    copy: ClusterFile | None = None


def clusters_of(home: Path) -> list[HomeCluster]:
    """All of them, those with the most living processes first."""
    clusters: dict[str, HomeCluster] = {}
    for process, environment in marked_by_any():
        if of_home(home, environment, process.pid):
            one = clusters.setdefault(environment[CLUSTER_MARKER], HomeCluster(environment[CLUSTER_MARKER]))
            one.pids.append(process.pid)
            if is_own(folder := run_folder(environment)):
                one.temp_dirs.add(folder)
    for folder in (each for place in socket_room.places() for each in place.glob(f"{CLUSTER_PREFIX}*")):
        if not is_own(folder) or not _is_marked(folder, home):
            continue
        by_process = next((one.id for one in clusters.values() if folder in one.temp_dirs), None)
        name = by_process or (copy.id if (copy := _copy_in(folder)) else "")
        clusters.setdefault(name, HomeCluster(name)).temp_dirs.add(folder)
    for one in clusters.values():
        one.copy = next((copy for folder in sorted(one.temp_dirs) if (copy := _copy_in(folder))), None)
    return sorted(clusters.values(), key=lambda one: -len(one.pids))


def leave_marks(cluster: ClusterFile, home: Path) -> None:
    """The cluster's folder says whose it is, and holds copies of its file and of its secret."""
    folder = Path(cluster.temp_dir)
    (folder / MARK).write_text(mark_of(home))
    cluster.write(folder)
    if cluster.state != folder:
        home_files.replace(folder / TOKEN, home_files.read(cluster.token_path))


def run_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder of sockets and logs of the cluster that a process with this environment belongs to."""
    named = environment.get(FOLDER_VARIABLE)
    return Path(named) if named else Path(environment.get(TOKEN_VARIABLE, "")).parent  # of an earlier build


def is_own(folder: Path) -> bool:
    """Return whether this can be a cluster's temporary folder. A damaged file could name any other folder."""
    with suppress(OSError):
        about = folder.lstat()
        is_folder = folder.is_dir() and not folder.is_symlink()
        return (
            is_folder
            and folder.is_absolute()
            and folder.name.startswith(CLUSTER_PREFIX)
            and about.st_uid == os.geteuid()
        )
    return False


def remove(folder: Path) -> None:
    """A cluster's temporary folder is gone, if it is one."""
    if is_own(folder):
        shutil.rmtree(folder, ignore_errors=True)


def _is_marked(folder: Path, home: Path) -> bool:
    try:
        return is_of(home, home_files.read(folder / MARK))
    except (OSError, ValueError):
        return False


def _copy_in(folder: Path) -> ClusterFile | None:
    try:
        return ClusterFile.find(folder)
    except DataError:
        return None
