"""The throughput of the parameter channel over loopback: plain, under mutual TLS, and through shared memory.

The server is a process of its own, like an island's. Every figure is the best of several pulls of one payload, including
checksums. ``both`` is the processor time of the two processes in seconds per GB, ``client`` the receiver's part. ``GIL``
is the longest time that a thread which wakes every millisecond was held up in either process, in the pull where that was
least: a lock that is held is held in each pull, and a busy machine holds up only some. A plain copy of the same bytes in
this process shows which part of memory speed the channel reaches, whatever the machine.
"""

from __future__ import annotations

import multiprocessing
import resource
import threading
import time
from multiprocessing.connection import Connection

import numpy as np

from orchestrator.certificates import Identity
from orchestrator.certificates.authority import JobAuthority
from orchestrator.channel.client import ChannelClient
from orchestrator.channel.server import ChannelServer, Listening
from tests.bench.goals import Goal, at_least, at_most
from tests.bench.options import Options

GB_PER_SECOND_GOAL = 1.2
CLIENT_CPU_S_GOAL = 0.7
GIL_MS_GOAL = 20.0
SIZE_MB, SMALL_MB = 400, 8
REPEATS = 5
LOOPBACK = "127.0.0.1"
ISLAND = "europe"
WAYS = {"plain": (False, False), "mutual TLS": (True, False), "memory": (True, True)}
"""(With TLS, with shared memory)."""
GOALS = ("plain", "memory")
"""The ways that have a speed goal. TLS is for lines between machines, and limited by its cipher here."""


class Ticker:
    """The longest gap of a thread that wants to run every millisecond."""

    def __init__(self) -> None:
        self.longest_s, self._over = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Ticker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _tick(self) -> None:
        last = time.perf_counter()
        while not self._over.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            self.longest_s, last = max(self.longest_s, now - last), now


def cpu_s() -> float:
    """Return the processor time of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main(asked: Options) -> list[Goal]:
    size = (SMALL_MB if asked.small else SIZE_MB) * 1_000_000
    copied = copy_gb_per_second(size)
    return [goal for way, (tls, memory) in WAYS.items() for goal in measure(way, size, tls, memory, copied)]


def copy_gb_per_second(size: int) -> float:
    source, target = np.ones(size, np.uint8), np.empty(size, np.uint8)
    best_s = float("inf")
    for _ in range(REPEATS):
        began_at = time.perf_counter()
        np.copyto(target, source)
        best_s = min(best_s, time.perf_counter() - began_at)
    return size / 1e9 / best_s


def measure(way: str, size: int, tls: bool, memory: bool, copied: float) -> list[Goal]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    authority = JobAuthority.new("bench")
    identity = authority.issue("shard") if tls else None
    process = context.Process(target=_serve, args=(there, identity, size, memory), daemon=True)
    process.start()
    ticket = here.recv()
    client = ChannelClient(ISLAND, identity=authority.issue(ISLAND) if tls else None)
    client.pull(ticket)  # connections, windows, the sealed copy
    rows, gap_s = [], float("inf")
    for _ in range(REPEATS):
        here.send("begin")
        here.recv()
        before, began_at = cpu_s(), time.perf_counter()
        with Ticker() as ticker:
            client.pull(ticket)
            took_s = time.perf_counter() - began_at
        client_s = cpu_s() - before
        here.send("end")
        server_s, server_gap_s = here.recv()
        gb = size / 1e9
        rows.append((gb / took_s, (client_s + server_s) / gb, client_s / gb))
        gap_s = min(gap_s, max(ticker.longest_s, server_gap_s))
    client.close()
    here.send("over")
    process.join()
    speed = max(row[0] for row in rows)
    both, own = min(row[1] for row in rows), min(row[2] for row in rows)
    judged = [at_most(f"channel {way} GIL ms", 1000 * gap_s, GIL_MS_GOAL)]
    if way in GOALS:
        judged.append(at_least(f"channel {way} GB/s", speed, GB_PER_SECOND_GOAL))
        judged.append(at_most(f"channel {way} client cpu-s/GB", own, CLIENT_CPU_S_GOAL))
    print(f"channel    {way:<10} {size / 1e6:4.0f} MB  {speed:5.2f} GB/s ({speed / copied:.2f} of a copy)  ", end="")
    print(f"cpu-s/GB {both:.2f} both, {own:.2f} client  GIL {1000 * gap_s:.1f} ms  ({'; '.join(map(str, judged))})")
    return judged


def _serve(pipe: Connection, identity: Identity | None, size: int, memory: bool) -> None:
    listening = Listening(LOOPBACK, local_memory=memory)
    server = ChannelServer(listening, job="bench", epoch=1, secret=b"bench", identity=identity)
    server.serve("theta", np.random.default_rng(0).integers(0, 255, size, np.uint8).data)
    pipe.send(server.ticket("theta", ISLAND))
    while pipe.recv() == "begin":
        before = cpu_s()
        with Ticker() as ticker:
            pipe.send("ready")
            pipe.recv()
        pipe.send((cpu_s() - before, ticker.longest_s))
    server.close()
