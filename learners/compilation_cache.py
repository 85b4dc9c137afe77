"""JAX's persistent compilation cache, made safe for many processes that start at once and may be killed.

A restarted island finds its compiled step on disk and starts training seconds earlier. If several islands start on one node,
the first compiles and the others wait for it, instead of all compiling the same program on the same cores.

JAX writes cache entries in place, without a lock. A process that is killed meanwhile, or a full disk, would leave a torn
entry, which every later start reads, warns of and never replaces. So the holder of the lock leaves a mark while it writes,
and keeps the mark if a write failed. A process that finds a mark and a free lock empties the cache.

The cache is optional. If its folder cannot be created, locked or written, JAX compiles without it, and the process logs one
warning with the reason (``orchestrator.system.program_cache``).
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import jax
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from orchestrator.errors import InfrastructureError
from orchestrator.system import program_cache

log = logging.getLogger(__name__)

LOCK_WAIT_MAX_S = 90.0
"""Compile without the lock after this long: its holder may be a stopped process, and islands never wait for others."""
COMPLAINT_OF_JAX = "persistent compilation cache entry"

_used: Path | None = None
_enabled: bool = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]  # made by JAX as it is imported
_warned = False


def directory() -> Path | None:
    """Return JAX's configured folder, or ours in the user's cache. None if only JAX can use the configured one.

    Raises InfrastructureError if there is no place for it.
    """
    configured = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    return program_cache.directory({**os.environ, **({program_cache.SETTING: configured} if configured else {})})


@contextlib.contextmanager
def exclusive() -> Iterator[None]:
    """Let JAX compile through the cache, while no other process of ours on this host writes to it."""
    if not _enabled:
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            if (folder := directory()) is not None:
                stack.enter_context(_cache_in(folder))
        except InfrastructureError as reason:
            _do_without(reason)
        yield


@contextlib.contextmanager
def _cache_in(folder: Path) -> Iterator[None]:
    """Make JAX use this folder. Raises InfrastructureError before the block runs, never after it."""
    with program_cache.open_lock(folder) as lock:
        is_held = _acquired(lock, folder)
        mark = folder / "being-written"
        if is_held:
            _begin_writing(folder, mark)
        _use(folder)
        with warnings.catch_warnings(record=True) as complaints:
            warnings.simplefilter("always")
            yield
        failed = [text for one in complaints if COMPLAINT_OF_JAX in (text := str(one.message))]
        for one in complaints:
            if COMPLAINT_OF_JAX not in str(one.message):
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
        if failed:  # an entry may be torn, so the mark stays
            _do_without(program_cache.unusable(folder, OSError(0, failed[0].rpartition(": ")[2])))
        elif is_held:
            with contextlib.suppress(OSError):
                mark.unlink(missing_ok=True)


def _begin_writing(folder: Path, mark: Path) -> None:
    """Empty the cache if its last writer did not finish, then leave a mark. Raises InfrastructureError."""
    try:
        if mark.exists():
            for entry in folder.glob("*-cache"):
                entry.unlink(missing_ok=True)
        mark.touch()
    except OSError as error:
        raise program_cache.unusable(folder, error) from error
    program_cache.require_room(folder)


def _use(folder: Path) -> None:
    """Point JAX to this folder. JAX otherwise decides once, at its first compilation, whether it has a cache and where."""
    global _used
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if folder != _used:
        jax_cache.reset_cache()
        _used = folder


def _do_without(reason: InfrastructureError) -> None:
    """Let JAX compile without a cache until the next ``exclusive`` finds a usable one."""
    global _used, _warned
    jax.config.update("jax_enable_compilation_cache", False)
    jax_cache.reset_cache()
    _used = None
    if not _warned:
        log.warning("%s", reason)
        _warned = True


def _acquired(lock: IO[bytes], folder: Path) -> bool:
    """Take the lock, waiting at most ``LOCK_WAIT_MAX_S``. Raises InfrastructureError if the folder supports no locks."""
    give_up_at = time.monotonic() + LOCK_WAIT_MAX_S
    while not program_cache.take(lock, folder):
        if time.monotonic() > give_up_at:
            return False
        time.sleep(0.02)
    return True
