"""What operators hear of addresses from which nothing comes: when, and when no more."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from orchestrator.certificates.authority import JobAuthority
from orchestrator.channel import client as hindrance
from orchestrator.channel.client import FORGOTTEN_S, HINDERED_S, ChannelClient, Hindrances, Pulling
from orchestrator.channel.endpoint import Endpoint, Membership, Terms
from orchestrator.channel.frames import Address, Ticket
from orchestrator.channel.stream import Guard
from orchestrator.errors import TransferError
from tests.channel.jobs import LOOPBACK, MIB, Job, by_way_of, content_of
from tests.waiting import wait_until

THERE = Address("10.0.0.2", 42_001)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_an_address_is_hindered_once_it_has_failed_for_long_enough_and_until_a_connection_stands() -> None:
    clock = Clock()
    hindrances = Hindrances(clock)
    hindrances.failed(THERE, "no answer")
    clock.now = HINDERED_S - 1
    hindrances.failed(THERE, "refused")
    assert not hindrances.current()
    clock.now = HINDERED_S
    assert [(one.address, one.reason) for one in hindrances.current()] == [(THERE, "refused")]
    hindrances.reached(THERE)
    assert not hindrances.current()
    hindrances.failed(THERE, "no answer")
    assert not hindrances.current(), "its time begins anew"


def test_an_address_of_which_nobody_wants_anything_any_more_is_forgotten() -> None:
    clock = Clock()
    hindrances = Hindrances(clock)
    hindrances.failed(THERE, "no answer")
    clock.now = FORGOTTEN_S
    assert not hindrances.current()
    hindrances.failed(THERE, "no answer")
    assert not hindrances.current(), "what was forgotten does not count"


def test_an_address_is_silent_when_all_streams_are_that_wait_for_it() -> None:
    clock = Clock()
    hindrances = Hindrances(clock)
    one, other = Guard(60.0, lambda: False, 0.0), Guard(60.0, lambda: False, 0.0)
    with hindrances.waiting(THERE, one), hindrances.waiting(THERE, other):
        clock.now = HINDERED_S
        assert [one.reason for one in hindrances.current()] == ["it is silent"]
        other.moved_at = 1.0
        assert not hindrances.current()
    other.moved_at = 0.0
    assert not hindrances.current(), "nobody waits"


@contextmanager
def pulling(client: ChannelClient, ticket: Ticket) -> Iterator[None]:
    def pull() -> None:
        try:
            client.pull(ticket)
        except TransferError:
            return

    thread = threading.Thread(target=pull)
    thread.start()
    yield
    client.close()
    thread.join()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hindrance, "HINDERED_S", 0.0)


@pytest.mark.usefixtures("at_once")
def test_a_port_that_refuses_is_hindered_while_a_pull_tries_it_and_no_more_when_it_answers(plain: Job) -> None:
    server, client = plain.server(), plain.client()
    server.serve("theta", content_of(MIB))
    with socket.create_server((LOOPBACK, 0)) as taken:
        closed = Address(LOOPBACK, taken.getsockname()[1])
    ticket = server.ticket("theta", "europe")
    with pulling(client, by_way_of(ticket, closed)):
        wait_until(client.hindrances.current)
        (found,) = client.hindrances.current()
        assert (found.address, found.reason) == (closed, "Connection refused")
    client.hindrances.reached(closed)
    assert not client.hindrances.current()


@pytest.mark.usefixtures("at_once")
def test_a_server_that_takes_connections_and_says_nothing_is_silent(job: Job) -> None:
    with socket.create_server((LOOPBACK, 0)) as silent:
        server, client = job.server(), job.client(pulling=Pulling(stall_s=60.0))
        server.serve("theta", content_of(MIB))
        address = Address(LOOPBACK, silent.getsockname()[1])
        with pulling(client, by_way_of(server.ticket("theta", "europe"), address)):
            wait_until(lambda: [one.reason for one in client.hindrances.current()] == ["it is silent"])


@pytest.mark.usefixtures("at_once")
def test_two_authorities_are_a_hindrance_of_its_own(secured: Job) -> None:
    server = secured.server()
    server.serve("theta", content_of(MIB))
    stranger = ChannelClient("europe", identity=JobAuthority.new("job").issue("europe"))
    with pytest.raises(TransferError):
        stranger.pull(by_way_of(server.ticket("theta", "europe"), server.address))
    assert [one.is_distrust for one in stranger.hindrances.current()] == [True]
    stranger.close()


@pytest.mark.parametrize(
    ("ports", "words"), [((0, 0), "set a range in transport.ports"), ((24_000, 24_999), "24000 to 24999")]
)
def test_operators_hear_from_where_to_where_by_which_ports(
    ports: tuple[int, int], words: str, at_once: Callable[[], None]
) -> None:
    endpoint = Endpoint(Membership("job", "europe:1", 1, Terms(ports=ports)), LOOPBACK)
    endpoint.client.hindrances.failed(THERE, "no answer")
    (said,) = endpoint.hindrances()
    assert f"{THERE} to {LOOPBACK} (no answer)" in said
    assert words in said
    assert endpoint.hindrances(THERE) == (said,)
    assert endpoint.hindrances(Address(LOOPBACK, 1)) == ()
    endpoint.client.hindrances.failed(THERE, "UNKNOWN_CA", is_distrust=True)
    assert "do not accept each other's certificates (UNKNOWN_CA)" in endpoint.hindrances()[0]
    endpoint.close()
