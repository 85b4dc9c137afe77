"""The place of the object stores of Ray's nodes: shared memory, or a folder if that cannot be written.

Responsible for starting nodes on machines and in containers whose /dev/shm is read-only or missing.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def options(folder: Path, shared_memory: Path = SHARED_MEMORY) -> list[str]:
    """Return the options of ``ray start`` for a node with its files in ``folder``."""
    return ["--plasma-directory", str(folder)] if problem(shared_memory) else []


def note(shared_memory: Path = SHARED_MEMORY) -> str:
    """Return the warning for a user who starts nodes; empty if shared memory can be used."""
    reason = problem(shared_memory)
    return f"{reason}: object stores are in Ray's folder instead, which is slower on a disk" if reason else ""


def problem(shared_memory: Path = SHARED_MEMORY) -> str:
    """Return why object stores cannot be in shared memory; empty if they can."""
    try:
        with tempfile.TemporaryFile(dir=shared_memory):
            return ""
    except OSError as error:
        return f"{shared_memory} cannot be written ({error.strerror})"
