"""A whole merge at stated sizes, against copying memory in the same run.

    whole merge   the checksum and validation of M contributions, in as many threads as there are cores, as links do it;
                  then the outer step with the digest of what it made
    its bytes     (2(M + 1) + 3)·f, f being a fragment in float32: displacements and Θ read twice, momentum read and written,
                  Θ written. What is moved is more, (3M + 5)·f of float32 where no cache holds a fragment: contributions
                  are read by validation, by the Gram matrix and by the step, Θ once by the step, Θ' by the digest
    copy          STREAM's, of as much as the largest fragment, between the merges: bytes read and written a second by the
                  faster of one thread and of one for each core
    limit         its bytes in the time of passes that only move what a merge moves: payloads read three times, two fragments
                  copied (Θ and momentum read, Θ' and momentum written), and BLAKE3 of one; with as many threads. It leaves
                  out arithmetic, so four bits cannot come near it

A share is judged by its goal, or by nine tenths of the limit where that is less. Both are printed.

It runs in a process of its own, whose memory is managed as in a cluster's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import numpy as np

from orchestrator.core.vocabulary import FragmentId, Version
from orchestrator.parameters import kernels, validation, wire_format
from orchestrator.parameters.codec.registry import CodecName
from orchestrator.parameters.outer_optimizer import Nesterov
from orchestrator.parameters.outer_state import Averaging, OuterState, OuterStep
from orchestrator.parameters.tensors import Array, digest
from orchestrator.parameters.wire_format import EncodedTensors, displacement
from tests.bench.goals import Goal, at_least, at_most
from tests.bench.options import Options

SHARE_GOAL = 0.6
"""Relative to the copy's bytes per second."""
LIMIT_GOAL = 0.9
"""Relative to the limit: what is asked where the machine does not permit ``SHARE_GOAL``."""
CPU_SECONDS_GOAL = 1.5
"""Processor seconds of all threads for a gigabyte of fragment, at M = 4, with the digest."""
GAP_GOAL_S = 0.020
"""The longest time that another thread may wait for Python's lock while values are encoded, validated and merged."""
SIZES = (4_000_000, 64_000_000)
SMALL_SIZES = (10_000,)
REPEATS = {4_000_000: 40, 64_000_000: 8}
ISLAND_COUNTS = (4, 8)
UPLINKS: tuple[CodecName, ...] = ("float32", "int4")
CORES = len(os.sched_getaffinity(0))
HEAP = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 32), "MALLOC_ARENA_MAX": "1"}
"""The setting of ``runtime.settings``: freed memory is reused and need not be requested from the kernel again."""
FRAGMENT = FragmentId(0)


@dataclass(frozen=True, slots=True)
class Figures:
    """The best of several merges of one size. ``share`` is relative to the copy; seconds are those of a whole merge.

    ``gap_s`` is the longest wait for Python's lock in the merge where it was shortest: another program may take the
    processor from a waiting thread, but a lock that is held is held in every merge.
    """

    parameter_count: int
    island_count: int
    uplink: CodecName
    copy_gigabytes: float
    seconds: float
    validation_seconds: float
    share: float
    limit: float
    cpu_seconds_per_gigabyte: float
    gap_s: float


def main(asked: Options) -> list[Goal]:
    command = [sys.executable, "-m", "tests.bench.merge", *map(str, SMALL_SIZES if asked.small else SIZES)]
    environment = {**os.environ, **HEAP}
    judged = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        for line in child.stdout:
            figures = Figures(**json.loads(line))
            judged += _told(figures)
    if child.returncode:
        raise RuntimeError(f"The process that merges ended with {child.returncode}.")
    return judged


def _told(figures: Figures) -> list[Goal]:
    name = f"{figures.parameter_count / 1e6:g}M from {figures.island_count} in {figures.uplink}"
    share = at_least(f"merge, share of a copy, {name}", figures.share, min(SHARE_GOAL, LIMIT_GOAL * figures.limit))
    gap = at_most(f"merge, longest wait for Python's lock in s, {name}", figures.gap_s, GAP_GOAL_S)
    judged = [share, gap]
    print(
        f"merge      {name:<22} {figures.seconds * 1000:6.1f} ms, "
        f"{figures.validation_seconds * 1000:5.1f} of it validation; "
        f"{figures.share:.0%} of a copy's {figures.copy_gigabytes:.1f} GB/s ({share}), "
        f"{figures.share / figures.limit:.0%} of the limit {figures.limit:.0%}; "
        f"lock {figures.gap_s * 1000:.1f} ms ({gap})"
    )
    if figures.island_count == 4:
        cpu = at_most(f"merge, cpu-seconds a GB, {name}", figures.cpu_seconds_per_gigabyte, CPU_SECONDS_GOAL)
        print(f"           outer step and digest {figures.cpu_seconds_per_gigabyte:.2f} cpu-s a GB of fragment ({cpu})")
        judged.append(cpu)
    return judged


def measure(sizes: list[int]) -> Iterator[Figures]:
    source = np.ones(max(sizes), np.float32)
    copied = (source, np.empty_like(source))
    for parameter_count in sizes:
        for uplink in UPLINKS:
            for island_count in ISLAND_COUNTS:
                yield _measured(parameter_count, island_count, uplink, copied)


def _measured(parameter_count: int, island_count: int, uplink: CodecName, copied: tuple[Array, Array]) -> Figures:
    generator = np.random.default_rng(0)
    anchor = generator.standard_normal(parameter_count, dtype=np.float32)
    values = {"kernel": anchor.reshape(-1, 8)}
    step = OuterStep(Averaging.RADIAL, Nesterov(lr=0.7, decay=0.9))
    state = OuterState(values, (("kernel",),), step)
    moved = {"kernel": values["kernel"] - np.float32(0.01) * np.roll(anchor, 1).reshape(-1, 8)}
    payloads = [wire_format.written(displacement(values, moved, Version(0), uplink)) for _ in range(island_count)]
    fragment_bytes, before = anchor.nbytes, state.state(FRAGMENT)

    def received(payload: memoryview) -> EncodedTensors:
        return validation.validated(payload, before.parameters, before.version)[0]

    timings, waits, copy_seconds, limit_seconds = [], [], [], []
    own_copy = (anchor, np.zeros_like(anchor))
    with ThreadPoolExecutor(CORES) as links:
        for _ in range(REPEATS.get(parameter_count, 2)):
            copy_seconds.append(_copy_seconds(*copied, links))
            reading = min(_seconds(lambda: _read(payloads, links)) for _ in range(2))
            copying = 2 * _copy_seconds(*own_copy, links)
            limit_seconds.append((reading, copying, _seconds(lambda: digest(values))))
            with _lock_watched() as longest_wait:
                wire_format.written(displacement(values, moved, Version(0), uplink))
                began = time.perf_counter()
                contents = list(links.map(received, payloads))
                merging, cpu_before = time.perf_counter(), time.process_time()
                state.merge(FRAGMENT, Version(1), [(content, 1 / island_count) for content in contents])
                ended, cpu_after = time.perf_counter(), time.process_time()
            timings.append((ended - began, merging - began, cpu_after - cpu_before))
            waits.append(longest_wait[0])
            state = OuterState.restored({FRAGMENT: before}, step)
    seconds, validation_seconds, cpu_seconds = min(timings)
    copy_rate = 2 * copied[0].nbytes / min(copy_seconds)
    ideal_seconds = (2 * (island_count + 1) + 3) * fragment_bytes / copy_rate
    reading, copying, hashing = map(min, zip(*limit_seconds, strict=True))
    return Figures(
        parameter_count,
        island_count,
        uplink,
        copy_rate / 1e9,
        seconds,
        validation_seconds,
        ideal_seconds / seconds,
        ideal_seconds / (3 * reading + copying + hashing),
        cpu_seconds / (fragment_bytes / 1e9),
        min(waits),
    )


def _read(payloads: list[memoryview], threads: ThreadPoolExecutor) -> None:
    """Read all payloads once, each thread a part of each."""
    split = [np.array_split(np.frombuffer(payload, np.uint8), CORES) for payload in payloads]
    list(threads.map(lambda parts: [part.max() for part in parts], zip(*split, strict=True)))


def _copy_seconds(source: Array, target: Array, threads: ThreadPoolExecutor) -> float:
    parts = [slice(part * source.size // CORES, (part + 1) * source.size // CORES) for part in range(CORES)]

    def parallel() -> None:
        list(threads.map(lambda part: np.copyto(target[part], source[part]), parts))

    return min(_seconds(lambda: np.copyto(target, source)), _seconds(parallel))


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


@contextmanager
def _lock_watched() -> Iterator[list[float]]:
    """Yield the longest time, in seconds, that a thread which wakes every half millisecond had to wait for Python's lock."""
    longest, over = [0.0], threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not over.is_set():
            time.sleep(0.0005)
            now = time.perf_counter()
            longest[0] = max(longest[0], now - last)
            last = now

    ticker = threading.Thread(target=tick)
    ticker.start()
    try:
        yield longest
    finally:
        over.set()
        ticker.join()


if __name__ == "__main__":
    print(kernels.IMPLEMENTATION, file=sys.stderr)
    for figures in measure([int(size) for size in sys.argv[1:]]):
        print(json.dumps(asdict(figures)), flush=True)
