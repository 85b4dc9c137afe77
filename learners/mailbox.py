"""Where published fragments wait for the island's next step boundary. The newest version of each fragment wins.

An island that was busy or cut off for long so never works through a backlog: at most one value a fragment is kept.
Thread-safe; blocks only who asks to wait.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from learners.contract import Arrays
from orchestrator.core.vocabulary import NO_FIX, Fix, FragmentId, Version


@dataclass(frozen=True, slots=True)
class Mail:
    """A fragment's value at ``version``; who adopts it raises the logical step to ``step``.

    ``merged_offer`` is the island's latest offer of the fragment whose work is in it, 0 for none; ``fix`` where the job was
    when it was published.
    """

    fragment: FragmentId
    version: Version
    step: int
    arrays: Arrays
    merged_offer: int = 0
    fix: Fix = NO_FIX


class Mailbox:
    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._newest: dict[FragmentId, Mail] = {}

    def put(self, mail: Mail) -> None:
        """Keep ``mail`` unless the same or a newer version of its fragment is here already."""
        with self._lock:
            kept = self._newest.get(mail.fragment)
            if kept is None or kept.version < mail.version:
                self._newest[mail.fragment] = mail
                self._lock.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Until something waits here, or that long. For an island that has no step to take."""
        with self._lock:
            self._lock.wait_for(lambda: bool(self._newest), timeout_s)

    def take_all(self) -> list[Mail]:
        """Everything that waits, by fragment; the mailbox is empty after."""
        with self._lock:
            newest, self._newest = self._newest, {}
        return [newest[fragment] for fragment in sorted(newest)]
