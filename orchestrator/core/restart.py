"""The one event that tells of the synchroniser itself: its process died, and the next one goes on from tape and journal."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.core.vocabulary import Epoch, Instant


@dataclass(frozen=True, slots=True)
class SynchroniserRestarted:
    """Everything before this on the tape was remembered again by its replay, and Θ read from the journal.

    Merges that the journal holds were completed on the tape before this. All that only the process knew is gone: payloads
    held, merges not journalled, calls under way. Letters and payloads are told to ``epoch`` from now on. ``damage`` says
    what could not be read at the ends of tape and journal, and was cut off.
    """

    at: Instant
    epoch: Epoch
    damage: str = ""
