"""An island's side of the exchange of letters with its synchronisers, one after another, each with its epoch.

Letters are numbered, and kept until whoever reads them acknowledges that they are on the tape: an answer lost on the way,
or a reader that dies, loses nothing. A new epoch means that everything the last synchroniser only held in memory is gone,
so offers that no adopted version contains are put into the outbox again, under the numbers they had. A synchroniser of
an older epoch is told that it is fenced: it was replaced, and must neither read letters nor command.

Thread-safe. Refuses to know: calls, and what letters say (but for offers).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from learners.outbox import Outbox
from orchestrator.core.messages import Flushed, Letter, Offer
from orchestrator.core.vocabulary import Epoch
from orchestrator.errors import Fenced

Numbered = list[tuple[int, Letter]]


class Correspondence:
    """``standing`` tells the offers that still stand: made, and not merged as far as this island knows."""

    def __init__(self, outbox: Outbox, standing: Callable[[], Iterable[Offer]]) -> None:
        self._outbox, self._standing = outbox, standing
        self._lock = threading.Lock()
        self._reading = threading.Lock()  # one long poll at a time; a second waits for the first
        self._epoch = Epoch(0)
        self._unread: Numbered = []
        self._written = 0

    def heed(self, epoch: Epoch) -> None:
        """Take note of who speaks. Raises Fenced when a newer one has spoken."""
        with self._lock:
            if epoch < self._epoch:
                raise Fenced(
                    detail=f"A synchroniser of epoch {epoch} speaks, but one of epoch {self._epoch} took its place."
                )
            first, newer = not self._epoch, epoch > self._epoch
            self._epoch = epoch
            if first or not newer:
                return
            unread = {letter.offer for _, letter in self._unread if isinstance(letter, Offer)}
            # who asks for a flush anew hears of its end anew; the end heard first must be behind these offers
            self._unread = [(number, letter) for number, letter in self._unread if not isinstance(letter, Flushed)]
            for offer in sorted(self._standing(), key=lambda offer: offer.offer):
                if offer.offer not in unread:
                    self._outbox.put_again(offer)

    def forget(self) -> None:
        """Whoever reads next is told nothing of what was written until now."""
        with self._lock:
            self._outbox.take(0.0)
            self._unread = []

    def letters(self, epoch: Epoch, read: int, acknowledged: int, timeout_s: float) -> Numbered:
        """Letters after number ``read``, oldest first; waits for one. Those up to ``acknowledged`` are forgotten."""
        self.heed(epoch)
        with self._reading:
            with self._lock:
                self._unread = [(number, letter) for number, letter in self._unread if number > acknowledged]
                waiting = any(number > read for number, _ in self._unread)
            taken = self._outbox.take(0.0 if waiting else timeout_s)
            with self._lock:
                for letter in taken:
                    self._written += 1
                    self._unread.append((self._written, letter))
                return [(number, letter) for number, letter in self._unread if number > read]
