"""Threads for calls that may never return: a bounded number, and a deadline for each caller.

At most ``threads_max`` threads wait for calls. A caller whose deadline has passed leaves; the thread stays with the call,
and counts, until it returns. There is no queue: while all threads are busy, the next caller is refused at once. The threads
are daemons, so that the process can exit while a call hangs. ``concurrent.futures`` has an unbounded queue, and the
interpreter waits for its threads.

Source: Nygard, Release It! (bulkheads, timeouts).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeVar

from orchestrator.errors import InfrastructureError

Answer = TypeVar("Answer")


class BoundedThreads:
    """``name`` says in errors, and in lists of threads, what the threads are for."""

    def __init__(self, name: str, threads_max: int) -> None:
        self.name = name
        self.threads_max = threads_max
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._counting = Lock()
        self._thread_count = 0
        self._busy_count = 0

    def begin(self, call: Callable[[], Answer]) -> Future[Answer]:
        """Start the call and return a future of its result. Raises InfrastructureError if all threads are busy."""
        with self._counting:
            if self._busy_count >= self.threads_max:
                detail = f"All {self.threads_max} threads for {self.name} are waiting for answers."
                raise InfrastructureError(detail=detail, remedy="Try again in a moment.")
            self._busy_count += 1
            if self._thread_count < self._busy_count:
                self._thread_count += 1
                Thread(target=self._work, name=f"{self.name}-{self._thread_count}", daemon=True).start()
        future: Future[Answer] = Future()
        future.set_running_or_notify_cancel()  # it can no longer be cancelled
        self._calls.put((future, call))
        return future

    def answer(self, call: Callable[[], Answer], within_s: float, whose: str) -> Answer:
        """Return the result of the call. Raises InfrastructureError after ``within_s``, naming ``whose`` answer it was."""
        try:
            return self.begin(call).result(within_s)
        except TimeoutError as error:
            detail = f"{whose} did not answer within {within_s:g} s."
            raise InfrastructureError(detail=detail, remedy="Try again in a moment.") from error

    def _work(self) -> None:
        while True:
            future, call = self._calls.get()
            try:
                result = call()
            except BaseException as error:
                self._free()
                future.set_exception(error)
            else:
                self._free()
                future.set_result(result)
            del future, call  # do not keep them alive while waiting for the next call

    def _free(self) -> None:
        """Mark the thread as free before its result is set: the caller may start the next call at once."""
        with self._counting:
            self._busy_count -= 1
