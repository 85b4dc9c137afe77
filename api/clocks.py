"""Time of day and elapsed time, kept apart: the time of day may be set at any moment, by hours, in both directions.

For what needs both: when something expires that was stamped with the time of day, how old it is, and whether the clock was
set while this process ran. Plain timestamps use the time of day, and plain durations ``time.monotonic``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

SET_MIN_S = 2.0
"""A smaller step between two checks is ignored. A well kept clock is slewed by less than a millisecond per second."""

logger = logging.getLogger(__name__)

Clock = Callable[[], float]


def uptime() -> float:
    """Return the seconds since the machine started, including sleep. This clock cannot be set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class TimeOfDay:
    """The time of day for expiry. It advances at least as fast as time passes, even if the clock is set back.

    It follows a clock that is set forward, and back to the right time again; what had not expired is then valid again.
    """

    def __init__(self, wall: Clock = time.time, passed: Clock = uptime) -> None:
        self._wall, self._passed = wall, passed
        self._began = wall() - passed()

    def __call__(self) -> float:
        return max(self._wall(), self._began + self._passed())


class Ages:
    """The ages of things that were stamped with the time of day. Setting the clock does not change them.

    When something is first seen here, its age is what the clock says, but never negative.
    """

    def __init__(self, wall: Clock = time.time, passed: Clock = uptime) -> None:
        self._wall, self._passed = wall, passed
        self._born: dict[str, float] = {}

    def of(self, name: str, stamped_at: float) -> float:
        """Return the age in seconds."""
        now = self._passed()
        return now - self._born.setdefault(name, now - max(0.0, self._wall() - stamped_at))

    def forget(self, name: str) -> None:
        self._born.pop(name, None)

    def forget_all_but(self, names: Iterable[str]) -> None:
        keep = set(names)
        self._born = {name: born for name, born in self._born.items() if name in keep}


class ClockWatch:
    """Detects and logs that the clock was set since this process started. Thread-safe."""

    def __init__(self, wall: Clock = time.time, passed: Clock = uptime) -> None:
        self._wall, self._passed = wall, passed
        self._lock = threading.Lock()
        self._began = self._last = wall() - passed()

    def check(self) -> float:
        """Return by how many seconds the clock was set in all; positive if forward."""
        with self._lock:
            before, self._last = self._last, self._wall() - self._passed()
            step_s = self._last - before
            if abs(step_s) > SET_MIN_S:
                logger.warning(
                    "the clock of this machine was set %s by %.0f s. Jobs are not affected, and tokens do not expire later; "
                    "times of day from now on are those of the new clock",
                    "forward" if step_s > 0 else "back",
                    abs(step_s),
                )
            return self._last - self._began
