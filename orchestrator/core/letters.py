"""An island's letters to its synchronisers, one after another, each with its epoch.

Letters are numbered, and kept until whoever reads them acknowledges that they are on the tape: an answer lost on the way,
or a reader that dies, loses nothing. A new epoch means that everything the last synchroniser only held in memory is gone.
One of an older epoch is fenced: it was replaced, and must neither read letters nor command.

Refuses to know: threads, calls, and how what still stands is told again (``learners.correspondence``).
"""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator.core.messages import Flushed, Letter, Offer
from orchestrator.core.vocabulary import Epoch
from orchestrator.errors import Fenced

Numbered = list[tuple[int, Letter]]


class Letters:
    """``epoch`` is that of the newest synchroniser that spoke; 0 before any did."""

    def __init__(self) -> None:
        self.epoch = Epoch(0)
        self._kept: Numbered = []
        self._written = 0

    def heed(self, epoch: Epoch) -> bool:
        """Take note of who speaks: whether it took another's place. Raises Fenced when a newer one has spoken.

        A flush that was heard is forgotten then: who asks for it anew hears of its end anew, behind what is offered again.
        """
        if epoch < self.epoch:
            raise Fenced(
                detail=f"A synchroniser of epoch {epoch} speaks, but one of epoch {self.epoch} took its place."
            )
        replaced = 0 < self.epoch < epoch
        self.epoch = epoch
        if replaced:
            self._kept = [(number, letter) for number, letter in self._kept if not isinstance(letter, Flushed)]
        return replaced

    def write(self, letters: Iterable[Letter]) -> None:
        for letter in letters:
            self._written += 1
            self._kept.append((self._written, letter))

    def forget(self, acknowledged: int) -> None:
        """Those up to this number are on the tape."""
        self._kept = [(number, letter) for number, letter in self._kept if number > acknowledged]

    def forget_all(self) -> None:
        """Whoever reads next is somebody else's reader. Numbers go on."""
        self._kept = []

    def after(self, read: int) -> Numbered:
        """Those behind this number, oldest first."""
        return [(number, letter) for number, letter in self._kept if number > read]

    def missing(self, standing: Iterable[Letter]) -> list[Letter]:
        """Of what still stands that which is in no letter kept; offers oldest first."""
        kept = [letter for _, letter in self._kept]
        ordered = sorted(standing, key=lambda told: (told.offer, told.fragment) if isinstance(told, Offer) else (0, 0))
        return [letter for letter in ordered if letter not in kept]
