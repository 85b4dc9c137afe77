"""The reliable outbox for several threads: whoever waits is woken, and a report is read by whoever asks for it."""

from __future__ import annotations

import threading
from typing import Any

from learners.outbox import Outbox
from orchestrator.core.messages import Flushed, Offer, Ready
from orchestrator.core.vocabulary import Epoch

OFFER = Offer(0, 1, 1, 0, 1, 8, 8)


def test_a_reader_that_waits_is_woken_by_the_first_report() -> None:
    outbox, got = Outbox(), list[Any]()
    reader = threading.Thread(target=lambda: got.extend(outbox.read(Epoch(1), 0, 0, 30.0)))
    reader.start()
    outbox.put(Flushed())
    reader.join(10)
    assert got == [(1, Flushed())]


def test_a_reader_that_waits_is_woken_by_what_a_new_synchroniser_is_to_hear_again() -> None:
    outbox, got = Outbox(lambda: [OFFER]), list[Any]()
    outbox.heed(Epoch(1))
    reader = threading.Thread(target=lambda: got.extend(outbox.read(Epoch(1), 0, 0, 30.0)))
    reader.start()
    outbox.heed(Epoch(2))
    reader.join(10)
    assert got == [(1, OFFER)]


def test_what_somebody_else_read_without_acknowledging_is_read_again_and_taken_never() -> None:
    outbox = Outbox()
    outbox.put(Ready(1, 2.0))
    assert outbox.read(Epoch(1), 0, 0, 0.0) == outbox.read(Epoch(1), 0, 0, 0.0) == [(1, Ready(1, 2.0))]
    assert outbox.take(0.0) == []
