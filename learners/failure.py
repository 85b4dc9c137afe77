"""What an island's own failure is the end of, by its kind. Decides nothing else, and what follows is the core's."""

from __future__ import annotations

from orchestrator.core.messages import Broken
from orchestrator.core.vocabulary import FailureExtent
from orchestrator.errors import ConfigurationError, UnreadableData, in_words


def broken_by(error: BaseException, step: int | None = None) -> Broken:
    """Return what the island reports; ``step`` is the inner step that failed.

    A wrong specification is wrong at every start, so no further one is worth its while.
    """
    if not isinstance(error, ConfigurationError):
        return Broken(in_words(error) if step is None else f"{in_words(error)} (at step {step:,})")
    extent = FailureExtent.JOB if isinstance(error, UnreadableData) else FailureExtent.ISLAND
    return Broken(in_words(error), extent)
