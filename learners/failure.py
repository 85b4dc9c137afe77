"""What an island's own failure is the end of, by its kind. Decides nothing else, and what follows is the core's."""

from __future__ import annotations

from learners.catching_up import in_words
from orchestrator.core.messages import Broken
from orchestrator.core.vocabulary import FailureExtent
from orchestrator.errors import ConfigurationError, UnreadableData


def broken_by(error: Exception) -> Broken:
    """What the island reports. A wrong specification is wrong at every start, so no further one is worth its while."""
    if not isinstance(error, ConfigurationError):
        return Broken(in_words(error))
    extent = FailureExtent.JOB if isinstance(error, UnreadableData) else FailureExtent.ISLAND
    return Broken(str(error), extent)
