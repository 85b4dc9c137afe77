"""Who gets how much of a line: caps, small before large, cancellation, and limits of progress instead of time."""

from __future__ import annotations

import threading
import time

import pytest

from orchestrator.channel.client import REQUESTS_AHEAD, STREAMS_NEAR, Pulling
from orchestrator.channel.frames import Reception
from orchestrator.channel.server import Listening
from orchestrator.channel.stream import BATCH_BYTES_MAX, BATCH_BYTES_MIN, ByteBudget, Cap
from orchestrator.errors import TransferCancelled
from tests.channel.jobs import ISLAND, LOOPBACK, MIB, RANGE, Job, by_way_of, connection_count, content_of
from tests.channel.line import Line
from tests.waiting import wait_until


def test_bytes_are_due_when_those_before_them_have_taken_their_time() -> None:
    cap = Cap(1000.0)
    assert cap.take(500, now=10.0) == 0.0
    assert cap.take(500, now=10.0) == pytest.approx(0.45)  # less what a burst may be
    assert cap.take(500, now=10.0) == pytest.approx(0.95)
    assert cap.take(1, now=100.0) == 0.0


def test_bytes_that_go_ahead_wait_for_nothing_and_are_counted() -> None:
    cap = Cap(1000.0)
    assert cap.take(5000, now=10.0, ahead=True) == 0.0
    assert cap.take(10, now=10.0, ahead=True) == 0.0
    assert cap.take(1, now=10.0) == pytest.approx(4.96)


def test_a_cap_that_is_lifted_holds_up_nobody() -> None:
    cap = Cap(1.0)
    cap.take(1000, now=10.0)
    cap.bytes_per_second = None
    assert cap.take(1000, now=10.0) == 0.0


def test_batches_are_small_where_the_line_is_slow() -> None:
    assert Cap(None).batch_bytes() == BATCH_BYTES_MAX
    assert Cap(1.0).batch_bytes() == BATCH_BYTES_MIN
    assert Cap(20 * 100_000).batch_bytes() == 100_000


def test_a_budget_serves_in_order_and_gives_room_back() -> None:
    budget = ByteBudget(10)
    with budget.hold(8, lambda: False, 0.01) as held:
        assert held
        assert budget.used == 8
        with budget.hold(3, lambda: True, 0.01) as second:
            assert not second
    with budget.hold(100, lambda: False, 0.01) as held:
        assert held
        assert budget.used == 10
    assert budget.used == 0


def test_all_streams_of_a_link_together_keep_its_cap(job: Job) -> None:
    server, client = job.server(), job.client()
    size, rate = 4 * RANGE, 16 * MIB
    server.cap(ISLAND).bytes_per_second = rate
    server.serve("theta", content_of(size))
    began_at = time.monotonic()
    assert client.pull(server.ticket("theta", ISLAND)) == content_of(size)
    assert time.monotonic() - began_at >= 0.9 * size / rate


def test_the_cap_of_one_link_is_not_another_s(plain: Job) -> None:
    server = plain.server()
    server.cap("asia").bytes_per_second = 1.0
    server.serve("theta", content_of(RANGE))
    assert plain.client().pull(server.ticket("theta", ISLAND)) == content_of(RANGE)


def test_a_small_payload_does_not_wait_for_a_large_one(job: Job) -> None:
    server, client = job.server(), job.client(pulling=Pulling(bytes_max=RANGE))
    server.cap(ISLAND).bytes_per_second = 4 * MIB
    server.serve("large", content_of(200 * MIB // 8))
    server.serve("small", content_of(1000))
    ticket = server.ticket("large", ISLAND)
    reception, over = Reception(ticket), threading.Event()

    def pull() -> None:
        with pytest.raises(TransferCancelled):
            client.pull(ticket, reception=reception, abandoned=over.is_set)

    thread = threading.Thread(target=pull)
    thread.start()
    wait_until(lambda: reception.received_count >= 1, "the large one is on its way")
    for _ in range(20):
        assert client.pull(server.ticket("small", ISLAND)) == content_of(1000)
    assert not reception.complete
    over.set()
    thread.join()


def test_small_payloads_pass_a_cap_under_which_nothing_else_moves(job: Job) -> None:
    server, client = job.server(), job.client(pulling=Pulling(stall_s=3.0))
    server.cap(ISLAND).bytes_per_second = 1.0
    server.serve("small", content_of(1000))
    for _ in range(5):
        assert client.pull(server.ticket("small", ISLAND)) == content_of(1000)


def test_a_pull_that_is_replaced_asks_for_nothing_more(job: Job) -> None:
    server, client = job.server(), job.client()
    size = 16 * RANGE
    server.cap(ISLAND).bytes_per_second = 16 * MIB
    server.serve("theta", content_of(size))
    line, over = Line(server.address), threading.Event()
    ticket = by_way_of(server.ticket("theta", ISLAND), line.address)
    reception = Reception(ticket)

    def pull() -> None:
        with pytest.raises(TransferCancelled):
            client.pull(ticket, reception=reception, abandoned=over.is_set)

    thread = threading.Thread(target=pull)
    thread.start()
    wait_until(lambda: reception.received_count >= 1, "a range is here")
    received_count = reception.received_count
    over.set()
    thread.join()
    assert reception.received_count <= received_count + STREAMS_NEAR * REQUESTS_AHEAD
    client.close()
    wait_until(lambda: connection_count(server) == 0, "the server has noticed")
    line.close()


def test_closing_a_client_ends_its_pulls(plain: Job) -> None:
    server, client = plain.server(), plain.client()
    server.cap(ISLAND).bytes_per_second = MIB
    server.serve("theta", content_of(8 * RANGE))
    ended: list[object] = []

    def pull() -> None:
        with pytest.raises(TransferCancelled):
            client.pull(server.ticket("theta", ISLAND))
        ended.append(True)

    thread = threading.Thread(target=pull)
    thread.start()
    wait_until(lambda: connection_count(server), "it pulls")
    client.close()
    thread.join()
    assert ended


def test_a_pull_may_take_many_times_its_limit_of_progress(plain: Job) -> None:
    server = plain.server(Listening(LOOPBACK, stall_s=2.0, local_memory=False))
    client, size = plain.client(pulling=Pulling(stall_s=2.0)), RANGE
    server.cap(ISLAND).bytes_per_second = size / 5
    server.serve("theta", content_of(size))
    assert client.pull(server.ticket("theta", ISLAND)) == content_of(size)
