"""The posting of events from other threads to the one that decides.

They come undated. Whoever queues them stamps them under one lock, so that instants are in the order of the queue.
"""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.core.events import Event
from orchestrator.core.vocabulary import Instant

Undated = Callable[[Instant], Event]
"""An event but for its instant: called with that, it is whole."""

Post = Callable[[Undated], int]
"""Stamp the event and queue it. Returns the number that its record will have."""
