"""The bytes per second that several shards merge on lines of their own, against one shard. Needs root.

Each shard is a process in a region of ``tests/wan`` with a line of 5 Mbit/s, a journal and an end of the channel. The
processes of two islands are in a region without a limit. For each fragment, a thread has the shard pull one offer of each
island, merge and journal them, and has each island pull the publication. The work is the same for one shard and for four:
16 fragments. Contents are int8 both ways.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from orchestrator.channel.endpoint import Carried, Endpoint, Membership, Terms
from orchestrator.channel.frames import SHARD
from orchestrator.core.effects import MergeFragment
from orchestrator.core.vocabulary import CloseReason, Epoch, FragmentId, IslandId, PayloadId, Version, WeightedPayload
from orchestrator.parameters import wire_format
from orchestrator.parameters.fragment_map import dealt
from orchestrator.parameters.journal import Journal
from orchestrator.parameters.outer_optimizer import Nesterov
from orchestrator.parameters.outer_state import Averaging, OuterStep, initial_state
from orchestrator.parameters.shard import Held, ParameterShard
from orchestrator.runtime.shard_worker import LocalShard
from tests.bench.channel_line import PROGRAMS, enter
from tests.bench.goals import Goal, at_least
from tests.bench.options import Options
from tests.wan.line import Line
from tests.wan.regions import Regions

BITS_PER_SECOND = 5e6
FRAGMENTS, SHARDS, ISLANDS, ROUNDS = 16, 4, ("a", "b"), 3
SIZE, SMALL_SIZE = 200_000, 20_000
"""Parameters of a fragment."""
RATIO_GOAL = 3.6
AWAY = "islands"


def main(asked: Options) -> list[Goal]:
    if os.geteuid() != 0 or not all(map(shutil.which, PROGRAMS)):
        print(f"shard-lines not measured: it needs root, and {', '.join(PROGRAMS)}")
        return []
    size, rounds = (SMALL_SIZE, 1) if asked.small else (SIZE, ROUNDS)
    one, several = (merged_bytes_per_second(count, size, rounds) for count in (1, SHARDS))
    goal = at_least(f"shard-lines {SHARDS} shards against one", several / one, RATIO_GOAL)
    print(
        f"shard-lines {FRAGMENTS} fragments of {size / 1e6:g}M parameters, {len(ISLANDS)} islands, int8, lines of "
        f"{BITS_PER_SECOND / 1e6:g} Mbit/s: one shard {one / 1e6:.2f} MB/s merged, {SHARDS} shards {several / 1e6:.2f} "
        f"MB/s, {several / one:.2f} times ({goal})"
    )
    return [goal]


def merged_bytes_per_second(shard_count: int, size: int, rounds: int) -> float:
    """Return the bytes of offers that so many shards merge per second, the publications pulled."""
    names = [f"shard-{number}" for number in range(shard_count)]
    regions = Regions((AWAY, *names), {name: Line(BITS_PER_SECOND) for name in names})
    context, processes, threads = multiprocessing.get_context("spawn"), [], []
    merged: list[int] = []
    with tempfile.TemporaryDirectory(prefix="atoll-bench-", dir=Path.cwd()) as folder:
        try:
            for name, fragments in zip(names, dealt([size] * FRAGMENTS, shard_count), strict=True):
                for region, work in ((name, _shard), (AWAY, _islands)):
                    pipes = [context.Pipe() for _ in fragments]
                    there = ([far for _, far in pipes], regions.address(region), fragments, size, f"{folder}/{name}")
                    space = f"/run/netns/{regions.space(region)}"
                    processes.append(context.Process(target=enter, args=(space, work, there), daemon=True))
                    processes[-1].start()
                    for _, far in pipes:
                        far.close()  # so that the end of a process is an error here
                    threads.append([near for near, _ in pipes])
            for near in (near for own in threads for near in own):
                near.recv()  # it is ready
            pairs = [pair for n in range(shard_count) for pair in zip(threads[2 * n], threads[2 * n + 1], strict=True)]
            drivers = [
                threading.Thread(target=lambda pair=pair: merged.append(_drive(*pair, rounds))) for pair in pairs
            ]
            began = perf_counter()
            for driver in drivers:
                driver.start()
            for driver in drivers:
                driver.join()
            took_s = perf_counter() - began
            for near in (near for own in threads for near in own):
                near.send(None)
            for process in processes:
                process.join()
        finally:
            regions.close()
    assert len(merged) == FRAGMENTS
    return sum(merged) / took_s


def _drive(shard: Connection, islands: Connection, rounds: int) -> int:
    """Do what the synchroniser does for one fragment. Returns the bytes of the offers that were merged."""
    byte_count = 0
    for version in range(1, rounds + 1):
        islands.send(("offer", version))
        offers: list[Carried] = islands.recv()
        shard.send((version, offers))
        pulled, publications = shard.recv()
        byte_count += pulled
        islands.send(("adopt", publications))
        islands.recv()
    return byte_count


def _endpoint(subject: str, host: str) -> Endpoint:
    terms = Terms(inline_bytes_max=0, shared_memory=False, tls="never")
    return Endpoint(Membership("bench", subject, 1, terms), host)


def _each(pipes: list[Connection], work: Callable[[int, Connection], None]) -> None:
    def until_closed(n: int, pipe: Connection) -> None:
        with pipe:
            work(n, pipe)

    threads = [threading.Thread(target=until_closed, args=(n, pipe)) for n, pipe in enumerate(pipes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _shard(there: tuple[list[Connection], str, tuple[FragmentId, ...], int, str]) -> None:
    pipes, host, fragments, size, folder = there
    endpoint, step = _endpoint(SHARD, host), OuterStep(Averaging.RADIAL, Nesterov(0.7, 0.9), "int8")
    parameters = ParameterShard(Journal(Path(folder), versions_kept=2), Epoch(1), lambda _, work: work())
    shard = LocalShard(parameters, endpoint, step)
    for p in fragments:
        shard.give(p, initial_state({f"w{p}": np.ones(size, np.float32)}, step), 0)
    shard.begin()

    def merge(n: int, pipe: Connection) -> None:
        p = fragments[n]
        pipe.send("ready")
        while (asked := pipe.recv()) is not None:
            version, offers = asked
            items, byte_count = [], 0
            for island, offer in zip(ISLANDS, offers, strict=True):
                content = shard.pull(offer, lambda: False)
                payload = PayloadId(f"{island}.{p}.{version}")
                assert isinstance(shard.receive(payload, p, content), Held)
                items.append(WeightedPayload(payload, IslandId(island), 1 / len(ISLANDS)))
                byte_count += len(content)
            order = (p, Version(version), version, tuple(items), CloseReason.EVERYONE_IN, "")
            published = shard.merge(MergeFragment(Epoch(1), *order)).published
            for item in items:
                shard.release(item.payload)
            shipment = published.since(Version(version - 1))
            pipe.send((byte_count, [payload.carried("islands") for payload in shipment.payloads]))

    _each(pipes, merge)
    endpoint.close()


def _islands(there: tuple[list[Connection], str, tuple[FragmentId, ...], int, str]) -> None:
    pipes, host, fragments, size, _ = there
    endpoint = _endpoint("islands", host)
    learned = 0.01 * np.random.default_rng(0).standard_normal(size, dtype=np.float32)

    def train(n: int, pipe: Connection) -> None:
        offers: list[Any] = []
        pipe.send("ready")
        while (asked := pipe.recv()) is not None:
            kind, value = asked
            if kind == "offer":
                content = wire_format.encode({f"w{fragments[n]}": learned}, "int8", Version(value - 1))
                offers = [endpoint.payload(f"{island}/{value}", content) for island in ISLANDS]
                pipe.send([offer.carried(SHARD) for offer in offers])
            else:
                for _ in ISLANDS:
                    for carried in value:
                        endpoint.received(carried)
                pipe.send("adopted")

    _each(pipes, train)
    endpoint.close()
