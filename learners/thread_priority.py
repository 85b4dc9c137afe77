"""Priorities of threads of islands and evaluators: those that compute on the host's cores give way to the service's.

Linux keeps niceness per thread, and a thread hands it on to those it starts: XLA's pool and the island's loop. Without it
four islands on two cores starve the synchroniser for seconds, and every process looks dead. Ray's own threads keep theirs.
"""

from __future__ import annotations

import os
from pathlib import Path

TRAINING_NICENESS = 10


def lower_priority(niceness: int = TRAINING_NICENESS) -> None:
    """Lower the priority of this thread, and of those it starts from now on."""
    _lower(0, niceness)


def thread_ids() -> frozenset[int]:
    """The threads that this process has."""
    return frozenset(int(task.name) for task in Path("/proc/self/task").iterdir()) if _PER_THREAD else frozenset()


def lower_priority_of_new(before: frozenset[int], niceness: int = TRAINING_NICENESS) -> None:
    """Lower the priority of this thread, and of every one that was not among ``before``."""
    lower_priority(niceness)
    for thread in thread_ids() - before:
        try:
            _lower(thread, niceness)
        except ProcessLookupError:
            continue  # it has ended


def _lower(thread: int, niceness: int) -> None:
    """0 is the calling one. Only root could raise a priority again, so what is lower already stays."""
    os.setpriority(os.PRIO_PROCESS, thread, max(os.getpriority(os.PRIO_PROCESS, thread), niceness))


_PER_THREAD = Path("/proc/self/task").is_dir()
