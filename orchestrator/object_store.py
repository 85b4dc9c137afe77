"""Where the object stores of Ray's nodes are: in shared memory, or in a folder where that cannot be written.

Responsible for the nodes of a machine or container with a read-only /dev/shm, or none, starting all the same.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def options(folder: Path, shared_memory: Path = SHARED_MEMORY) -> list[str]:
    """The options of ``ray start`` for a node whose files are in ``folder``."""
    return ["--plasma-directory", str(folder)] if problem(shared_memory) else []


def note(shared_memory: Path = SHARED_MEMORY) -> str:
    """The warning for whoever starts nodes; empty where all is well."""
    reason = problem(shared_memory)
    return f"{reason}: object stores are in Ray's folder instead, which is slower on a disk" if reason else ""


def problem(shared_memory: Path = SHARED_MEMORY) -> str:
    """Why object stores cannot be in shared memory; empty where they can."""
    try:
        with tempfile.TemporaryFile(dir=shared_memory):
            return ""
    except OSError as error:
        return f"{shared_memory} cannot be written ({error.strerror})"
