"""Processes that are over, and whose node was out of reach when that was decided: they run on behind a cut line.

Each is ended once its node can be reached again, after a moment in which its link may hear its last words, so that what it
trained there is counted. Refuses to end anything itself, and to read a clock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from orchestrator.core.vocabulary import Life

LAST_WORDS_S = 10.0
"""A link asks again every second or so once the line is whole, and the word of it reaches the controller at once."""


@dataclass(slots=True)
class _Stray:
    node_id: str
    reachable_since: float | None = None


class Strays:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._strays: dict[Life, _Stray] = {}

    def add(self, life: Life, node_id: str) -> bool:
        """False if it is one already."""
        with self._lock:
            if life in self._strays:
                return False
            self._strays[life] = _Stray(node_id)
            return True

    def discard(self, lives: Iterable[Life]) -> None:
        with self._lock:
            for life in lives:
                self._strays.pop(life, None)

    def due(self, out_of_reach: Callable[[str], bool], now: float) -> list[Life]:
        """Those to be ended now."""
        with self._lock:
            for stray in self._strays.values():
                if out_of_reach(stray.node_id):
                    stray.reachable_since = None
                elif stray.reachable_since is None:
                    stray.reachable_since = now
            return sorted(
                life
                for life, stray in self._strays.items()
                if stray.reachable_since is not None and now - stray.reachable_since >= LAST_WORDS_S
            )
