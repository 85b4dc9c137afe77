"""The time of day and the time that passes, kept apart: the first may be set at any moment, by hours and both ways.

Responsible for what needs both: when something ends that was stamped with the time of day, how old it is, and whether the
clock was set while this process ran. When something was is told by the time of day as it is; how long something takes is
``time.monotonic``'s, and needs nothing of this.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

SET_MIN_S = 2.0
"""The least step between two checks that counts. A clock kept well is slewed by less than a millisecond a second."""

logger = logging.getLogger(__name__)

Clock = Callable[[], float]


def uptime() -> float:
    """Seconds since the machine was started, those in which it slept included: what nobody can set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class TimeOfDay:
    """The time of day by which things expire. It goes at least as fast as time passes, also where the clock is set back.

    A clock that is set forward takes it along, and back again: what had not expired by right is valid then.
    """

    def __init__(self, wall: Clock = time.time, passed: Clock = uptime) -> None:
        self._wall, self._passed = wall, passed
        self._began = wall() - passed()

    def __call__(self) -> float:
        return max(self._wall(), self._began + self._passed())


class Ages:
    """The ages of things that were stamped with the time of day. A clock that is set meanwhile makes none older or younger.

    What was stamped before it was seen here for the first time is by then as old as the clock says, and never unborn.
    """

    def __init__(self, wall: Clock = time.time, passed: Clock = uptime) -> None:
        self._wall, self._passed = wall, passed
        self._born: dict[str, float] = {}

    def of(self, name: str, stamped_at: float) -> float:
        """In seconds."""
        now = self._passed()
        return now - self._born.setdefault(name, now - max(0.0, self._wall() - stamped_at))

    def forget(self, name: str) -> None:
        self._born.pop(name, None)

    def forget_all_but(self, names: Iterable[str]) -> None:
        keep = set(names)
        self._born = {name: born for name, born in self._born.items() if name in keep}


class ClockWatch:
    """Detects that the clock was set since this process began, and logs it. Thread-safe."""

    def __init__(self, wall: Clock = time.time, passed: Clock = uptime) -> None:
        self._wall, self._passed = wall, passed
        self._lock = threading.Lock()
        self._began = self._last = wall() - passed()

    def check(self) -> float:
        """The sum of all settings in seconds; positive if it was set forward."""
        with self._lock:
            before, self._last = self._last, self._wall() - self._passed()
            step_s = self._last - before
            if abs(step_s) > SET_MIN_S:
                logger.warning(
                    "the clock of this machine was set %s by %.0f s. Jobs go on by the time that passes; tokens expire no "
                    "later for it; times of day told from now on are the new clock's",
                    "forward" if step_s > 0 else "back",
                    abs(step_s),
                )
            return self._last - self._began
