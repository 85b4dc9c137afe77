"""Deadlines in one thread: the newest deadline of each name is kept, and called about once when it is past."""

from __future__ import annotations

import threading
from collections.abc import Callable

from orchestrator.core.vocabulary import Instant


class Timers:
    """``fire(timer, serial)`` is called from the timers' own thread; ``clock`` is the job's."""

    def __init__(self, clock: Callable[[], Instant], fire: Callable[[str, int], object]) -> None:
        self._clock, self._fire = clock, fire
        self._changed = threading.Condition()
        self._deadlines: dict[str, tuple[Instant, int]] = {}
        self._closed = False
        threading.Thread(target=self._run, name="timers", daemon=True).start()

    def set(self, timer: str, serial: int, due_at: Instant) -> None:
        with self._changed:
            self._deadlines[timer] = (due_at, serial)
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                now = self._clock()
                due = {name: serial for name, (at, serial) in self._deadlines.items() if at <= now}
                for name in due:
                    del self._deadlines[name]
                if not due:
                    next_at = min((at for at, _ in self._deadlines.values()), default=None)
                    self._changed.wait(None if next_at is None else next_at - now)
            for name, serial in sorted(due.items()):
                self._fire(name, serial)
