"""The folder in which JAX keeps compiled programs: where it is, and whether it can be used.

    JAX_COMPILATION_CACHE_DIR, else XDG_CACHE_HOME/atoll/xla, else HOME/.cache/atoll/xla

The cache saves seconds of a start and nothing depends on it. So a folder that cannot be used is a reason for a warning and
never for an error: homes of batch jobs are read-only, full or missing, and containers run under ids that no user has.
Responsible for that warning, which `atoll up`, `atoll join`, `atoll doctor` and islands share. It leaves the use of the
cache to ``learners.compilation_cache``, and never imports JAX.
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
    """The folder, which need not exist; None for a store that is no folder, which only JAX can use.

    Raises InfrastructureError where nothing says where it is.
    """
    if configured := environment.get(SETTING):
        return None if "://" in configured else Path(configured)
    if Path(
        caches := environment.get("XDG_CACHE_HOME", "")
    ).is_absolute():  # others are ignored, as its specification says
        return Path(caches) / "atoll" / "xla"
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
    """The file that a process locks while it writes to the folder, which is made if missing. Raises InfrastructureError."""
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
    """Raises InfrastructureError where a file of ``PROBE_BYTES`` cannot be written."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            rest = memoryview(bytes(PROBE_BYTES))
            while rest:  # a short write says nothing of the reason, the next one does
                rest = rest[file.write(rest) :]
    except OSError as error:
        raise unusable(folder, error) from error


def problem(environment: Mapping[str, str]) -> InfrastructureError | None:
    """The warning for processes that are started with this environment on this machine now; None if all is well."""
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
    """The warning about this folder; it names what is in the way, where a file is."""
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    with suppress(OSError, ValueError):
        obstacle = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
        if not obstacle.is_dir():
            reason = f"{obstacle} is not a folder"
    return _refused(folder, reason)


def _refused(place: Path | str, reason: str) -> InfrastructureError:
    return InfrastructureError(
        detail=f"Compiled programs cannot be kept in {place}: {reason}. Training works all the same, but each island "
        "compiles its step anew when it starts.",
        remedy=f"To keep them, set XDG_CACHE_HOME or {SETTING} to a folder that this user can write and that has room.",
    )
