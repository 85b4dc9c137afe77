"""Which threads of an island give way to the service, where it computes on the host's cores.

Linux keeps niceness per thread and hands it on to threads started from there: XLA's pool and the island's loop. Without it
four islands on two cores starve the synchroniser for seconds, and everyone looks dead. Ray's own threads keep theirs.
"""

from __future__ import annotations

import os
from pathlib import Path

TRAINING_NICENESS = 10


def give_way() -> None:
    """This thread, and those it starts from now on."""
    _lower(0)


def threads() -> frozenset[int]:
    """Those this process has."""
    return frozenset(int(task.name) for task in Path("/proc/self/task").iterdir()) if _KEPT_BY_THREAD else frozenset()


def give_way_since(before: frozenset[int]) -> None:
    """This thread, and every one that was not among ``before``."""
    give_way()
    for thread in threads() - before:
        try:
            _lower(thread)
        except ProcessLookupError:
            continue  # it has ended


def _lower(thread: int) -> None:
    """0 is the calling one. Only root could raise a priority again, so what is lower already stays."""
    usual = os.getpriority(os.PRIO_PROCESS, thread)
    os.setpriority(os.PRIO_PROCESS, thread, max(usual, TRAINING_NICENESS))


_KEPT_BY_THREAD = Path("/proc/self/task").is_dir()
