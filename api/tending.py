"""What the service does without being asked: a thread that tends to its jobs, round after round.

Responsible for the rhythm, and for one round's failure not being the last: it is logged, and the next round tries again.
Refuses to know what is to be done. It holds nothing that a SIGKILL could lose.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Event, Thread

logger = logging.getLogger(__name__)

EVERY_S = 1.0
STOP_TIMEOUT_S = 2.0
"""A round may wait for a cluster that does not answer; the service's end does not wait for that."""


class Tending:
    def __init__(self, round_of_work: Callable[[], None]) -> None:
        self._round = round_of_work
        self._stopped = Event()
        self._thread = Thread(target=self._run, name="tending", daemon=True)

    def start(self) -> None:
        """From now on there is a round every ``EVERY_S``, the first one at once."""
        self._thread.start()

    def stop(self) -> None:
        """No round begins any more, and the one under way is over, or is left behind."""
        self._stopped.set()
        self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._round()
            except Exception:  # the next one may find things mended, and nobody is here to be told
                if not self._stopped.is_set():
                    logger.exception("a round of tending to jobs failed")
            self._stopped.wait(EVERY_S)
