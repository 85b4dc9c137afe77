"""The node agent: one small actor on every node, which can end a process there by SIGKILL: no warning, no clean-up.

For chaos it can stop one as well (SIGSTOP), and makes sure that it continues when its time is over, whatever is gone
by then; and it can end its own node, by the raylet that all processes of it hang on.

Where its environment says so (``notices``) it listens for the end of its machine, and has Ray drain the node for that. From
a node that is being drained it goes as the last one: it books a byte, and Ray ends such a node once nothing is booked there.

It removes log files of Ray's workers that ended, all but the newest: Ray bounds each file, but not how many there are.

Kept for as long as the cluster is up and shared by all jobs, so that a kill or a recovery never waits for a process to
start. Refuses to touch a process other than the one meant: ids are reused, so it must be older than its last sighting
(``seen_at``, in seconds since the machine was started: a clock that nobody can set). How it is called is ``node_agents``'
business; nothing of that is imported here, for a process of its own on every node is to stay small.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ParamSpec, TypeVar

import psutil

from orchestrator.errors import ConfigurationError
from orchestrator.runtime.fork_server import RAYLET
from orchestrator.runtime.processes import signal_seen
from orchestrator.system import notices
from orchestrator.system.logbook import LogAddition, addition
from orchestrator.system.run_folder import claim

log = logging.getLogger(__name__)

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")

ANSWERED_S = 0.5
LOOK_S = 0.5
AGAIN_S = 1.0
LOGS_KEPT = 40
"""Log files of ended workers that stay; a worker has up to three."""
LOGS_LOOK_S = 60.0
_WORKER_LOG = re.compile(r"(?:worker|python-core-worker)-\S*[-_](\d{1,9})\.(?:out|err|log)(?:\.\d{1,3})?")
OURSELVES = ("ray::IDLE", "ray::NodeAgent")
"""Processes of Ray's workers that are no reason for a node to stay."""


class NodeAgent:
    def __init__(self) -> None:
        self._leaving = threading.Event()
        threading.Thread(target=keep_worker_logs_few, name="worker-logs", daemon=True).start()
        try:
            wanted = notices.settings(os.environ)
        except ConfigurationError as error:
            log.error("notices are not polled: %s", error)
            return
        threading.Thread(target=notices.watch, args=(wanted, drain_own_node), name="notices", daemon=True).start()

    def ready(self) -> bool:
        return True

    def kill(self, pid: int, seen_at: float) -> bool:
        """SIGKILL process ``pid`` if it is the one seen at ``seen_at``. True if it was there."""
        return signal_seen(pid, seen_at, signal.SIGKILL)

    def stop(self, pid: int, seen_at: float, duration_s: float) -> bool:
        """SIGSTOP it, and let it go on after ``duration_s``."""
        stopped = signal_seen(pid, seen_at, signal.SIGSTOP)
        if stopped:
            timer = threading.Timer(duration_s, self.go_on, (pid, seen_at))
            timer.daemon = True
            timer.start()
        return stopped

    def go_on(self, pid: int, seen_at: float) -> bool:
        """SIGCONT: no harm to one that runs."""
        return signal_seen(pid, seen_at, signal.SIGCONT)

    def kill_node(self) -> str:
        """SIGKILL this node's raylet, just after this is answered: nothing answers after it. Empty if there is one."""
        raylet = own_raylet()
        if raylet is None:
            return f"no parent of this node agent is a {RAYLET}"
        threading.Timer(ANSWERED_S, raylet.kill).start()
        return ""

    def shares(self, mark: str, text: str, run_dir: str, fleet: str) -> bool:
        """Return whether the file ``mark`` has this text here, as on the machine of the caller that wrote it.

        Otherwise claim the run's folder on this machine for the installation (``run_folder.claim``). Raises OSError.
        """
        with suppress(OSError):
            if Path(mark).read_text() == text:
                return True
        claim(Path(run_dir), fleet)
        return False

    def read_logs(self, requests: Sequence[tuple[str, int]]) -> list[LogAddition | None]:
        """Return what was added to each of these logs since the given byte (``logbook.addition``)."""
        return [addition(Path(path), at) if path.endswith(".log") else None for path, at in requests]

    def run(
        self, function: Callable[Arguments, Answer], *arguments: Arguments.args, **named: Arguments.kwargs
    ) -> Answer:
        """Call the function on this machine, for a service on another one, and return its answer."""
        return function(*arguments, **named)

    def leave(self) -> None:
        """The node is being drained: this process ends once it is the last one. Returns at once."""
        raylet = own_raylet()
        if raylet is not None and not self._leaving.is_set():
            self._leaving.set()
            threading.Thread(target=end_as_the_last_one, args=(raylet.pid,), name="leave", daemon=True).start()


def keep_worker_logs_few() -> None:
    """Remove old log files of ended workers of this node, for as long as the process lives."""
    while True:
        try:
            folder = Path(os.path.realpath("/proc/self/fd/1")).parent  # Ray sends a worker's output to its logs
            for path in old_worker_logs(folder):
                path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("old log files of workers cannot be removed: %s", error)
        time.sleep(LOGS_LOOK_S)


def old_worker_logs(folder: Path, keep: int = LOGS_KEPT) -> list[Path]:
    """Return the log files of workers that have ended, without the ``keep`` newest. Other files are never among them."""
    ended = []
    with os.scandir(folder) as entries:
        for entry in entries:
            match = _WORKER_LOG.fullmatch(entry.name)
            if match and entry.is_file(follow_symlinks=False) and not psutil.pid_exists(int(match[1])):
                ended.append((entry.stat(follow_symlinks=False).st_mtime, entry.path))
    return [Path(path) for _, path in sorted(ended, reverse=True)[keep:]]


def drain_own_node(notice: notices.Notice) -> None:
    """Ask the head to drain this node, again and again until the head answers."""
    from orchestrator.runtime import cluster  # not before it is needed: it is most of this process

    while True:
        try:
            cluster.drain_own_node(notice.cause, notice.deadline)
            return
        except Exception as error:  # whatever Ray raises while its head is away
            log.warning("the node cannot be drained (%s), but goes away nevertheless: %s", notice.cause, error)
            time.sleep(AGAIN_S)


def end_as_the_last_one(raylet: int) -> None:
    while workers_of(raylet):
        time.sleep(LOOK_S)
    os._exit(0)


def own_raylet() -> psutil.Process | None:
    """Return the raylet that this worker belongs to: its parent, or that of the fork server it is a fork of."""
    return next((parent for parent in psutil.Process().parents() if parent.name() == RAYLET), None)


def workers_of(raylet: int) -> list[int]:
    """The processes of this raylet in which anything but a node agent runs. Empty if there is no such raylet."""
    try:
        children = psutil.Process(raylet).children(recursive=True)  # most are forks of a worker (fork_server)
    except psutil.NoSuchProcess:
        return []
    return [child.pid for child in children if _works(child)]


def _works(process: psutil.Process) -> bool:
    try:
        name = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return name.startswith("ray::") and not name.startswith(OURSELVES)
