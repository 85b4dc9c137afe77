"""The throughput of the parameter channel over a long fat line: 1 Gbit/s, 100 ms round trip. Needs root.

Two regions of ``tests/wan`` have tbf at both ends and a relay that delays. The same run also measures sockets that only
send and receive, over as many connections, on the same line: the most that the line, the relay and this machine can give.
Shares are of the payload, so headers (4.5 %) and slow start count as losses. A pull is measured on new connections
(*cold*) and on established ones (*warm*).
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from orchestrator.certificates.authority import JobAuthority
from orchestrator.channel.client import ChannelClient, Pulling
from orchestrator.channel.server import ChannelServer, Listening
from tests.bench.channel import cpu_s
from tests.bench.goals import Goal, at_least
from tests.bench.options import Options
from tests.wan.line import Line
from tests.wan.regions import Regions

BITS_PER_SECOND, ROUND_TRIP_S = 1e9, 0.1
SHARE_GOAL = 0.9
SIZE_MB, SMALL_MB = 1_000, 4
HERE, THERE = "here", "there"
PROGRAMS = ("ip", "tc", "bridge", "nsenter", "gcc")
CLONE_NEWNET = 0x40000000
ISLAND = "europe"
SOCKETS, PLAIN, TLS = "sockets", "plain", "mutual TLS"
PIECE_BYTES = 1 << 20
STREAMS = Pulling().streams


def main(asked: Options) -> list[Goal]:
    if os.geteuid() != 0 or not all(map(shutil.which, PROGRAMS)):
        print(f"channel-line not measured: it needs root, and {', '.join(PROGRAMS)}")
        return []
    size = (SMALL_MB if asked.small else SIZE_MB) * 1_000_000
    line = Line(BITS_PER_SECOND, ROUND_TRIP_S / 4)
    regions = Regions((HERE, THERE), {HERE: line, THERE: line})
    try:
        return [goal for way in (SOCKETS, PLAIN, TLS) for goal in measure(regions, way, size)]
    finally:
        regions.close()


def measure(regions: Regions, way: str, size: int) -> list[Goal]:
    authority = JobAuthority.new("bench")
    identities = [authority.issue(name) if way == TLS else None for name in ("shard", ISLAND)]
    serve, pull = (_send_sockets, _receive_sockets) if way == SOCKETS else (_serve, _pull)
    server, client = (_Process(regions, name, work) for name, work in ((THERE, serve), (HERE, pull)))
    server.pipe.send((regions.address(THERE), identities[0], size))
    client.pipe.send((server.pipe.recv(), identities[1], size))
    rows = [client.pipe.recv() for _ in ("cold", "warm")]
    for process in (client, server):
        process.end()
    cold, warm = (8 * size / took_s / BITS_PER_SECOND for took_s, _ in rows)
    judged = [] if way == SOCKETS else [at_least(f"channel-line {way} share", max(cold, warm), SHARE_GOAL)]
    print(f"channel-line {way:<10} {size / 1e6:5.0f} MB  share of the line {cold:.3f} cold, {warm:.3f} warm  ", end="")
    print(f"cpu-s/GB {min(cpu for _, cpu in rows) / size * 1e9:.2f} client  ({'; '.join(map(str, judged))})")
    return judged


class _Process:
    """A process in a region. ``work`` gets the other end of ``pipe``."""

    def __init__(self, regions: Regions, name: str, work: Callable[[Connection], None]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, there = context.Pipe()
        arguments = (f"/run/netns/{regions.space(name)}", work, there)
        self._process = context.Process(target=enter, args=arguments, daemon=True)
        self._process.start()

    def end(self) -> None:
        self.pipe.send("over")
        self._process.join()


def enter(space: str, work: Callable[[Any], None], pipe: Any) -> None:
    """Do the work in this network namespace."""
    descriptor = os.open(space, os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), space)
    os.close(descriptor)
    work(pipe)


def _serve(pipe: Connection) -> None:
    host, identity, size = pipe.recv()
    server = ChannelServer(
        Listening(host, local_memory=False), job="bench", epoch=1, secret=b"bench", identity=identity
    )
    server.serve("theta", np.random.default_rng(0).integers(0, 255, size, np.uint8).data)
    pipe.send(server.ticket("theta", ISLAND))
    pipe.recv()
    server.close()


def _pull(pipe: Connection) -> None:
    ticket, identity, size = pipe.recv()
    client = ChannelClient(ISLAND, identity=identity)
    into = memoryview(np.zeros(size, np.uint8)).cast("B")
    _measured_twice(pipe, lambda: client.pull(ticket, into))
    client.close()


def _send_sockets(pipe: Connection) -> None:
    host, _, size = pipe.recv()
    listener = socket.create_server((host, 0), backlog=64)
    content = memoryview(bytearray(PIECE_BYTES))
    pipe.send(listener.getsockname())
    for _ in ("cold", "warm"):
        senders = []
        for _ in range(STREAMS):
            connection, _ = listener.accept()
            senders.append(threading.Thread(target=_send, args=(connection, content, size // STREAMS)))
            senders[-1].start()
        for sender in senders:
            sender.join()
    pipe.recv()


def _send(connection: socket.socket, content: memoryview, size: int) -> None:
    with connection:
        for at in range(0, size, PIECE_BYTES):
            connection.sendall(content[: min(PIECE_BYTES, size - at)])


def _receive_sockets(pipe: Connection) -> None:
    address, _, _ = pipe.recv()

    def receive() -> None:
        into = memoryview(bytearray(PIECE_BYTES))
        with socket.create_connection(address) as connection:
            while connection.recv_into(into):
                pass

    def pull() -> None:
        receivers = [threading.Thread(target=receive) for _ in range(STREAMS)]
        for receiver in receivers:
            receiver.start()
        for receiver in receivers:
            receiver.join()

    _measured_twice(pipe, pull)


def _measured_twice(pipe: Connection, pull: Callable[[], Any]) -> None:
    for _ in ("cold", "warm"):
        before, began_at = cpu_s(), time.perf_counter()
        pull()
        pipe.send((time.perf_counter() - began_at, cpu_s() - before))
    pipe.recv()
