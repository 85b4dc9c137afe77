"""The node agent: one small actor on every node, which can end a process there by SIGKILL: no warning, no clean-up.

For chaos it can stop one as well (SIGSTOP), and sees to it that it goes on when its time is over, whoever is gone by then;
and it can end its own node, by the raylet that all processes of it hang on.

Kept for as long as the cluster is up and shared by all jobs, so that a kill or a recovery never waits for a process to
start. Refuses to touch a process other than the one meant: ids are reused, so it must be older than its last sighting
(``seen_at``, in seconds since the machine was started: a clock that nobody can set). How it is called is ``node_agents``'
business; nothing of that is imported here, for a process of its own on every node is to stay small.
"""

from __future__ import annotations

import os
import signal
import threading

import psutil

from orchestrator.runtime.processes import signal_seen

RAYLET = "raylet"
ANSWERED_S = 0.5


class NodeAgent:
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
        raylet = psutil.Process(os.getppid())
        if raylet.name() != RAYLET:
            return f"this node agent's parent is {raylet.name()}, not {RAYLET}"
        threading.Timer(ANSWERED_S, raylet.kill).start()
        return ""
