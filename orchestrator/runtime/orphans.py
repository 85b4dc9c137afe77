"""The orphans of a job: processes that were to end while their node was unreachable, and run on behind the partition.

Each is ended once its node can be reached again, after a moment in which its link may read its final reports, so that what
it trained there is counted. Refuses to end anything itself, and to read a clock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from orchestrator.core.vocabulary import Life

FINAL_REPORT_S = 10.0
"""Once the partition is over a link polls again within a second or so, while the controller notices at once."""


@dataclass(slots=True)
class _Orphan:
    node_id: str
    reachable_since: float | None = None


class Orphans:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._orphans: dict[Life, _Orphan] = {}

    def add(self, life: Life, node_id: str) -> bool:
        """False if it is one already."""
        with self._lock:
            if life in self._orphans:
                return False
            self._orphans[life] = _Orphan(node_id)
            return True

    def discard(self, lives: Iterable[Life]) -> None:
        with self._lock:
            for life in lives:
                self._orphans.pop(life, None)

    def due(self, is_unreachable: Callable[[str], bool], now: float) -> list[Life]:
        """Those to be ended now."""
        with self._lock:
            for orphan in self._orphans.values():
                if is_unreachable(orphan.node_id):
                    orphan.reachable_since = None
                elif orphan.reachable_since is None:
                    orphan.reachable_since = now
            return sorted(
                life
                for life, orphan in self._orphans.items()
                if orphan.reachable_since is not None and now - orphan.reachable_since >= FINAL_REPORT_S
            )
