"""An island's side of the exchange of letters with its synchronisers: ``core.letters`` for several threads.

A new epoch means that everything the last synchroniser only held in memory is gone, so offers that no adopted version
contains are put into the outbox again, under the numbers they had.

Thread-safe. Refuses to know: calls, and what letters say.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from learners.outbox import Outbox
from orchestrator.core.letters import Letters, Numbered
from orchestrator.core.messages import Letter, Offer
from orchestrator.core.vocabulary import Epoch


class Correspondence:
    """``standing`` tells what a new synchroniser may not know: offers not merged as far as this island knows; until it
    holds a state, that it is ready for one."""

    def __init__(self, outbox: Outbox, standing: Callable[[], Iterable[Letter]]) -> None:
        self._outbox, self._standing = outbox, standing
        self._lock = threading.Lock()
        self._reading = threading.Lock()  # one long poll at a time; a second waits for the first
        self._letters = Letters()

    def heed(self, epoch: Epoch) -> None:
        """Take note of who speaks. Raises Fenced when a newer one has spoken."""
        with self._lock:
            if self._letters.heed(epoch):
                for letter in self._letters.missing(self._standing()):
                    if isinstance(letter, Offer):
                        self._outbox.put_again(letter)
                    else:
                        self._outbox.put(letter)

    def forget(self) -> None:
        """Whoever reads next is told nothing of what was written until now."""
        with self._lock:
            self._outbox.take(0.0)
            self._letters.forget_all()

    def letters(self, epoch: Epoch, read: int, acknowledged: int, timeout_s: float) -> Numbered:
        """Letters after number ``read``, oldest first; waits for one. Those up to ``acknowledged`` are forgotten."""
        self.heed(epoch)
        with self._reading:
            with self._lock:
                self._letters.forget(acknowledged)
                waiting = bool(self._letters.after(read))
            taken = self._outbox.take(0.0 if waiting else timeout_s)
            with self._lock:
                self._letters.write(taken)
                return self._letters.after(read)
