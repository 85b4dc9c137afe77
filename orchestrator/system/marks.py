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
    return pid is not None and sees_same_folders(pid)


def is_foreign(home: Path, mark: str, pid: int | None = None) -> bool:
    """Whether the mark is certainly that of another folder; one that was moved is the same.

    A folder of the same path is another one to the process ``pid``, if that does not see the same folders as we do.
    """
    place, _, path = _parts(mark)
    with suppress(OSError):
        if place == _place(home):
            return False
    return path != str(home.resolve()) or (pid is not None and not sees_same_folders(pid))


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


def sees_same_folders(pid: int) -> bool:
    """Whether a path means the same file to this process as to us: it shares our mount namespace and our root folder.

    A container has a mount namespace of its own, a chroot only a root. What cannot be looked at does not see the same.
    Where there are no namespaces, all processes do.
    """
    return _shares_namespace(pid, "mnt") and _shares_root(pid)


def is_of_this_system(pid: int) -> bool:
    """Whether this process is of the same container, chroot or plain machine as we are.

    Another container may have its own `atoll`, which we cannot see, to end what runs in it.
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
