"""Two watches over an island: one over the length of its steps, and one over the synchroniser's polls.

``StepWatch`` reports a step that does not end, from its own thread. A trainer that sleeps for ever, or waits for a lock that
is never released, still answers every call of the synchroniser, and reports nothing. The watch ticks each second and adds up
the time of the current work. Only time in which the watch itself ran counts: a late tick adds ``TICK_MAX_S``, whether the
process was stopped, the machine slept, or no processor was free. So a machine that stands still causes no report. It reports
after a quarter of the limit (``core.vocabulary.StepLimits``), after half of it, at the limit, and then again and again. What
follows is decided in ``core.island_life``.

``Watchdog`` ends an island that no synchroniser has polled for too long. After a long partition, or the end of the cluster,
an island may be forgotten, and its accelerators would train in vain. The timeout is longer than the longest partition that a
job must survive. Time in which the process was stopped does not count, because no poll could have arrived.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from time import monotonic

from orchestrator.core.messages import Overdue
from orchestrator.core.vocabulary import Duration, StepLimits

TICK_S = 1.0
TICK_MAX_S = 2.0
NAMED_RATIO = 0.25
"""A step is first reported after this fraction of its limit."""
STEPS_BEFORE_USUAL = 5
"""A process's first steps compile. Until it has taken this many, there is no median."""
STEPS_KEPT = 64


class Watchdog:
    """Runs from its construction on. Calls ``expired`` once, from its own thread."""

    def __init__(self, timeout_s: float, expired: Callable[[], None], tick_s: float = TICK_S) -> None:
        self._timeout_s, self._expired, self._tick_s = timeout_s, expired, tick_s
        self._silent_s = 0.0
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def reset(self) -> None:
        """Start the timeout again: a synchroniser has polled."""
        self._silent_s = 0.0

    def stop(self) -> None:
        """Stop watching: no synchroniser polls this process, which ends with another one."""
        self._timeout_s = math.inf

    def _run(self) -> None:
        while self._silent_s < self._timeout_s:
            time.sleep(self._tick_s)
            self._silent_s += self._tick_s
        self._expired()


class StepWatch:
    """Watches the loop's work. Calls ``report`` from its own thread; its methods are called from the loop's."""

    def __init__(self, limits: StepLimits, report: Callable[[Overdue], None]) -> None:
        self._limits, self._report = limits, report
        self._seconds: deque[Duration] = deque(maxlen=STEPS_KEPT)
        self._work = 0
        """Incremented at the beginning and the end of each piece of work: odd while one is in progress."""
        self._usual: Duration = 0.0
        self._seen, self._awake, self._next = 0, 0.0, 0.0
        self._ticked_at = 0.0
        self._over = threading.Event()

    def begin(self) -> None:
        if self._limits.limit_s is None:
            return
        self._ticked_at = monotonic()
        threading.Thread(target=self._run, name="step-watch", daemon=True).start()

    def end(self) -> None:
        self._over.set()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Watch an inner step, which has a usual length."""
        self._usual = median(self._seconds) if len(self._seconds) >= STEPS_BEFORE_USUAL else 0.0
        began = monotonic()
        self._work += 1
        try:
            yield
        finally:
            self._work += 1
            self._seconds.append(monotonic() - began)

    @contextmanager
    def other_work(self) -> Iterator[None]:
        """Watch work without a usual length: a boundary, an evaluation."""
        self._usual = 0.0
        self._work += 1
        try:
            yield
        finally:
            self._work += 1

    def tick(self, now: float) -> Overdue | None:
        """Return what to report now, if anything. Called every second."""
        passed, self._ticked_at = min(now - self._ticked_at, TICK_MAX_S), now
        work, usual = self._work, self._usual
        limit_s = self._limits.limit(usual)
        if work % 2 == 0 or work != self._seen or limit_s is None:
            self._seen, self._awake, self._next = work, 0.0, NAMED_RATIO * (limit_s or 0.0)
            return None
        self._awake += passed
        if self._awake < self._next:
            return None
        self._next += min(self._next, limit_s)
        return Overdue(self._awake, usual)

    def _run(self) -> None:
        while not self._over.wait(TICK_S):
            if (overdue := self.tick(monotonic())) is not None and self._work == self._seen:
                self._report(overdue)
