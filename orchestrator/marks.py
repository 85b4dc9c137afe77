"""The mark of a home folder, by which the processes and folders of its cluster are known again whatever files are lost.

    ATOLL_CLUSTER_HOME=DEVICE:INODE:PATH      in the environment of every process of the cluster

The path says which home is meant, device and inode that it is that folder: another container may have one of that path, and
processes that this one sees. Responsible for who belongs to a home; refuses to know what a cluster is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

HOME_MARKER = "ATOLL_CLUSTER_HOME"


def mark_of(home: Path) -> str:
    """The mark of this folder. Raises OSError where there is none."""
    about = home.stat()
    return f"{about.st_dev}:{about.st_ino}:{home.resolve()}"


def is_of(home: Path, mark: str, pid: int | None = None) -> bool:
    """Whether the mark is that of ``home``, as this process, or the process ``pid``, sees it.

    A home that was removed and made anew is the same one to a process that sees the same folders as we do.
    """
    place, _, path = _parts(mark)
    if path != str(home.resolve()):
        return False
    with suppress(OSError):
        if place == _place(home):
            return True
    return pid is not None and _same_folders(pid)


def is_foreign(home: Path, mark: str) -> bool:
    """Whether the mark is certainly that of another folder; one that was moved is the same."""
    place, _, path = _parts(mark)
    with suppress(OSError):
        return path != str(home.resolve()) and place != _place(home)
    return path != str(home.resolve())


def path_in(mark: str) -> Path:
    """Where the home was when it was marked."""
    return Path(_parts(mark)[2])


def marked_pids(home: Path) -> list[int]:
    """The live processes that carry the mark of this home."""
    pids = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if HOME_MARKER in (environment := process.environ()) and of_home(home, environment, process.pid):
                pids.append(process.pid)
    return pids


def of_home(home: Path, environment: Mapping[str, str], pid: int) -> bool:
    """Whether a process with this environment is of this home."""
    return HOME_MARKER in environment and is_of(home, environment[HOME_MARKER], pid)


def _parts(mark: str) -> tuple[str, str, str]:
    device, _, rest = mark.partition(":")
    inode, colon, path = rest.partition(":")
    return f"{device}:{inode}", colon, path


def _place(home: Path) -> str:
    about = home.stat()
    return f"{about.st_dev}:{about.st_ino}"


def _same_folders(pid: int) -> bool:
    """Whether the process is in our mount namespace; where there are none, it is."""
    if not Path("/proc/self/ns/mnt").exists():
        return True
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/mnt") == os.readlink("/proc/self/ns/mnt")
    return False
