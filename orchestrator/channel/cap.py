"""A cap in bytes per second that the streams of one link share, and a budget of bytes for who pulls.

Source: the virtual-scheduling form of the leaky bucket (ITU-T I.371): each batch of bytes is due when the one before it has
taken its time.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

BURST_S = 0.05
BATCH_S = 0.05
BATCH_BYTES_MIN, BATCH_BYTES_MAX = 4 << 10, 1 << 20


class Cap:
    """At most ``bytes_per_second`` over all who ``take``; None for no limit. It may be changed at any time."""

    def __init__(self, bytes_per_second: float | None = None) -> None:
        self._lock = threading.Lock()
        self._bytes_per_second = bytes_per_second
        self._free_at = 0.0

    @property
    def bytes_per_second(self) -> float | None:
        return self._bytes_per_second

    @bytes_per_second.setter
    def bytes_per_second(self, bytes_per_second: float | None) -> None:
        with self._lock:
            self._bytes_per_second, self._free_at = bytes_per_second, 0.0

    def batch_bytes(self) -> int:
        """How much to send at once, so that a slow link is used evenly and a fast one with few calls."""
        rate = self._bytes_per_second
        return BATCH_BYTES_MAX if rate is None else int(min(BATCH_BYTES_MAX, max(BATCH_BYTES_MIN, rate * BATCH_S)))

    def take(self, size: int, now: float, *, ahead: bool = False) -> float:
        """Count these bytes. Returns how long to wait before they may go; bytes that go ``ahead`` never wait."""
        with self._lock:
            if self._bytes_per_second is None:
                return 0.0
            begins_at = max(now - BURST_S, self._free_at)
            self._free_at = begins_at + size / self._bytes_per_second
            return 0.0 if ahead else max(0.0, begins_at - now)


class ByteBudget:
    """At most ``bytes_max`` held at once, first come first served; one who wants more than all of it is served alone."""

    def __init__(self, bytes_max: int) -> None:
        self._max = bytes_max
        self._used = 0
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()

    @property
    def used(self) -> int:
        return self._used

    @contextmanager
    def hold(self, size: int, abandoned: Callable[[], bool], slice_s: float) -> Iterator[bool]:
        """Wait for room and hold it; yields false, holding nothing, if ``abandoned`` came first."""
        share, turn = min(size, self._max), object()
        with self._changed:
            self._queue.append(turn)
            while (self._queue[0] is not turn or self._used + share > self._max) and not abandoned():
                self._changed.wait(slice_s)
            held = self._queue[0] is turn and self._used + share <= self._max
            self._queue.remove(turn)
            self._used += share if held else 0
            self._changed.notify_all()
        try:
            yield held
        finally:
            if held:
                with self._changed:
                    self._used -= share
                    self._changed.notify_all()


def wait(seconds: float, abandoned: Callable[[], bool], slice_s: float) -> bool:
    """Sleep, or less if ``abandoned``; true if all of it."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if abandoned():
            return False
        time.sleep(min(slice_s, left))
    return True
