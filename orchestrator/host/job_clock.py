"""The clock of a job: seconds since it was created, as on its tape. It never runs back, and nobody can set it.

    RUN_DIR/clock.json     when the job was created, on the clock that began with the machine's start, and which start

While a synchroniser lives its time is the monotonic clock's. The next one goes on by what is written here, so that a time
of day that was set by hours meanwhile adds no hours to the tape. After a start of the machine, or on another one, the time
of day is all there is: then the time since the job was created, but no less than what the tape has.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path

from orchestrator.disk import LocalDisk
from orchestrator.run_folder import CLOCK

log = logging.getLogger(__name__)

AGE_MAX_S = 1e9
"""Thirty years: a file that says more is damaged."""


def uptime() -> float:
    """Seconds since the machine was started, those in which it slept included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def elapsed(
    run_dir: Path,
    started_at: float,
    tape_end: float | None,
    *,
    boot: str | None = None,
    uptime: Callable[[], float] = uptime,
    wall: Callable[[], float] = time.time,
) -> float:
    """Seconds since the job was created, stored for the next synchroniser. ``tape_end`` is the tape's end, if any."""
    boot, up = boot or LocalDisk().boot(), uptime()
    path = run_dir / CLOCK
    if tape_end is None:
        passed = 0.0
    elif (created := _created(path, boot, up)) is not None:
        passed = max(tape_end, up - created)
    else:
        passed = max(tape_end, wall() - started_at)
    try:
        LocalDisk().replace(path, json.dumps({"boot": boot, "created_uptime_s": up - passed}).encode())
    except OSError as error:
        log.warning("%s cannot be written, so that the next synchroniser goes by the time of day: %s", path, error)
    return passed


def _created(path: Path, boot: str, up: float) -> float | None:
    """When the job was created, by the clock of this start of the machine; None where that is not known.

    It may be negative: a job can be older than the machine's last start. What no job can be counts as unknown.
    """
    try:
        written = json.loads(path.read_bytes())
        created = float(written["created_uptime_s"])
        is_possible = written["boot"] == boot and up - AGE_MAX_S <= created <= up
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return created if is_possible else None
