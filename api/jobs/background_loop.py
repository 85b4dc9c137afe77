"""A background thread of the service, which does a piece of work round after round.

A failed round does not end the loop, and a failure of one job does not affect others. ``ProblemLog`` logs a failure when its
reason changes, not each time it occurs: what is broken may stay broken for days. The loop holds nothing that a SIGKILL could
lose.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from threading import Event, Thread

from orchestrator.errors import InfrastructureError, first_line

logger = logging.getLogger(__name__)

EVERY_S = 1.0
STOP_TIMEOUT_S = 2.0
"""A round may wait for a cluster that does not answer; stopping the service does not wait for it."""


class ProblemLog:
    """Problems of many jobs, each logged once for each reason. For one thread, or under its caller's lock."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._reasons: dict[str, str] = {}

    def note(self, whom: str, reason: str, error: BaseException | None = None) -> bool:
        """Log the reason and the traceback of ``error``, unless it is the last one for ``whom``. Return if it is new."""
        if reason == self._reasons.get(whom):
            return False
        self._reasons[whom] = reason
        story = None if isinstance(error, InfrastructureError) else error  # its message is enough
        self._log.warning("%s: %s", whom, reason, exc_info=story)
        return True

    def settle(self, whom: str) -> bool:
        """Forget the problem of ``whom``. Return whether there was one."""
        return self._reasons.pop(whom, None) is not None

    def keep(self, them: Iterable[str]) -> None:
        """Forget the problems of all others."""
        there = set(them)
        self._reasons = {whom: reason for whom, reason in self._reasons.items() if whom in there}


def reason_of(error: BaseException) -> str:
    """Return an unforeseen failure in one line."""
    return f"{type(error).__name__}: {first_line(error)[:300]}"


class BackgroundLoop:
    def __init__(self, round_of_work: Callable[[], None], name: str = "tending", every_s: float | None = None) -> None:
        self._round, self._name = round_of_work, name
        self._every_s = EVERY_S if every_s is None else every_s
        self._stopped, self._woken = Event(), Event()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._problem_log = ProblemLog(logger)

    def start(self) -> None:
        """Start the rounds: one every ``every_s``, the first one at once."""
        self._thread.start()

    def wake(self) -> None:
        """Start the next round now, or right after the current one."""
        self._woken.set()

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Start no more rounds, and wait for the current one at most ``timeout_s``. Does nothing before ``start``."""
        self._stopped.set()
        self.wake()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stopped.is_set():
            who = f"a round of the thread {self._name}"
            try:
                self._round()
            except InfrastructureError as error:  # it waits for something that does not answer: no traceback needed
                if not self._stopped.is_set():
                    self._problem_log.note(who, f"waiting: {error}")
            except Exception as error:  # the next round may succeed, and there is no caller to report to
                if not self._stopped.is_set():
                    self._problem_log.note(who, f"failed, and will be repeated: {reason_of(error)}", error)
            else:
                if self._problem_log.settle(who):
                    logger.info("%s: works again", who)
            self._woken.wait(self._every_s)
            self._woken.clear()
