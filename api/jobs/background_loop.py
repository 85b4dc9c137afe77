"""A background thread of the service, which does a piece of work round after round.

Responsible for the rhythm, for one round's failure not being the last, and for what one job makes fail being no matter of
the others (``ProblemLog``). A failure is logged when it is another one than before, not each time that it is met: what is
broken stays broken for days. Refuses to know what is to be done. It holds nothing that a SIGKILL could lose.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from threading import Event, Thread

from orchestrator.errors import InfrastructureError, first_line

logger = logging.getLogger(__name__)

EVERY_S = 1.0
STOP_TIMEOUT_S = 2.0
"""A round may wait for a cluster that does not answer; the service's end does not wait for that."""


class ProblemLog:
    """Problems of many jobs, each logged once for each reason. For one thread, or under its caller's lock."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._reasons: dict[str, str] = {}

    def note(self, whom: str, reason: str, error: BaseException | None = None) -> bool:
        """Log the reason unless it was the last one for ``whom``, with the traceback of ``error``. Whether it is new."""
        if reason == self._reasons.get(whom):
            return False
        self._reasons[whom] = reason
        story = None if isinstance(error, InfrastructureError) else error  # that one has said all that is to be said
        self._log.warning("%s: %s", whom, reason, exc_info=story)
        return True

    def settle(self, whom: str) -> bool:
        """``whom`` has no problem any more. Returns whether it had one."""
        return self._reasons.pop(whom, None) is not None

    def keep(self, them: Iterable[str]) -> None:
        """Forget the problems of all others."""
        there = set(them)
        self._reasons = {whom: reason for whom, reason in self._reasons.items() if whom in there}


def reason_of(error: BaseException) -> str:
    """An unforeseen failure in one line."""
    return f"{type(error).__name__}: {first_line(error)[:300]}"


class BackgroundLoop:
    def __init__(self, round_of_work: Callable[[], None], name: str = "tending", every_s: float | None = None) -> None:
        self._round, self._name = round_of_work, name
        self._every_s = EVERY_S if every_s is None else every_s
        self._stopped, self._woken = Event(), Event()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._problem_log = ProblemLog(logger)

    def start(self) -> None:
        """From now on there is a round every ``every_s``, the first one at once."""
        self._thread.start()

    def wake(self) -> None:
        """The next round is now, or follows the one under way at once."""
        self._woken.set()

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """No round begins any more, and the one under way is over, or is left behind. Nothing happens before a start."""
        self._stopped.set()
        self.wake()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stopped.is_set():
            who = f"a round of the thread {self._name}"
            try:
                self._round()
            except InfrastructureError as error:  # it waits for what is away: no story of ours is needed
                if not self._stopped.is_set():
                    self._problem_log.note(who, f"it waits: {error}")
            except Exception as error:  # the next one may find things mended, and nobody is here to be told
                if not self._stopped.is_set():
                    self._problem_log.note(who, f"it failed, and is tried again: {reason_of(error)}", error)
            else:
                if self._problem_log.settle(who):
                    logger.info("%s: it works again", who)
            self._woken.wait(self._every_s)
            self._woken.clear()
