"""The threads in which a shard carries out its orders: those for different fragments at once, those for one in order.

Some orders concern all of Θ: a cut, a rollback, the beginning. They come behind everything that was ordered before, and
ahead of everything that is ordered after. A merge's arithmetic uses all cores by itself; what these threads overlap is one
merge's journal entry with the next one's arithmetic.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from orchestrator.core.vocabulary import FragmentId

THREADS_MAX = 4

Result = TypeVar("Result")


class MergePool:
    """An order waits for earlier ones only, and these were started before it: nothing can wait for ever."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(min(THREADS_MAX, max(2, os.cpu_count() or 1)), "merge")
        self._lock = threading.Lock()
        self._alone: Future[Any] | None = None
        self._latest: dict[FragmentId, Future[Any]] = {}
        """By fragment, since the last order that concerned all."""

    def submit(self, fragment: FragmentId, work: Callable[[], Result]) -> Future[Result]:
        """Do the work once what was ordered before for this fragment, or for all, is over."""
        with self._lock:
            before = [one for one in (self._latest.get(fragment), self._alone) if one is not None]
            future = self._threads.submit(_after, before, work)
            self._latest[fragment] = future
            return future

    def submit_alone(self, work: Callable[[], Result]) -> Future[Result]:
        """Do the work once everything that was ordered before is over, and nothing beside it."""
        with self._lock:
            before = [*self._latest.values(), *(() if self._alone is None else (self._alone,))]
            self._alone = future = self._threads.submit(_after, before, work)
            self._latest = {}
            return future

    def close(self) -> None:
        """What has not begun is given up."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _after(earlier: Iterable[Future[Any]], work: Callable[[], Result]) -> Result:
    wait(earlier)
    return work()
