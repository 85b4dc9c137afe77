"""The impaired link to one island: injected faults (``core.faults``) delay, corrupt or drop what it carries.

An answer, or a failure, during a cut arrives at its end; bytes on a slow link take their time; a payload may come
spoilt, late, or not at all. Every wait ends when the link is closed, and soon after the impairment was cleared. Refuses
to know what is carried.
"""

from __future__ import annotations

import threading
import time
from typing import TypeVar, assert_never

import ray
from ray.exceptions import RayError

from orchestrator.core.faults import Corrupt, Delay, Drop, LinkImpairment
from orchestrator.runtime.published import Content, spoiled

SLICE_S = 0.1
"""How soon it is noticed that a cut, or slowness, was called off."""


Answer = TypeVar("Answer")


class ImpairedLink:
    """The link to one incarnation, through which everything to and from it passes, until ``closed`` is set."""

    def __init__(self, closed: threading.Event) -> None:
        self.impairment = LinkImpairment()
        self.closed = closed

    def slow(self) -> bool:
        return self.impairment.slow(time.monotonic())

    def get(self, call: ray.ObjectRef[Answer], timeout_s: float) -> Answer:
        """Return the answer, as ``ray.get`` does. What comes while the link is cut is seen only afterwards."""
        deadline = time.monotonic() + timeout_s
        while True:
            while self.is_cut():
                if time.monotonic() >= deadline or self.closed.wait(SLICE_S):
                    raise TimeoutError
            try:
                answer = ray.get(call, timeout=max(0.0, deadline - time.monotonic()))
            except RayError:
                if not self.is_cut():
                    raise
            else:
                if not self.is_cut():
                    return answer

    def wait_until_open(self) -> bool:
        """Returns once nothing is cut off; false if the link was closed before that."""
        while self.is_cut() and not self.closed.wait(SLICE_S):
            pass
        return not self.closed.is_set()

    def delay(self, size_bytes: int) -> None:
        """Take the time that slowness costs so many bytes, unless it ends or is called off before."""
        now = time.monotonic()
        there_at = now + self.impairment.transfer_delay_s(size_bytes, now)
        while (now := time.monotonic()) < there_at and self.impairment.slow(now):
            if self.closed.wait(min(SLICE_S, there_at - now)):
                return

    def impaired(self, payload: Content | None) -> Content | None:
        """The payload as it arrives, when it does; None if it does not arrive, or there was no payload."""
        if payload is None:
            return None
        self.delay(len(payload))
        fault = self.impairment.payload_fault()
        if fault is None:
            return payload
        match fault:
            case Delay():
                self.closed.wait(fault.duration_s)
                return payload
            case Corrupt():
                return spoiled(payload) if isinstance(payload, memoryview) else payload.spoiled()
            case Drop():
                return None
            case _:
                assert_never(fault)

    def is_cut(self) -> bool:
        """Return whether the link is cut now."""
        return self.impairment.cut_s(time.monotonic()) > 0.0
