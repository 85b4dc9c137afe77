"""Peers that ask a training island for its state, from any thread, and the boundary at which they all get the same one.

Responsible for who waits, for how long, and for nobody waiting in vain: an island that does not train has no state to give.
Refuses to know what a state is made of, but for its being numbers: a donor may have diverged without knowing it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Generic, TypeVar

import numpy as np

from orchestrator.errors import DataError, InfrastructureError

State = TypeVar("State")


class Exports(Generic[State]):
    """Closed until training begins, and again when it has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: list[Future[State]] = []
        self._is_open = False

    def open(self) -> None:
        with self._lock:
            self._is_open = True

    def ask(self, timeout_s: float) -> State:
        """The state at the next boundary. Raises InfrastructureError when there is none to give, or not in time."""
        try:
            return self.request().result(timeout_s)
        except TimeoutError as error:
            detail = f"no boundary between steps came within {timeout_s} s."
            raise InfrastructureError(detail=detail, remedy="Ask another donor.") from error

    def request(self) -> Future[State]:
        """The state at the next boundary, to be waited for elsewhere. Raises InfrastructureError when there is none."""
        asked: Future[State] = Future()
        with self._lock:
            if not self._is_open:
                raise InfrastructureError(detail="this island does not train, so it has no state to give.")
            self._asked.append(asked)
        return asked

    def answer(self, take: Callable[[], State]) -> None:
        """This is a boundary: whoever asked since the last one gets what ``take`` gives, which is asked once at most."""
        with self._lock:
            asked, self._asked = self._asked, []
        if asked:
            state = take()
            for future in asked:
                future.set_result(state)

    def close(self) -> None:
        with self._lock:
            self._is_open = False
            for future in self._asked:
                future.set_exception(InfrastructureError(detail="this island has just ended its training."))


def require_numbers(state: Mapping[str, np.ndarray]) -> None:
    """Raises DataError, naming tensors, when a peer's state holds anything that is not finite."""
    if sick := sorted(name for name, array in state.items() if not np.isfinite(array).all()):
        raise DataError(detail=f"the state that a peer gave holds no numbers in {', '.join(sick[:3])}.")
