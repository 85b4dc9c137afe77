"""Measure one line by a plain TCP connection: its round trip, and its speed each way.

    caller ──▶ key, answered by it           round trip: the best of several single bytes there and back
    caller ──▶ chunks, empty one, count ◀──  forth: bytes that arrived over the time until they were confirmed
    caller ◀── chunks, empty one             back: likewise

Bounded: no side moves more than ``bytes_max`` one way, sends longer than ``seconds_max``, or waits for the other longer
than ``SILENCE_S``. A connection without the right key is closed at once. What is measured includes TCP's slow start, so a
long fat line looks slower than it is to a transfer of gigabytes. This module knows neither Ray nor nodes.

It is apart from ``line_probe``, which runs as a program: Ray cannot pickle what an actor uses of ``__main__``.
"""

from __future__ import annotations

import hmac
import socket
import struct
import threading
import time
from dataclasses import dataclass

from orchestrator.channel.server import bound

KEY_BYTES = 16
PINGS = 8
CHUNK_BYTES = 64 << 10
SILENCE_S = 15.0
"""Longer than several lost packets in a row on a long line take to be sent again."""

TCP_NOTSENT_LOWAT = 25
"""Linux': a send waits while so much has not left yet, so that a thin line's sender sees its time pass."""

_CHUNK = struct.Struct("!I")
_COUNT = struct.Struct("!Q")


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of a measurement, each way."""

    bytes_max: int
    seconds_max: float


@dataclass(frozen=True, slots=True)
class Measured:
    """``forth`` is from who called to who answered."""

    round_trip_s: float
    forth_bits_per_second: float
    back_bits_per_second: float


class Answerer:
    """Answers measurements with the right key, one at a time, until ``close``."""

    def __init__(self, host: str, key: bytes, bounds: Bounds, ports: tuple[int, int] = (0, 0)) -> None:
        """Listens at ``host`` only, on a free one of these ports. Raises ConfigurationError where it cannot."""
        self._key, self._bounds = key, bounds
        self._listener = bound(host, ports)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, name="line-answerer", daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                return  # closed
            with caller:
                try:
                    self._answer(caller)
                except OSError:
                    continue  # the caller knows, and says so

    def _answer(self, caller: socket.socket) -> None:
        _prepare(caller)
        if not hmac.compare_digest(_exactly(caller, KEY_BYTES), self._key):
            return
        caller.sendall(self._key)
        for _ in range(PINGS):
            caller.sendall(_exactly(caller, 1))
        caller.sendall(_COUNT.pack(_receive(caller, self._bounds)))
        _send(caller, self._bounds)


def measured(host: str, port: int, key: bytes, bounds: Bounds) -> Measured:
    """Measure the line to the answerer there. Raises OSError where nothing comes through, or nobody answers."""
    with socket.create_connection((host, port), timeout=SILENCE_S) as line:
        _introduced(line, key)
        round_trip = min(_ping(line) for _ in range(PINGS))
        began = time.perf_counter()
        sent = _send(line, bounds)
        (arrived,) = _COUNT.unpack(_exactly(line, _COUNT.size))
        forth = time.perf_counter() - began - round_trip
        if arrived != sent:
            raise ConnectionError(f"{arrived} of {sent} bytes arrived")
        began = time.perf_counter()
        received = _receive(line, bounds)
        back = time.perf_counter() - began
        return Measured(round_trip, _speed(sent, forth), _speed(received, back))


def reach(host: str, port: int, key: bytes) -> None:
    """Find the answerer there. Raises OSError where nothing comes through, or somebody else answers."""
    with socket.create_connection((host, port), timeout=SILENCE_S) as line:
        _introduced(line, key)


def _introduced(line: socket.socket, key: bytes) -> None:
    _prepare(line)
    line.sendall(key)
    if _exactly(line, KEY_BYTES) != key:
        raise ConnectionError("another program answers there")


def _ping(line: socket.socket) -> float:
    began = time.perf_counter()
    line.sendall(b"\0")
    _exactly(line, 1)
    return time.perf_counter() - began


def _speed(byte_count: int, seconds: float) -> float:
    return 8.0 * byte_count / max(seconds, 1e-6)


def _prepare(line: socket.socket) -> None:
    line.settimeout(SILENCE_S)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, 2 * CHUNK_BYTES)


def _send(line: socket.socket, bounds: Bounds) -> int:
    """Send chunks until bytes or time are spent, then an empty one; returns how many bytes. One chunk is always sent."""
    chunk = bytes(CHUNK_BYTES)
    deadline, sent = time.perf_counter() + bounds.seconds_max, 0
    while sent == 0 or (sent + CHUNK_BYTES <= bounds.bytes_max and time.perf_counter() < deadline):
        line.sendall(_CHUNK.pack(CHUNK_BYTES) + chunk)
        sent += CHUNK_BYTES
    line.sendall(_CHUNK.pack(0))
    return sent


def _receive(line: socket.socket, bounds: Bounds) -> int:
    received = 0
    while size := _CHUNK.unpack(_exactly(line, _CHUNK.size))[0]:
        received += size
        if size > CHUNK_BYTES or received > max(bounds.bytes_max, CHUNK_BYTES):
            raise ConnectionError("more was sent than agreed")
        _exactly(line, size)
    return received


def _exactly(line: socket.socket, size: int) -> bytes:
    content = bytearray(size)
    view, at = memoryview(content), 0
    while at < size:
        count = line.recv_into(view[at:])
        if not count:
            raise ConnectionError("the connection ended")
        at += count
    return bytes(content)
