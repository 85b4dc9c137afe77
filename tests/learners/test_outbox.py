"""The reliable outbox: what is read again, what is taken, and how long a reader waits for a report."""

from __future__ import annotations

import threading
from typing import Any

from learners.outbox import Outbox
from orchestrator.core.messages import Flushed, Offer, Ready
from orchestrator.core.vocabulary import Epoch
from orchestrator.errors import Fenced
from tests.waiting import PATIENCE_S

ATTEMPTS = 20
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
