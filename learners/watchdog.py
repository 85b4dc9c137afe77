"""The island's watchdog: it ends an island that no synchroniser has polled for too long.

A cut that lasts, or the end of the cluster, can leave an island behind that nobody knows of any more, and its accelerators
would train for nobody. The timeout is longer than the longest cut that a job is to survive. Time in which the process was
stopped does not count: no poll could have arrived in it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

TICK_S = 1.0


class Watchdog:
    """Runs from its construction on; ``expired`` is called once, in the watchdog's own thread."""

    def __init__(self, timeout_s: float, expired: Callable[[], None], tick_s: float = TICK_S) -> None:
        self._timeout_s, self._expired, self._tick_s = timeout_s, expired, tick_s
        self._silent_s = 0.0
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def reset(self) -> None:
        """A synchroniser has just polled."""
        self._silent_s = 0.0

    def stop(self) -> None:
        """No synchroniser polls this process, which ends with another."""
        self._timeout_s = math.inf

    def _run(self) -> None:
        while self._silent_s < self._timeout_s:
            time.sleep(self._tick_s)
            self._silent_s += self._tick_s
        self._expired()
