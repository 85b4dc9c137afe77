"""The throughput of the parameter channel over a long fat line: 1 Gbit/s, 100 ms round trip. Needs root.

Two regions of ``tests/wan`` have tbf at both ends and a relay that delays. The same run also measures sockets that only
send and receive, over as many connections, on the same line, plain and as ``ssl.SSLSocket`` with the same certificates: the
most that the line, the relay and this machine can give. Shares are of the payload, so headers (4.5 %) and slow start count
as losses. A pull is measured on new connections (*cold*) and on established ones (*warm*).

The goal is a part of what bare sockets reach, the better of both pulls of each. The share of the line is printed beside it.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
SOCKETS_SHARE_GOAL = 0.9
"""Relative to bare sockets on the same line, in the same run."""
SIZE_MB, SMALL_MB = 1_000, 4
HERE, THERE = "here", "there"
PROGRAMS = ("ip", "tc", "bridge", "nsenter", "gcc")
CLONE_NEWNET = 0x40000000
ISLAND = "europe"
SOCKETS, TLS_SOCKETS, PLAIN, TLS = "sockets", "TLS sockets", "plain", "mutual TLS"
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
        shares = {way: measure(regions, way, size) for way in (SOCKETS, TLS_SOCKETS, PLAIN, TLS)}
    finally:
        regions.close()
    judged = []
    for way in (PLAIN, TLS):
        goal = at_least(f"channel-line {way}, of bare sockets", shares[way] / shares[SOCKETS], SOCKETS_SHARE_GOAL)
        print(f"channel-line {way:<11} {goal.value:.2f} of bare sockets ({goal})")
        judged.append(goal)
    print(f"channel-line {TLS:<11} {shares[TLS] / shares[TLS_SOCKETS]:.2f} of TLS sockets")
    return judged


def measure(regions: Regions, way: str, size: int) -> float:
    """Return the better share of the line of two pulls."""
    authority = JobAuthority.new("bench")
    identities = [authority.issue(name) if way in (TLS, TLS_SOCKETS) else None for name in ("shard", ISLAND)]
    serve, pull = (_send_sockets, _receive_sockets) if way in (SOCKETS, TLS_SOCKETS) else (_serve, _pull)
    server, client = (_Process(regions, name, work) for name, work in ((THERE, serve), (HERE, pull)))
    server.pipe.send((regions.address(THERE), identities[0], size))
    client.pipe.send((server.pipe.recv(), identities[1], size))
    rows = [client.pipe.recv() for _ in ("cold", "warm")]
    for process in (client, server):
        process.end()
    cold, warm = (8 * size / took_s / BITS_PER_SECOND for took_s, _ in rows)
    print(f"channel-line {way:<11} {size / 1e6:5.0f} MB  share of the line {cold:.3f} cold, {warm:.3f} warm  ", end="")
    print(f"cpu-s/GB {min(cpu for _, cpu in rows) / size * 1e9:.2f} client")
    return max(cold, warm)


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
    host, identity, size = pipe.recv()
    context = identity.context(server_side=True) if identity else None
    listener = socket.create_server((host, 0), backlog=64)
    content = memoryview(bytearray(PIECE_BYTES))
    pipe.send(listener.getsockname())
    senders = []
    for _ in range(STREAMS):
        arguments = (listener.accept()[0], context, content, size // STREAMS)
        senders.append(threading.Thread(target=_send, args=arguments))
        senders[-1].start()
    for sender in senders:
        sender.join()
    pipe.recv()


def _send(connection: socket.socket, context: ssl.SSLContext | None, content: memoryview, size: int) -> None:
    """Send so many bytes for every byte that arrives."""
    with context.wrap_socket(connection, server_side=True) if context else connection as stream:
        while stream.recv(1):
            for at in range(0, size, PIECE_BYTES):
                stream.sendall(content[: min(PIECE_BYTES, size - at)])


def _receive_sockets(pipe: Connection) -> None:
    address, identity, size = pipe.recv()
    context = identity.context(server_side=False) if identity else None
    streams: dict[int, socket.socket] = {}

    def receive(number: int) -> None:
        if number not in streams:
            connection = socket.create_connection(address)
            streams[number] = context.wrap_socket(connection) if context else connection
        streams[number].sendall(b"!")
        into, missing = memoryview(bytearray(PIECE_BYTES)), size // STREAMS
        while missing:
            count = streams[number].recv_into(into[:missing])
            if not count:
                raise ConnectionError(f"socket {number} ended {missing} bytes too early")
            missing -= count

    def pull() -> None:
        with ThreadPoolExecutor(STREAMS) as threads:
            list(threads.map(receive, range(STREAMS)))

    _measured_twice(pipe, pull)
    for stream in streams.values():
        stream.close()


def _measured_twice(pipe: Connection, pull: Callable[[], Any]) -> None:
    for _ in ("cold", "warm"):
        before, began_at = cpu_s(), time.perf_counter()
        pull()
        pipe.send((time.perf_counter() - began_at, cpu_s() - before))
    pipe.recv()
