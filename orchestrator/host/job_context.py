"""What the parts of a job's process share: its context, the queue of its events, and its timers.

Other threads post events without an instant (``Undated``). ``EventQueue`` stamps them under one lock, so that instants are
in the order of the queue. ``Timers`` keeps the newest deadline of each name in one thread. ``MergePool`` runs orders for
different fragments at once and orders for one fragment in order.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from orchestrator.core.events import Event
from orchestrator.core.vocabulary import Epoch, FragmentId, Instant, Timer
from orchestrator.host.line_traffic import JobLines
from orchestrator.specification.config import JobSpec
from orchestrator.system.roots import AllowedRoots

Undated = Callable[[Instant], Event]
"""An event but for its instant: called with that, it is whole."""
Post = Callable[[Undated], int]
"""Stamp the event and queue it. Returns the number that its record will have."""
THREADS_MAX = 4
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class JobContext:
    """The context of one life of the synchroniser, which every part of its process is given.

    ``roots`` are the paths that the job may touch, ``epoch`` is this life's, and ``now`` is the job's own time. A part calls
    ``failed`` with what went wrong when the job cannot continue: a bug of ours, or Fenced when islands listen to a newer
    synchroniser. ``durable_count`` is the number of the last record that is durable. ``lines`` counts what islands' lines
    carry.
    """

    job: str
    spec: JobSpec
    run_dir: Path
    roots: AllowedRoots
    epoch: Epoch
    now: Callable[[], Instant]
    post: Post
    failed: Callable[[BaseException], None]
    durable_count: Callable[[], int]
    lines: JobLines = field(default_factory=JobLines)

    def guarded(self, work: Callable[..., None], *arguments: Any) -> None:
        """Do a thread's work: a bug of ours ends the job, where a thread or a pool would keep it to itself."""
        try:
            work(*arguments)
        except Exception as error:
            self.failed(error)


class EventQueue:
    """The events of a job in one order, each stamped on entry. Any thread posts; the pump alone takes them out.

    ``clock`` is the job's own time; ``count`` records are on the tape already.
    """

    def __init__(self, clock: Callable[[], Instant], count: int) -> None:
        self._clock, self._count = clock, count
        self._entry = threading.Lock()  # makes the order of the instants that of the queue, and of the records
        self._queue: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()

    def post(self, undated: Undated) -> int:
        """Stamp an event and queue it. Returns the number that its record will have."""
        with self._entry:
            self._queue.put(undated(self._clock()))
            self._count += 1
            return self._count

    def fail(self, error: BaseException) -> None:
        """Have ``next`` raise the error, behind the events that were posted before."""
        self._queue.put(error)

    def next(self) -> Event:
        """Return the next event, once there is one. Raises what ``fail`` was given."""
        event = self._queue.get()
        if isinstance(event, BaseException):
            raise event
        return event


class Timers:
    """``fire(timer, serial)`` is called from the timers' own thread; ``clock`` is the job's."""

    def __init__(self, clock: Callable[[], Instant], fire: Callable[[Timer, int], object]) -> None:
        self._clock, self._fire = clock, fire
        self._changed = threading.Condition()
        self._deadlines: dict[Timer, tuple[Instant, int]] = {}
        self._closed = False
        threading.Thread(target=self._run, name="timers", daemon=True).start()

    def set(self, timer: Timer, serial: int, due_at: Instant) -> None:
        with self._changed:
            self._deadlines[timer] = (due_at, serial)
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                now = self._clock()
                due = {timer: serial for timer, (at, serial) in self._deadlines.items() if at <= now}
                for timer in due:
                    del self._deadlines[timer]
                if not due:
                    next_at = min((at for at, _ in self._deadlines.values()), default=None)
                    self._changed.wait(None if next_at is None else next_at - now)
            for timer in sorted(due, key=str):
                self._fire(timer, due[timer])


class MergePool:
    """An order waits for earlier ones only, and these were started before it: nothing can wait for ever."""

    def __init__(self, threads: int | None = None) -> None:
        self._threads = ThreadPoolExecutor(threads or min(THREADS_MAX, max(2, os.cpu_count() or 1)), "merge")
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
        """Stop. Work that has not begun is discarded."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _after(earlier: Iterable[Future[Any]], work: Callable[[], Result]) -> Result:
    wait(earlier)
    return work()
