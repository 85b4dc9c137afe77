"""The island's reliable outbox for several threads: the loop puts reports in, and Ray's threads read and command.

Thread-safe. What is reported again, and who is fenced, is ``orchestrator.replica.outbox``'s business.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from orchestrator.core.messages import IslandReport
from orchestrator.core.vocabulary import Epoch
from orchestrator.replica.outbox import Numbered, ReliableOutbox


class Outbox:
    """``standing`` returns what a new synchroniser may not know: offers not merged as far as this island knows; until it
    holds a state, that it is ready for one. It is called under the outbox's lock, so whoever it asks must hold no lock of
    its own while it puts reports in."""

    def __init__(self, standing: Callable[[], Iterable[IslandReport]] = lambda: ()) -> None:
        self._standing = standing
        self._changed = threading.Condition()
        self._reading = threading.Lock()  # one long poll at a time; a second waits for the first
        self._outbox = ReliableOutbox()

    def put(self, report: IslandReport) -> None:
        with self._changed:
            self._outbox.put(report)
            self._changed.notify_all()

    def take(self, timeout_s: float) -> list[IslandReport]:
        """All reports that nobody read, oldest first; waits for one up to ``timeout_s``. Each is given out once."""
        taken: list[IslandReport] = []

        def took() -> bool:
            taken.extend(self._outbox.take())
            return bool(taken)

        with self._changed:
            self._changed.wait_for(took, timeout_s)
        return taken

    def heed(self, epoch: Epoch) -> None:
        """Note the epoch that commands. Raises Fenced when a newer one has commanded."""
        with self._changed:
            if self._outbox.heed(epoch):
                self._outbox.restate(self._standing())
                self._changed.notify_all()

    def read(self, epoch: Epoch, after: int, acknowledged: int, timeout_s: float) -> Numbered:
        """The reports behind number ``after``, oldest first; waits for one. Those up to ``acknowledged`` are forgotten."""
        self.heed(epoch)
        with self._reading, self._changed:
            self._outbox.acknowledge(acknowledged)
            self._changed.wait_for(lambda: self._outbox.has_after(after), timeout_s)
            return self._outbox.read(after)

    def forget(self) -> None:
        """Forget what was put in until now: the next reader is another incarnation's."""
        with self._changed:
            self._outbox.forget_all()
