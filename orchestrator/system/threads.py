"""Threads for calls that may never return: so many at a time, each caller with a deadline.

Responsible for one bound: whatever a call waits for, at most ``threads_max`` threads wait with it. A caller whose time is
over leaves, and the thread stays with the call, counted, until that returns. Nobody queues here: with all threads taken
the next caller is refused at once. The threads are daemons, so that a process can end while a call hangs.

It refuses to know what is called. ``concurrent.futures`` has neither of the two: its queue has no end, and its threads
are waited for when the interpreter ends.

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
    """``name`` says in errors and in lists of threads what they are for."""

    def __init__(self, name: str, threads_max: int) -> None:
        self.name = name
        self.threads_max = threads_max
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._counting = Lock()
        self._thread_count = 0
        self._busy_count = 0

    def begin(self, call: Callable[[], Answer]) -> Future[Answer]:
        """The call is under way; its result comes in the future. Raises InfrastructureError if all threads are taken."""
        with self._counting:
            if self._busy_count >= self.threads_max:
                detail = f"All {self.threads_max} threads for {self.name} wait for answers that do not come."
                raise InfrastructureError(detail=detail, remedy="Try again in a moment.")
            self._busy_count += 1
            if self._thread_count < self._busy_count:
                self._thread_count += 1
                Thread(target=self._work, name=f"{self.name}-{self._thread_count}", daemon=True).start()
        future: Future[Answer] = Future()
        future.set_running_or_notify_cancel()  # from here on nobody can take it back
        self._calls.put((future, call))
        return future

    def answer(self, call: Callable[[], Answer], within_s: float, whose: str) -> Answer:
        """What the call returns. Raises InfrastructureError, naming ``whose`` answer it was, after ``within_s``."""
        try:
            return self.begin(call).result(within_s)
        except TimeoutError as error:
            detail = f"{whose} has not answered within {within_s:g} s."
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
            del future, call  # nothing of it is held while the thread waits for the next

    def _free(self) -> None:
        """Before the result is there: whoever has it may begin the next call at once."""
        with self._counting:
            self._busy_count -= 1
