"""Whoever else finds the port: garbage, silence, slowness, crowds. The job's own pulls go on."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

import pytest

from orchestrator.channel.client import ChannelClient, Pulling
from orchestrator.channel.frames import Address
from orchestrator.channel.server import UNPROVEN_MAX, ChannelServer, Listening
from orchestrator.errors import TransferError, TransferStalled
from tests.channel.jobs import ISLAND, LOOPBACK, RANGE, Job, by_way_of, connection_count, content_of
from tests.waiting import wait_until

CROWD = Listening(LOOPBACK).connections_max + 2 * UNPROVEN_MAX
"""More than a server attends to at all."""
GARBAGE = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 10,
    "zeros": bytes(10_000),
    "a TLS hello of another kind": b"\x16\x03\x01\x02\x00" + bytes(1000),
    "a request of huge numbers": b"aTc1" + b"\xff" * 24 + b"\xff\xff\xff" + bytes(32) + b"\xff" * 765,
    "names that are no text": b"aTc1" + bytes(24) + b"\x02\x02\x02" + bytes(32) + b"\xff" * 6,
    "a request that ends early": b"aTc1" + bytes(5),
}


def dial(server: ChannelServer) -> socket.socket:
    return socket.create_connection((server.address.host, server.address.port))


def require_unharmed(server: ChannelServer, client: ChannelClient) -> None:
    server.serve("theta", content_of(RANGE + 1))
    assert client.pull(server.ticket("theta", ISLAND)) == content_of(RANGE + 1)


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_gets_no_payload_and_its_connection_ends(job: Job, kind: str) -> None:
    server, client = job.server(), job.client()
    with dial(server) as connection:
        with suppress(OSError):
            connection.sendall(GARBAGE[kind])
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        with suppress(OSError):
            while part := connection.recv(4096):
                answer += part
    assert len(answer) < 2000
    require_unharmed(server, client)
    client.close()
    wait_until(lambda: connection_count(server) == 0, "its connection has ended")


def test_thousands_of_silent_connections_keep_nobody_out(job: Job) -> None:
    server, client = job.server(), job.client()
    for _ in range(1000):
        with suppress(OSError):
            dial(server).close()
    crowd = []
    for _ in range(CROWD):
        with suppress(OSError):
            crowd.append(dial(server))
    require_unharmed(server, client)
    assert connection_count(server) <= UNPROVEN_MAX + Listening(LOOPBACK).connections_max
    for connection in crowd:
        connection.close()


def test_who_sends_its_request_byte_by_byte_holds_up_only_itself(plain: Job) -> None:
    server, client = plain.server(), plain.client()
    over = threading.Event()

    def trickle() -> None:
        with dial(server) as connection, suppress(OSError):
            for byte in b"aTc1" + bytes(60):
                connection.sendall(bytes([byte]))
                if over.wait(0.02):
                    return

    threads = [threading.Thread(target=trickle) for _ in range(20)]
    for thread in threads:
        thread.start()
    require_unharmed(server, client)
    over.set()
    for thread in threads:
        thread.join()


def test_a_client_that_takes_nothing_is_let_go_and_costs_no_memory(plain: Job) -> None:
    server = plain.server(Listening(LOOPBACK, stall_s=0.3, local_memory=False))
    server.serve("theta", content_of(4 * RANGE))
    ticket = server.ticket("theta", ISLAND)
    credential = ticket.credential
    names = [name.encode() for name in (credential.job, credential.island, credential.payload)]
    lengths = [len(name) for name in names]
    request = struct.pack("!4sQQQBBB32s", b"aTc1", 0, RANGE, credential.epoch, *lengths, credential.mac)
    with dial(server) as connection:
        connection.sendall((request + b"".join(names)) * 4)
        wait_until(lambda: connection_count(server) == 1, "it is connected")
        wait_until(lambda: connection_count(server) == 0, "it was let go")


@pytest.mark.parametrize("connections_max", [1, 2])
def test_more_clients_than_there_is_room_for_come_one_after_another(plain: Job, connections_max: int) -> None:
    server = plain.server(Listening(LOOPBACK, connections_max=connections_max, local_memory=False))
    server.serve("theta", content_of(RANGE))
    for _ in range(4):
        client = ChannelClient(ISLAND)
        assert client.pull(server.ticket("theta", ISLAND)) == content_of(RANGE)
        client.close()


HOSTILE_REPLIES = {
    "another size": struct.pack("!4sBIQ", b"aTc1", 0, 0, 1 << 62),
    "an endless reason": struct.pack("!4sBIQ", b"aTc1", 1, 0, 1 << 62),
    "an unknown status": struct.pack("!4sBIQ", b"aTc1", 9, 0, 0),
    "another protocol": b"HTTP/1.1 200 OK\r\n\r\n",
    "nothing": b"",
}


@pytest.mark.parametrize("kind", HOSTILE_REPLIES)
def test_a_server_that_answers_nonsense_makes_the_pull_fail_and_nothing_else(plain: Job, kind: str) -> None:
    server = plain.server()
    server.serve("theta", content_of(RANGE))
    with Impostor(lambda connection: connection.sendall(HOSTILE_REPLIES[kind])) as address:
        client = plain.client(pulling=Pulling(stall_s=0.3))
        with pytest.raises(TransferError):
            client.pull(by_way_of(server.ticket("theta", ISLAND), address))


def test_a_server_that_never_answers_is_a_stall(plain: Job) -> None:
    server = plain.server()
    server.serve("theta", content_of(RANGE))
    over = threading.Event()
    with Impostor(lambda _connection: over.wait()) as address:
        with pytest.raises(TransferStalled):
            plain.client(pulling=Pulling(stall_s=0.3)).pull(by_way_of(server.ticket("theta", ISLAND), address))
        over.set()


class Impostor:
    """Answers each connection with ``answer`` and closes it."""

    def __init__(self, answer: Callable[[socket.socket], object]) -> None:
        self._answer = answer
        self._listener = socket.create_server((LOOPBACK, 0))

    def __enter__(self) -> Address:
        threading.Thread(target=self._accept, daemon=True).start()
        return Address(LOOPBACK, self._listener.getsockname()[1])

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._attend, args=(connection,), daemon=True).start()

    def _attend(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(4096)
            self._answer(connection)
