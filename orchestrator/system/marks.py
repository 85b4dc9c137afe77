"""The mark of a home folder, which identifies the processes and folders of its cluster even if files are lost.

    ATOLL_CLUSTER_HOME=DEVICE:INODE:PATH      in the environment of every process of the cluster

The path names the home, and device and inode verify that it is the same folder: another container may have a folder with
that path, and processes that are visible here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from orchestrator.system import home_files

HOME_MARKER = "ATOLL_CLUSTER_HOME"
BY_UP, BY_HEAD, ELSEWHERE = "atoll up", "atoll head", "elsewhere"
"""What runs the head of a home's cluster, as ``cluster.json`` has it."""


def mark_of(home: Path) -> str:
    """Return the mark of this folder. Raises OSError if it does not exist."""
    return f"{place_of(home)}:{home.resolve()}"


def is_of(home: Path, mark: str, pid: int | None = None) -> bool:
    """Return whether the mark is of ``home``, as seen by this process, or by the process ``pid``.

    A home that was removed and created again is the same one for a process that sees the same folders as this one.
    """
    place, _, path = _parts(mark)
    if path != str(home.resolve()):
        return False
    with suppress(OSError):
        if place == place_of(home):
            return True
    return pid is not None and sees_same_folders(pid)


def is_foreign(home: Path, mark: str, pid: int | None = None) -> bool:
    """Return whether the mark is certainly of another folder. A moved folder is the same.

    A folder with the same path is another one if the process ``pid`` does not see the same folders as this process.
    """
    place, _, path = _parts(mark)
    with suppress(OSError):
        if place == place_of(home):
            return False
    return path != str(home.resolve()) or (pid is not None and not sees_same_folders(pid))


def path_in(mark: str) -> Path:
    """Return the path of the home at the time it was marked."""
    return Path(_parts(mark)[2])


def place_in(mark: str) -> str:
    """Return the device and the inode of the home as ``place_of`` has them."""
    return _parts(mark)[0]


def place_of(folder: Path) -> str:
    """Return what identifies a folder whatever its path is: DEVICE:INODE. Raises OSError if it does not exist."""
    about = folder.stat()
    return f"{about.st_dev}:{about.st_ino}"


def marked_pids(home: Path) -> list[int]:
    """Return the live processes with the mark of this home."""
    import psutil  # late: every client imports this module

    pids = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if HOME_MARKER in (environment := process.environ()) and of_home(home, environment, process.pid):
                pids.append(process.pid)
    return pids


def of_home(home: Path, environment: Mapping[str, str], pid: int) -> bool:
    """Return whether a process with this environment belongs to this home."""
    return HOME_MARKER in environment and is_of(home, environment[HOME_MARKER], pid)


def supervisor_of(home: Path) -> str:
    """Return what runs the head of the home's cluster; ``BY_UP`` if that is unknown."""
    try:
        named = json.loads(home_files.read(home / "cluster.json"))["supervisor"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return BY_UP
    return named if named in (BY_HEAD, ELSEWHERE) else BY_UP


def _parts(mark: str) -> tuple[str, str, str]:
    device, _, rest = mark.partition(":")
    inode, colon, path = rest.partition(":")
    return f"{device}:{inode}", colon, path


def sees_same_folders(pid: int) -> bool:
    """Return whether a path means the same file to that process: it shares our mount namespace and root folder.

    A container has its own mount namespace, a chroot only its own root. False if that cannot be determined. On a system
    without namespaces, all processes see the same.
    """
    return _shares_namespace(pid, "mnt") and _shares_root(pid)


def is_of_this_system(pid: int) -> bool:
    """Return whether that process is in the same container, chroot or plain machine as this one.

    Another container may have its own `atoll`, which manages its processes and is not visible here.
    """
    return sees_same_folders(pid) and _shares_namespace(pid, "pid")


def _shares_namespace(pid: int, kind: str) -> bool:
    if not Path(f"/proc/self/ns/{kind}").exists():
        return True
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/{kind}") == os.readlink(f"/proc/self/ns/{kind}")
    return False


def _shares_root(pid: int) -> bool:
    if not os.path.lexists("/proc/self/root"):
        return True
    with suppress(OSError):
        theirs, ours = f"/proc/{pid}/root", "/proc/self/root"
        return os.readlink(theirs) == os.readlink(ours) and os.path.samestat(os.stat(theirs), os.stat(ours))
    return False
