"""A limit on how often one address may show a wrong token before it has to wait. Pure: the time comes as ``now``.

A token bucket for each address: ``failures_max`` failures at once, then one each ``window_s / failures_max``. At most
``addresses_max`` buckets are kept; the one that failed least recently is forgotten first, so that an attacker with many
addresses costs no more memory than that.

Wrong tokens are counted, right ones never refused: behind one address there may be many programs, of which one with an old
token must not lock out the rest. It is the length of a token that makes guessing hopeless; this keeps it from being loud.
"""

from __future__ import annotations

import math
from collections import OrderedDict


class FailureLimit:
    def __init__(self, failures_max: int = 10, window_s: float = 60.0, addresses_max: int = 1024) -> None:
        self._failures_max = failures_max
        self._seconds_each = window_s / failures_max
        self._addresses_max = addresses_max
        self._spent: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """By address: the failures less what has drained, and the time of that count."""

    def __len__(self) -> int:
        return len(self._spent)

    def failed(self, address: str, now: float) -> int:
        """Count one more failure. Returns 0, or how many seconds this address has to wait, which is then not counted."""
        failures, at = self._spent.pop(address, (0.0, now))
        failures = max(0.0, failures - max(0.0, now - at) / self._seconds_each)
        wait_s = 0
        if failures + 1 > self._failures_max:
            wait_s = math.ceil(round((failures + 1 - self._failures_max) * self._seconds_each, 6))
        else:
            failures += 1
        self._spent[address] = (failures, now)
        while len(self._spent) > self._addresses_max:
            self._spent.popitem(last=False)
        return wait_s
