"""The free space on the disk under Ray's folder, where every process of a cluster has its logs and sockets.

Without it no process begins, and all that Ray says of this is that an actor died, or "Socket closed". Those that run are
not touched. Responsible for one sentence that says which disk, and what to do. Refuses to know who is waiting for it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryFile

from orchestrator.runtime.processes import is_own
from orchestrator.runtime.settings import TOKEN_VARIABLE

FREE_MIN_BYTES = 1 << 20
"""The logs that a process of Ray's begins with are some hundred kilobytes."""


def cluster_folder(environment: Mapping[str, str]) -> Path | None:
    """The folder of the embedded cluster that a process with this environment belongs to, if it does to one."""
    folder = Path(environment.get(TOKEN_VARIABLE, "")).parent
    return folder if is_own(folder) else None


def remedy(folder: Path | None) -> str:
    """``shortage`` as a sentence of its own; empty where there is none."""
    clause = shortage(folder)
    return f"{clause[:1].upper()}{clause[1:]}." if clause else ""


def shortage(folder: Path | None) -> str:
    """Return what is wrong with the folder's disk and what to do about it; empty if nothing is, or it cannot be read."""
    if folder is None:
        return ""
    try:
        disk = os.statvfs(folder)
        full = disk.f_bavail * disk.f_frsize < FREE_MIN_BYTES or (disk.f_files > 0 and not disk.f_favail)
        with TemporaryFile(dir=folder):  # a disk that failed is read-only, and its flags need not say so
            pass
    except OSError as error:
        if error.errno == errno.EROFS:
            return f"the disk under {folder}, Ray's folder, is read-only, so no process begins: mount it writable"
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return f"the disk under {folder}, Ray's folder, is full, so no process begins: make room on it" if full else ""
