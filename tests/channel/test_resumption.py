"""A pull survives broken connections and dead servers; what has arrived is never asked for again."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from orchestrator.channel.client import Pulling
from orchestrator.channel.frames import Reception
from orchestrator.errors import TransferStalled
from tests.channel.jobs import ISLAND, MIB, NEAR, RANGE, Job, ServingProcess, also_at, by_way_of, content_of
from tests.channel.line import Line
from tests.waiting import wait_until

SOON = Pulling(stall_s=3.0)
"""For pulls that are to stall."""


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_after_a_broken_connection_only_missing_ranges_are_asked_for_again(tls: bool) -> None:
    job = Job(tls=tls)
    server, client, size = job.server(), job.client(), 8 * RANGE
    server.serve("theta", content_of(size))
    broken_at = 2 * RANGE + MIB

    def down(number: int, offset: int, content: bytes) -> bytes | None:
        return None if number < 2 and offset > broken_at else content

    line = Line(server.address, down)
    assert client.pull(by_way_of(server.ticket("theta", ISLAND), line.address)) == content_of(size)
    assert line.connection_count > 2
    assert size <= line.down_bytes < size + 2 * (RANGE + 2 * MIB)  # each broken one loses the range that it was in
    line.close()
    job.close()


def test_another_process_that_serves_the_same_goes_on_where_a_killed_one_has_ended(job: Job) -> None:
    size = 10 * RANGE
    first = ServingProcess(job, size, bytes_per_second=16 * MIB)
    client = job.client(pulling=SOON)
    reception = Reception(first.ticket)
    errors: list[BaseException] = []

    def pull() -> None:
        try:
            client.pull(first.ticket, reception=reception)
        except TransferStalled as error:
            errors.append(error)

    thread = threading.Thread(target=pull)
    thread.start()
    wait_until(lambda: reception.received_count >= 2, "two ranges are here")
    first.kill()
    thread.join()
    assert errors
    received_count = reception.received_count
    assert 2 <= received_count < 10
    second = ServingProcess(job, size)
    line = Line(second.ticket.addresses[0])
    patient = job.client()
    assert patient.pull(by_way_of(second.ticket, line.address), reception=reception) == content_of(size)
    missing_bytes = (10 - received_count) * RANGE
    assert missing_bytes <= line.down_bytes < missing_bytes + MIB
    line.close()
    second.kill()


def test_a_pull_with_two_addresses_outlives_the_death_of_one_server(job: Job) -> None:
    size = 10 * RANGE
    first = ServingProcess(job, size, bytes_per_second=16 * MIB)
    second = ServingProcess(job, size, bytes_per_second=64 * MIB)
    reception = Reception(first.ticket)
    results: list[bool] = []
    thread = threading.Thread(
        target=lambda: results.append(
            job.client().pull(also_at(first.ticket, second.ticket), reception=reception) == content_of(size)
        )
    )
    thread.start()
    wait_until(lambda: reception.received_count >= 1, "a range is here")
    first.kill()
    thread.join()
    assert results == [True]
    second.kill()


def test_a_reception_takes_no_other_bytes_than_those_that_it_was_begun_for(plain: Job) -> None:
    server, client = plain.server(), plain.client()
    server.serve("theta", content_of(10, seed=1))
    reception = Reception(server.ticket("theta", ISLAND))
    server.serve("theta", content_of(10, seed=2))
    with pytest.raises(ValueError, match="differs from the payload of which a part has been received"):
        client.pull(server.ticket("theta", ISLAND), reception=reception)


def test_a_server_that_does_not_come_back_is_a_stall_that_names_the_last_error(plain: Job) -> None:
    server, client = plain.server(), plain.client(pulling=SOON)
    server.serve("theta", content_of(10))
    ticket = server.ticket("theta", ISLAND)
    server.close()
    with pytest.raises(TransferStalled, match=r"Connection refused.*for 3 s"):
        client.pull(ticket)


def test_what_came_from_a_killed_server_s_memory_stays_readable(job: Job) -> None:
    serving = ServingProcess(job, 3 * RANGE, listening=NEAR)
    unreachable = replace(serving.ticket, addresses=(serving.ticket.addresses[0].__class__("127.0.0.1", 1),))
    content = job.client().pull(unreachable)  # so that it did not come by the network
    serving.kill()
    assert content == content_of(3 * RANGE)
    assert content.readonly
