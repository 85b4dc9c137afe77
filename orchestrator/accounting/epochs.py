"""Recognise new synchroniser epochs: a repeated ``SynchroniserRestarted`` is ignored."""

from __future__ import annotations

from orchestrator.core.events import Event, SynchroniserRestarted
from orchestrator.core.vocabulary import Epoch


class Epochs:
    """The epochs that a fold has seen."""

    _latest: Epoch

    def __init__(self) -> None:
        self._latest = Epoch(1)

    def begins(self, event: Event) -> bool:
        """Whether a new epoch begins with this event. To be called once for each event, in order."""
        if not isinstance(event, SynchroniserRestarted) or event.epoch <= self._latest:
            return False
        self._latest = event.epoch
        return True
