"""Requests for a training island's state, from any thread, and the boundary at which all of them get the same one.

Responsible for the waiting requests, their timeouts, the rate of bytes, and for refusing requests that cannot be answered:
an island that does not train has no state to give. Refuses to know what a state is made of, but for its being finite: a
donor may have diverged without knowing it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from time import monotonic, sleep
from typing import Generic, TypeVar

import numpy as np

from orchestrator.errors import DataError, InfrastructureError

Selection = TypeVar("Selection")
State = TypeVar("State")


class Exports(Generic[Selection, State]):
    """Closed until training begins, and again when it has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: list[tuple[Selection, Future[State]]] = []
        self._is_open = False

    def open(self) -> None:
        with self._lock:
            self._is_open = True

    def ask(self, selection: Selection, timeout_s: float) -> State:
        """``selection`` of the state at the next boundary. Raises InfrastructureError when there is none, or not in time."""
        return self.wait(self.request(selection), timeout_s)

    def wait(self, request: Future[State], timeout_s: float) -> State:
        """What was requested. Raises InfrastructureError when it does not come in time."""
        try:
            return request.result(timeout_s)
        except TimeoutError as error:
            detail = f"no boundary between steps came within {timeout_s} s."
            raise InfrastructureError(detail=detail, remedy="Ask another donor.") from error

    def request(self, selection: Selection) -> Future[State]:
        """``selection`` of the state at the next boundary, to be waited for elsewhere. Raises as ``ask``."""
        return self.request_all([selection])[0]

    def request_all(self, selections: Sequence[Selection]) -> list[Future[State]]:
        """All of them at the same boundary. Raises as ``ask``."""
        futures: list[Future[State]] = [Future() for _ in selections]
        with self._lock:
            if not self._is_open:
                raise InfrastructureError(detail="this island does not train, so it has no state to give.")
            self._requests.extend(zip(selections, futures, strict=True))
        return futures

    def waiting(self) -> tuple[Selection, ...]:
        """What is waited for, each selection once."""
        with self._lock:
            return tuple(dict.fromkeys(selection for selection, _ in self._requests))

    def answer(self, take: Callable[[Selection], State], selections: Iterable[Selection]) -> None:
        """At a boundary, answer the requests for these selections; ``take`` is called once for each that is waited for."""
        wanted = set(selections)
        with self._lock:
            requests = [request for request in self._requests if request[0] in wanted]
            self._requests = [request for request in self._requests if request[0] not in wanted]
        states = {selection: take(selection) for selection in dict.fromkeys(selection for selection, _ in requests)}
        for selection, future in requests:
            future.set_result(states[selection])

    def close(self) -> None:
        with self._lock:
            self._is_open = False
            for _, future in self._requests:
                future.set_exception(InfrastructureError(detail="this island has just ended its training."))


class HeldStates(Generic[State]):
    """States of one boundary each, by fragment, which receivers take fragment by fragment. Thread-safe.

    A fragment is kept until its receiver asks for another one: then it has arrived. What nobody asks for any more is let go
    of after ``idle_s``, at the next request of anybody.
    """

    def __init__(
        self, cut: Callable[[], Sequence[State]], idle_s: Callable[[], float], clock: Callable[[], float] = monotonic
    ) -> None:
        self._cut, self._idle_s, self._clock = cut, idle_s, clock
        self._lock = threading.Lock()
        self._states: dict[str, dict[int, State]] = {}
        self._latest: dict[str, tuple[int, float]] = {}

    def give(self, receiver: str, fragment: int) -> State:
        """The fragment at the boundary at which this receiver first asked; at a new one if that is not there any more."""
        with self._lock:
            now, idle_s = self._clock(), self._idle_s()
            for idle in [name for name, (_, at) in self._latest.items() if now - at > idle_s]:
                del self._latest[idle], self._states[idle]
            latest, _ = self._latest.get(receiver, (fragment, now))
            if latest != fragment:
                self._states[receiver].pop(latest, None)
            if fragment not in self._states.get(receiver, {}):
                self._states[receiver] = dict(enumerate(self._cut()))
            self._latest[receiver] = (fragment, now)
            return self._states[receiver][fragment]


class CutStates(Generic[State]):
    """States by the name of their boundary and by fragment, which receivers come for. Thread-safe.

    They are kept until ``forget``; of what nobody comes for any more all is let go of after ``idle_s``, at the next request.
    """

    def __init__(self, idle_s: Callable[[], float], clock: Callable[[], float] = monotonic) -> None:
        self._idle_s, self._clock = idle_s, clock
        self._changed = threading.Condition()
        self._states: dict[str, dict[int, State]] = {}
        self._touched_at: dict[str, float] = {}

    def keep(self, cut: str, fragment: int, state: State) -> None:
        with self._changed:
            self._touch(cut)
            self._states.setdefault(cut, {})[fragment] = state
            self._changed.notify_all()

    def state(self, cut: str, fragment: int, timeout_s: float) -> State:
        """What is kept under this name, once it is. Raises InfrastructureError when it does not come in time."""
        with self._changed:
            self._touch(cut)
            if not self._changed.wait_for(lambda: fragment in self._states.get(cut, {}), timeout_s):
                detail = f"fragment {fragment} of the state {cut} is not kept here."
                raise InfrastructureError(detail=detail, remedy="Ask for a new one.")
            return self._states[cut][fragment]

    def forget(self, cut: str, fragment: int) -> None:
        with self._changed:
            left = self._states.get(cut, {})
            left.pop(fragment, None)
            if not left:
                self._states.pop(cut, None)
                self._touched_at.pop(cut, None)

    def _touch(self, cut: str) -> None:
        """Under the lock."""
        now, idle_s = self._clock(), self._idle_s()
        for idle in [name for name, at in self._touched_at.items() if now - at > idle_s]:
            del self._touched_at[idle]
            self._states.pop(idle, None)
        self._touched_at[cut] = now


class Throttle:
    """Limits the bytes per second, on average over all requests, in their order; ``None`` is no limit."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self.bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wait(self, size: int, timeout_s: float) -> None:
        """Returns when they may have gone. Raises InfrastructureError at once when that takes longer than ``timeout_s``."""
        if self.bytes_per_s is None:
            return
        with self._lock:
            now = monotonic()
            free_at = max(now, self._free_at) + size / self.bytes_per_s
            if free_at - now > timeout_s:
                detail = f"{size} bytes would have to wait {free_at - now:.0f} s at {self.bytes_per_s:.0f} bytes/s."
                raise InfrastructureError(
                    detail=detail, remedy="Raise recovery.donor_bytes_per_s, or synchroniser.fragments."
                )
            self._free_at = free_at
        sleep(free_at - now)


def require_numbers(state: Mapping[str, np.ndarray]) -> None:
    """Raises DataError, naming tensors, when a peer's state holds anything that is not finite."""
    if not_finite := sorted(name for name, array in state.items() if not np.isfinite(array).all()):
        raise DataError(detail=f"the state that a peer gave contains NaN or Inf in {', '.join(not_finite[:3])}.")
