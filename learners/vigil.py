"""An island that nobody listens to any more ends itself: behind a line that stays cut, or after its cluster's end.

Whoever could end it may be gone, or have forgotten it, and its accelerators would train for nobody. It waits for longer than
a cut that is to be borne. Time in which the process was stopped does not count: nobody could have been heard in it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

TICK_S = 1.0


class Vigil:
    """From its making on. ``abandoned`` is called once, in a thread of the vigil's own."""

    def __init__(self, patience_s: float, abandoned: Callable[[], None], tick_s: float = TICK_S) -> None:
        self._patience_s, self._abandoned, self._tick_s = patience_s, abandoned, tick_s
        self._silent_s = 0.0
        threading.Thread(target=self._run, name="vigil", daemon=True).start()

    def heard(self) -> None:
        """Somebody who may command is there."""
        self._silent_s = 0.0

    def _run(self) -> None:
        while self._silent_s < self._patience_s:
            time.sleep(self._tick_s)
            self._silent_s += self._tick_s
        self._abandoned()
