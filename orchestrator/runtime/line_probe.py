"""The lines between the node groups of a running cluster, measured for `atoll doctor --lines`.

    python -m orchestrator.runtime.line_probe --home .atoll [--ports 24000 24999]

    one JSON object a line on stdout, for each line measured

One short-lived actor on one node of every group, and one on the head, answer and call each other beside Ray, over a plain
TCP connection (``line_measurement``), one line at a time so that none slows another. They book nothing and end with this
process. Each object has ``one``, ``other``, and either ``round_trip_s`` and ``forth_bits_per_second``,
``back_bits_per_second``, or ``problem``. Exit codes: 0 measured, 1 there is no cluster to measure.

The measurement of one line by a plain TCP connection: its round trip, and its speed each way.

    caller ──▶ key, answered by it           round trip: the best of several single bytes there and back
    caller ──▶ chunks, empty one, count ◀──  forth: bytes that arrived over the time until they were confirmed
    caller ◀── chunks, empty one             back: likewise

Bounded: no side moves more than ``bytes_max`` one way, sends longer than ``seconds_max``, or waits for the other longer
than ``SILENCE_S``. A connection without the right key is closed at once. What is measured includes TCP's slow start, so a
long fat line looks slower than it is to a transfer of gigabytes. Refuses to know Ray, nodes, and who wants to know.
"""

from __future__ import annotations

import argparse
import hmac
import itertools
import json
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from orchestrator.channel.server import bound
from orchestrator.errors import AtollError, first_line
from orchestrator.runtime import cluster
from orchestrator.runtime.settings import CONTROL_GROUP, GROUP_LABEL

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
        raise ConnectionError("somebody else answers there")


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


START_TIMEOUT_S = 60.0
MEASURE_TIMEOUT_S = 60.0
BOUNDS = Bounds(bytes_max=4 << 20, seconds_max=2.0)
REMEDY = "Let TCP through between these addresses, both ways, on transport.ports"
ALL_PAIRS_MAX = 8
"""Of node groups: beyond that only their lines to the head are measured, which are those that parameters take."""


class LineProbe:
    """On one node: the answering end of lines to it, and the calling end of lines from it."""

    def __init__(self, host: str, key: bytes, ports: tuple[int, int]) -> None:
        self._key, self._host = key, host
        self._answerer = Answerer(host, key, BOUNDS, ports)

    def address(self) -> tuple[str, int]:
        return self._host, self._answerer.port

    def measure(self, host: str, port: int) -> dict[str, Any]:
        """The line from here to the probe there, or what is in its way."""
        try:
            return asdict(measured(host, port, self._key, BOUNDS))
        except OSError as error:
            return {"problem": self._problem(host, port, error)}

    def problem(self, host: str, port: int) -> str | None:
        """Return what prevents connections from here to the probe there; None if nothing does."""
        try:
            reach(host, port, self._key)
        except OSError as error:
            return self._problem(host, port, error)
        return None

    def _problem(self, host: str, port: int, error: OSError) -> str:
        return f"nothing comes through from {self._host} to {host}:{port}: {first_line(error)}. {REMEDY}"


def lines(ports: tuple[int, int]) -> Iterator[dict[str, Any]]:
    """Measure the head's line to every node group, then those between groups. This process has joined the cluster.

    Probes answer on ``ports``, as a job's processes do on those of its specification; each must reach the other.
    """
    import ray

    key = secrets.token_bytes(KEY_BYTES)
    places = _places(ray.nodes(), cluster.node_reaches())
    probes = {group: _probe(node, host, key, ports) for group, (node, host) in places.items()}
    addresses: dict[str, tuple[str, int]] = {}
    problems: dict[str, str] = {}
    for group, probe in probes.items():
        try:
            addresses[group] = ray.get(probe.address.remote(), timeout=START_TIMEOUT_S)
        except (ray.exceptions.RayError, TimeoutError) as error:
            problems[group] = f"no process could be started on a node of {group}: {_reason_of(error)}"
    for one, other in _pairs(list(places)):
        problem = problems.get(one) or problems.get(other)
        figures: dict[str, Any] = {"problem": problem}
        if not problem:
            try:
                figures = ray.get(probes[one].measure.remote(*addresses[other]), timeout=MEASURE_TIMEOUT_S)
                back = ray.get(probes[other].problem.remote(*addresses[one]), timeout=MEASURE_TIMEOUT_S)
                figures = {"problem": back} if back and not figures.get("problem") else figures
            except (ray.exceptions.RayError, TimeoutError) as error:
                figures = {"problem": f"no answer from {one}: {type(error).__name__}"}
        yield {"one": one, "other": other, **figures}
    for probe in probes.values():
        ray.kill(probe)


def _places(nodes: list[Mapping[str, Any]], reaches: Mapping[str, cluster.Reach]) -> dict[str, tuple[str, str]]:
    """Return the id and address of one living node of each group, the head's group first; a node in reach, if one is."""
    places: dict[str, tuple[str, str]] = {}

    def rank(entry: Mapping[str, Any]) -> tuple[bool, str]:
        return reaches.get(entry["NodeID"]) is not cluster.Reach.TAKEN, str(entry["NodeID"])

    for entry in sorted(nodes, key=rank):
        group = entry.get("Labels", {}).get(GROUP_LABEL, "")
        if entry["Alive"] and group:
            places.setdefault(group, (entry["NodeID"], entry["NodeManagerAddress"]))
    return {group: places[group] for group in sorted(places, key=lambda group: (group != CONTROL_GROUP, group))}


def _pairs(groups: list[str]) -> list[tuple[str, str]]:
    pairs = list(itertools.combinations(groups, 2))
    return pairs if len(groups) <= ALL_PAIRS_MAX + 1 else [pair for pair in pairs if pair[0] == CONTROL_GROUP]


def _probe(node: str, host: str, key: bytes, ports: tuple[int, int]) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    options = {**cluster.NEXT_TO_NOTHING, "scheduling_strategy": strategy}
    return ray.remote(LineProbe).options(**options).remote(host, key, ports)


def _reason_of(error: Exception) -> str:
    """Return what the probe said, or else the kind of its failure."""
    cause = getattr(error, "cause", None)
    return first_line(cause) if isinstance(cause, AtollError) else type(error).__name__


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The lines between node groups, as JSON.")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--ports", type=int, nargs=2, default=(0, 0))
    options = parser.parse_args(arguments)
    try:
        cluster.join(options.home)
        for line in lines(tuple(options.ports)):
            print(json.dumps(line), flush=True)
    except AtollError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        cluster.leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
