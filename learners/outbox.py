"""The letters an island has written and nobody has read yet, in the order things happened.

The service may be away for long, and the island never waits for it, so the outbox must stay small by itself: progress is
cumulative, so of two neighbouring reports the later one is enough; and an offer takes the place of an older offer of
the same fragment, whose snapshot is gone. What is left grows only with what the service itself sends.

Thread-safe: the loop writes, a Ray thread reads.
"""

from __future__ import annotations

import threading
from dataclasses import replace

from orchestrator.core.messages import Flushed, Letter, Offer, Progress


class Outbox:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._letters: list[Letter] = []

    def put(self, letter: Letter) -> None:
        with self._changed:
            if isinstance(letter, Offer):
                self._letters = _without_offer_of(letter.fragment, self._letters)
            last = self._letters[-1] if self._letters else None
            if isinstance(letter, Progress) and isinstance(last, Progress):
                self._letters[-1] = _joined(last, letter)
            else:
                self._letters.append(letter)
            self._changed.notify_all()

    def put_again(self, offer: Offer) -> None:
        """For a reader who may not know the offer; one of its fragment that waits already is newer, or the same.

        ``Flushed`` stays behind it, for that says that all work was offered.
        """
        with self._changed:
            if any(isinstance(old, Offer) and old.fragment == offer.fragment for old in self._letters):
                return
            last = next((n for n, old in enumerate(self._letters) if isinstance(old, Flushed)), len(self._letters))
            self._letters.insert(last, offer)
            self._changed.notify_all()

    def take(self, timeout_s: float) -> list[Letter]:
        """All letters, oldest first; waits for one up to ``timeout_s``. Each letter is given out once."""
        with self._changed:
            self._changed.wait_for(lambda: self._letters, timeout_s)
            letters, self._letters = self._letters, []
        return letters


def _without_offer_of(fragment: int, letters: list[Letter]) -> list[Letter]:
    kept: list[Letter] = []
    for letter in letters:
        if isinstance(letter, Offer) and letter.fragment == fragment:
            continue
        if isinstance(letter, Progress) and kept and isinstance(kept[-1], Progress):
            kept[-1] = _joined(kept[-1], letter)
        else:
            kept.append(letter)
    return kept


def _joined(earlier: Progress, later: Progress) -> Progress:
    return replace(later, gap_max_seconds=max(earlier.gap_max_seconds, later.gap_max_seconds))
