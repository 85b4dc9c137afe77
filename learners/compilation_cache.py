"""JAX's persistent compilation cache, made safe for many processes that start at once and may be killed.

A restarted island finds its compiled step on disk and trains seconds earlier. When several islands start on one node, the
first compiles and the others wait for it, instead of all compiling the same program on the same cores.

JAX writes cache entries in place, without a lock. A process killed in the middle would leave a torn entry that every
later start reads, warns of and never replaces. So the holder of the lock leaves a mark for as long as it writes; who
finds a mark with the lock free empties the cache.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache as jax_cache

LOCK_WAIT_MAX_S = 90.0
"""After this long compile without the lock: its holder may be a stopped process, and islands never wait for others."""

_used: Path | None = None


def directory() -> Path:
    """JAX's own setting where there is one, else a folder of ours in the user's cache."""
    if configured := jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]  # made by JAX as it is imported
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "atoll" / "xla"


@contextlib.contextmanager
def exclusive() -> Iterator[None]:
    """Within it, JAX compiles through the cache, and no other process of ours on this host writes to it."""
    folder = directory()
    folder.mkdir(parents=True, exist_ok=True)
    _use(folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    with (folder / "lock").open("w") as lock:
        if not _acquired(lock.fileno()):
            yield
            return
        mark = folder / "being-written"
        if mark.exists():
            for entry in folder.glob("*-cache"):
                entry.unlink(missing_ok=True)
        mark.touch()
        yield
        mark.unlink(missing_ok=True)


def _use(folder: Path) -> None:
    """JAX decides at its first compilation whether it has a cache, and where, and then believes it for good."""
    global _used
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if folder != _used:
        jax_cache.reset_cache()
        _used = folder


def _acquired(descriptor: int) -> bool:
    """Take the lock; the kernel gives it back when this process closes the file or dies."""
    give_up_at = time.monotonic() + LOCK_WAIT_MAX_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > give_up_at:
                return False
            time.sleep(0.02)
        else:
            return True
