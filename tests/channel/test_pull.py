"""What is pulled is what is served, by every way and at every size; what cannot be is refused before a byte moves."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from orchestrator.channel.client import ChannelClient, Pulling
from orchestrator.channel.frames import MIB, RANGE_BYTES_MAX, RANGE_BYTES_MIN, Reception, range_bytes_of
from orchestrator.channel.server import ChannelServer, Listening
from orchestrator.errors import ConfigurationError, PayloadWithdrawn, TransferCancelled, TransferRefused
from tests.channel.jobs import FAR, ISLAND, LOOPBACK, NEAR, RANGE, Job, connection_count, content_of

SIZES = [0, 1, 64 << 10, (64 << 10) + 1, RANGE - 1, RANGE, RANGE + 1, 5 * RANGE + 17]
WAYS = ["network", "memory of the machine"]


def ends(job: Job, way: str) -> tuple[ChannelServer, ChannelClient]:
    return job.server(FAR if way == "network" else NEAR), job.client()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", SIZES)
def test_what_is_pulled_is_what_is_served(job: Job, way: str, size: int) -> None:
    server, client = ends(job, way)
    content = content_of(size)
    server.serve("theta", content)
    assert client.pull(server.ticket("theta", ISLAND)) == content


@pytest.mark.parametrize("way", WAYS)
def test_it_comes_into_the_buffer_that_is_passed(plain: Job, way: str) -> None:
    server, client = ends(plain, way)
    content, into = content_of(RANGE + 5), bytearray(RANGE + 5)
    server.serve("theta", content)
    assert client.pull(server.ticket("theta", ISLAND), memoryview(into)) == content == into


@pytest.mark.parametrize("way", WAYS)
def test_a_newer_content_of_a_name_takes_the_place_of_the_older(plain: Job, way: str) -> None:
    server, client = ends(plain, way)
    server.serve("theta", content_of(RANGE, seed=1))
    assert client.pull(server.ticket("theta", ISLAND)) == content_of(RANGE, seed=1)
    server.serve("theta", content_of(RANGE, seed=2))
    assert client.pull(server.ticket("theta", ISLAND)) == content_of(RANGE, seed=2)


@pytest.mark.parametrize("way", WAYS)
def test_what_was_withdrawn_has_no_ticket_and_older_tickets_say_so(plain: Job, way: str) -> None:
    server, client = ends(plain, way)
    server.serve("theta", content_of(10))
    ticket = server.ticket("theta", ISLAND)
    server.withdraw("theta")
    with pytest.raises(PayloadWithdrawn):
        server.ticket("theta", ISLAND)
    with pytest.raises(PayloadWithdrawn):
        client.pull(ticket)


@pytest.mark.parametrize("way", WAYS)
def test_nothing_comes_that_nobody_wants(plain: Job, way: str) -> None:
    server, client = ends(plain, way)
    server.serve("theta", content_of(RANGE))
    with pytest.raises(TransferCancelled):
        client.pull(server.ticket("theta", ISLAND), abandoned=lambda: True)


def test_many_pull_at_once(job: Job) -> None:
    server, client = job.server(), job.client()
    contents = {f"p{number}": content_of(RANGE + number, seed=number) for number in range(8)}
    for payload, content in contents.items():
        server.serve(payload, content)
    results: dict[str, bool] = {}

    def pull(payload: str) -> None:
        results[payload] = client.pull(server.ticket(payload, ISLAND)) == contents[payload]

    threads = [threading.Thread(target=pull, args=(payload,)) for payload in contents for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(contents, True)


def test_connections_serve_one_pull_after_another(job: Job) -> None:
    server, client = job.server(), job.client()
    server.serve("theta", content_of(3 * RANGE))
    for _ in range(5):
        client.pull(server.ticket("theta", ISLAND))
    assert connection_count(server) <= Pulling().streams


def test_the_budget_bounds_what_is_under_way_and_more_than_all_of_it_goes_alone(plain: Job) -> None:
    server, client = plain.server(), plain.client(pulling=Pulling(bytes_max=RANGE))
    server.serve("theta", content_of(3 * RANGE))
    threads = [threading.Thread(target=client.pull, args=(server.ticket("theta", ISLAND),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert client.pull(server.ticket("theta", ISLAND)) == content_of(3 * RANGE)


def test_ranges_grow_with_the_payload_between_4_and_16_mib() -> None:
    assert range_bytes_of(0) == range_bytes_of(256 * MIB) == RANGE_BYTES_MIN
    assert range_bytes_of(512 * MIB) == 8 * MIB
    assert range_bytes_of(1 << 40) == RANGE_BYTES_MAX


def test_a_ticket_whose_numbers_cannot_be_is_refused_before_memory_is_taken(plain: Job) -> None:
    server, client = plain.server(), plain.client(pulling=Pulling(payload_bytes_max=1 << 30))
    server.serve("theta", content_of(10))
    ticket = server.ticket("theta", ISLAND)
    for impossible in (
        replace(ticket, size=1 << 60),
        replace(ticket, size=-1),
        replace(ticket, range_bytes=0),
        replace(ticket, addresses=()),
    ):
        with pytest.raises(TransferRefused, match="the maximum is"):
            client.pull(impossible)


def test_a_buffer_of_another_size_is_an_error_of_the_caller(plain: Job) -> None:
    server = plain.server()
    server.serve("theta", content_of(10))
    with pytest.raises(ValueError, match="10 bytes, but the buffer has 9"):
        Reception(server.ticket("theta", ISLAND), memoryview(bytearray(9)))


def test_a_server_takes_a_port_of_its_range_on_its_address_alone(plain: Job) -> None:
    first = plain.server(Listening(LOOPBACK, local_memory=False))
    port = first.address.port
    with pytest.raises(ConfigurationError, match=f"No port from {port} to {port}"):
        ChannelServer(Listening(LOOPBACK, ports=(port, port)), job="job", epoch=1, secret=b"")
    beside = plain.server(Listening("127.0.0.2", ports=(port, port)))
    assert beside.address.port == port
