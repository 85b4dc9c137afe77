"""How long who waits: a reader of the reliable outbox until a report, a peer for a state by its size."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from learners import state_transfer
from learners.outbox import Outbox
from learners.state_transfer import Throttle
from orchestrator.core.messages import Flushed, Offer, Ready
from orchestrator.core.vocabulary import Epoch
from orchestrator.errors import Fenced
from tests.waiting import PATIENCE_S

ATTEMPTS = 20
BILLION = 12 * 10**9
OFFER = Offer(0, 1, 1, 0, 1, 8, 8)


def test_a_reader_that_waits_is_woken_by_the_first_report() -> None:
    outbox, got = Outbox(), list[Any]()
    reader = threading.Thread(target=lambda: got.extend(outbox.read(Epoch(1), 0, 0, PATIENCE_S)))
    reader.start()
    outbox.put(Flushed())
    reader.join()
    assert got == [(1, Flushed())]


def test_a_reader_that_waits_is_woken_by_what_a_new_synchroniser_is_to_hear_again() -> None:
    for _ in range(ATTEMPTS):
        outbox, got, came_late = Outbox(lambda: [OFFER]), list[Any](), threading.Event()
        outbox.check_epoch(Epoch(1))

        def read(outbox: Outbox = outbox, got: list[Any] = got, came_late: threading.Event = came_late) -> None:
            try:
                got.extend(outbox.read(Epoch(1), 0, 0, PATIENCE_S))
            except Fenced:
                came_late.set()  # the new synchroniser was before it: it did not wait

        reader = threading.Thread(target=read)
        reader.start()
        outbox.check_epoch(Epoch(2))
        reader.join()
        if not came_late.is_set():
            break
    assert got == [(1, OFFER)]


def test_what_somebody_else_read_without_acknowledging_is_read_again_and_taken_never() -> None:
    outbox = Outbox()
    outbox.put(Ready(1, 2.0))
    assert outbox.read(Epoch(1), 0, 0, 0.0) == outbox.read(Epoch(1), 0, 0, 0.0) == [(1, Ready(1, 2.0))]
    assert outbox.take(0.0) == []


@pytest.mark.parametrize(("byte_count", "line_bytes_per_s"), [(10**7, 2e6), (BILLION, 2e6), (8 * BILLION, 125e6)])
def test_a_line_that_is_twice_as_fast_as_the_slowest_is_waited_for_whatever_the_size(
    byte_count: int, line_bytes_per_s: float
) -> None:
    assert state_transfer.limit_s(byte_count, None) > byte_count / line_bytes_per_s + state_transfer.BOUNDARY_S


@pytest.mark.parametrize("byte_count", [1000, BILLION])
def test_a_donor_never_makes_anybody_wait_for_longer_than_they_do(byte_count: int) -> None:
    rate = 50e6
    assert state_transfer.queue_s(byte_count, rate) < state_transfer.limit_s(byte_count, rate)
    assert byte_count / rate < state_transfer.queue_s(byte_count, rate)


def test_a_donor_without_a_limit_lets_nobody_wait() -> None:
    Throttle(None).wait(BILLION, state_transfer.queue_s(BILLION, None))
