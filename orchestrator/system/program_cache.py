"""The folder in which JAX keeps compiled programs: where it is, and whether it can be used.

    JAX_COMPILATION_CACHE_DIR, else XDG_CACHE_HOME/atoll/xla, else HOME/.cache/atoll/xla

The cache saves seconds at a start, and nothing depends on it. A folder that cannot be used causes a warning, never an
error: homes of batch jobs are read-only, full or missing, and containers run under user ids without an account.
Responsible for that warning, which `atoll up`, `atoll join`, `atoll doctor` and islands share. Leaves the use of the cache
to ``learners.compilation_cache``, and never imports JAX.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from orchestrator.errors import InfrastructureError

SETTING = "JAX_COMPILATION_CACHE_DIR"
SWITCH = "JAX_ENABLE_COMPILATION_CACHE"
PROBE_BYTES = 1 << 20
"""About what the programs of a small model take."""


def directory(environment: Mapping[str, str]) -> Path | None:
    """Return the folder, which need not exist; None for a store with a URL, which only JAX can use.

    Raises InfrastructureError if no variable and no account names one.
    """
    if configured := environment.get(SETTING):
        return None if "://" in configured else Path(configured)
    caches = Path(environment.get("XDG_CACHE_HOME", ""))
    if caches.is_absolute():  # its specification says to ignore others
        return caches / "atoll" / "xla"
    try:
        home = Path(environment["HOME"]) if environment.get("HOME") else Path.home()
    except (RuntimeError, KeyError) as error:
        raise _refused(
            "a home folder", f"HOME is not set, and user id {os.getuid()} has no entry that names one"
        ) from error
    if not home.is_absolute():
        raise _refused(home / ".cache", "HOME is not an absolute path")
    return home / ".cache" / "atoll" / "xla"


def open_lock(folder: Path) -> IO[bytes]:
    """Open the file that a process locks while it writes to the folder. Make the folder. Raises InfrastructureError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return open(os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600), "r+b", 0)
    except (OSError, ValueError) as error:
        raise unusable(folder, error) from error


def take(lock: IO[bytes], folder: Path) -> bool:
    """Lock the file, if no other process holds it. The kernel unlocks it when this process closes it, or dies.

    Raises InfrastructureError where the file system has no locks.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise _refused(folder, f"it cannot be locked ({error.strerror})") from error
    return True


def require_room(folder: Path) -> None:
    """Raise InfrastructureError if a file of ``PROBE_BYTES`` cannot be written."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            rest = memoryview(bytes(PROBE_BYTES))
            while rest:  # a short write has no reason; the next write raises it
                rest = rest[file.write(rest) :]
    except OSError as error:
        raise unusable(folder, error) from error


def problem(environment: Mapping[str, str]) -> InfrastructureError | None:
    """Return the warning for processes started with this environment on this machine; None if they can use the cache."""
    if environment.get(SWITCH, "").lower() in ("0", "false", "no", "n", "off", "f"):
        return None
    try:
        folder = directory(environment)
        if folder is not None:
            with open_lock(folder) as lock:
                take(lock, folder)
                require_room(folder)
    except InfrastructureError as error:
        return error
    return None


def unusable(folder: Path, error: OSError | ValueError) -> InfrastructureError:
    """Return the warning about this folder. It names the file that is in the place of a folder, if there is one."""
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    with suppress(OSError, ValueError):
        obstacle = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
        if not obstacle.is_dir():
            reason = f"{obstacle} is not a folder"
    return _refused(folder, reason)


def _refused(place: Path | str, reason: str) -> InfrastructureError:
    return InfrastructureError(
        detail=f"Compiled programs cannot be kept in {place}: {reason}. Training works, but each island compiles "
        "its step at every start.",
        remedy=f"To keep them, set XDG_CACHE_HOME or {SETTING} to a folder that this user can write and that has room.",
    )
