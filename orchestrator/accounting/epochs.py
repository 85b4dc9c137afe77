"""Whether a restart that the tape tells of is one: told twice, as any event may be, it changes nothing."""

from __future__ import annotations

from orchestrator.core.events import Event, SynchroniserRestarted
from orchestrator.core.vocabulary import Epoch


class Epochs:
    """Of a fold that begins something anew whenever the synchroniser does."""

    _latest: Epoch

    def __init__(self) -> None:
        self._latest = Epoch(1)

    def begins(self, event: Event) -> bool:
        """Whether a new life of the synchroniser begins with this event; asked once for each event, in their order."""
        if not isinstance(event, SynchroniserRestarted) or event.epoch <= self._latest:
            return False
        self._latest = event.epoch
        return True
