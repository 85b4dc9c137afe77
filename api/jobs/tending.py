"""What the service does without being asked: a thread that does a piece of work round after round.

Responsible for the rhythm, and for one round's failure not being the last: it is logged, and the next round tries again.
Refuses to know what is to be done. It holds nothing that a SIGKILL could lose.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Event, Thread

from orchestrator.errors import InfrastructureError

logger = logging.getLogger(__name__)

EVERY_S = 1.0
STOP_TIMEOUT_S = 2.0
"""A round may wait for a cluster that does not answer; the service's end does not wait for that."""


class Tending:
    def __init__(self, round_of_work: Callable[[], None], name: str = "tending", every_s: float | None = None) -> None:
        self._round, self._name = round_of_work, name
        self._every_s = EVERY_S if every_s is None else every_s
        self._stopped, self._woken = Event(), Event()
        self._trouble = ""
        self._thread = Thread(target=self._run, name=name, daemon=True)

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
            try:
                self._round()
                self._note("")
            except InfrastructureError as error:
                self._note(str(error))
            except Exception:  # the next one may find things mended, and nobody is here to be told
                if not self._stopped.is_set():
                    logger.exception("a round of the thread %s failed", self._name)
            self._woken.wait(self._every_s)
            self._woken.clear()

    def _note(self, trouble: str) -> None:
        """What a round could not have is logged when it changes, not once a second."""
        if trouble != self._trouble and not self._stopped.is_set():
            logger.warning("the thread %s %s", self._name, f"waits: {trouble}" if trouble else "goes on")
        self._trouble = trouble
