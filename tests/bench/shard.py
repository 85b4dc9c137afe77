"""The needs of a shard: peak bytes of memory per parameter, and bytes, syncs and seconds of its disk per merge.

A process of its own holds a synthetic model in 24 fragments, takes the offers of eight islands in four bits for one
fragment after the other, validates, merges, journals and encodes the update, twice through all fragments. Its memory is
the peak of its resident set, less that of the process before. The journal is judged by the entries between two states,
for four, eight and 16 islands. The default is 100 million parameters; ``--parameters`` takes another number.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import numpy as np
import psutil

from orchestrator.core.effects import MergeFragment
from orchestrator.core.vocabulary import (
    CloseReason,
    Epoch,
    FragmentId,
    IslandId,
    PayloadId,
    Version,
    WeightedPayload,
)
from orchestrator.parameters import wire_format
from orchestrator.parameters.codec.registry import CodecName
from orchestrator.parameters.journal import Journal
from orchestrator.parameters.journaled_store import MERGES_PER_STATE
from orchestrator.parameters.outer_optimizer import Nesterov
from orchestrator.parameters.outer_state import Averaging, OuterState, OuterStep
from orchestrator.parameters.shard import Held, ParameterShard
from orchestrator.system.disk import LocalDisk
from tests.bench.goals import Goal, at_most
from tests.bench.options import PARAMETERS, Options

FRAGMENTS, ISLANDS, JOURNAL_ISLANDS, ROUNDS = 24, 8, (4, 8, 16), 2
SMALL_PARAMETERS = 1_000_000
MEMORY_GOAL = 16.0
JOURNAL_GOAL = 4.0 * (1 + 1e-3)
"""The header of an entry has some hundred bytes."""
STATE_BYTES = 12.0
"""Bytes of Θ, μ and the residue per parameter."""
FREE_BYTES_A_PARAMETER = 20
"""The free memory that is required before a run starts."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one run: bytes per parameter, seconds per gigabyte of float32 parameters."""

    memory_bytes: float
    journal_bytes: float
    syncs: float
    seconds: float


def main(asked: Options) -> list[Goal]:
    count = SMALL_PARAMETERS if asked.small else asked.parameters or PARAMETERS
    if psutil.virtual_memory().available < FREE_BYTES_A_PARAMETER * count:
        print(f"shard      not run: {FREE_BYTES_A_PARAMETER * count / 1e9:.0f} GB of memory are not free")
        return []
    memory = _measured(count, ISLANDS, ROUNDS)
    high = at_most("shard memory, bytes a parameter", memory.memory_bytes, MEMORY_GOAL)
    print(
        f"shard      {count / 1e6:.0f}M parameters, {ISLANDS} islands, int4 both ways: at the highest "
        f"{memory.memory_bytes:.1f} bytes a parameter ({high})"
    )
    return [high, *(_journal(count // 10, islands) for islands in JOURNAL_ISLANDS)]


def _journal(count: int, island_count: int) -> Goal:
    """Judge what a merge of so many islands writes between states. The figure with the states is shown as well."""
    figures = _measured(count, island_count, MERGES_PER_STATE)
    between = (MERGES_PER_STATE * figures.journal_bytes - STATE_BYTES) / (MERGES_PER_STATE - 1)
    goal = at_most(f"shard journal of {island_count} islands, bytes a parameter a merge", between, JOURNAL_GOAL)
    print(
        f"shard      a merge of {island_count} islands: journal {between:.2f} bytes a parameter ({goal}), "
        f"{figures.journal_bytes:.2f} with one state in {MERGES_PER_STATE}, {figures.syncs:.2f} syncs of files, "
        f"{figures.seconds:.2f} s/GB with validation and journal"
    )
    return goal


def _measured(count: int, island_count: int, rounds: int) -> Figures:
    command = [sys.executable, "-m", __spec__.name, str(count), str(island_count), str(rounds)]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return Figures(*json.loads(answer.splitlines()[-1]))


class CountingDisk(LocalDisk):
    """A disk that counts what is written and synced."""

    def __init__(self) -> None:
        self.written_bytes = self.syncs = 0

    def append(self, path: Path, parts: Sequence[bytes | memoryview]) -> None:
        self.written_bytes += sum(map(len, parts))
        super().append(path, parts)

    def sync(self, path: Path) -> None:
        self.syncs += 1
        super().sync(path)


def run(count: int, island_count: int, rounds: int, codec: CodecName = "int4") -> Figures:
    """Run in this process, whose resident set is measured."""
    size = count // FRAGMENTS
    learned = 0.01 * np.random.default_rng(0).standard_normal(size, dtype=np.float32)
    offers = {base: wire_format.encode({"w": learned}, codec, Version(base)) for base in range(rounds)}
    del learned
    before, disk = psutil.Process().memory_info().rss, CountingDisk()
    names = [f"w{p}" for p in range(FRAGMENTS)]
    with tempfile.TemporaryDirectory(prefix="atoll-bench-", dir=Path.cwd()) as folder:
        shard = ParameterShard(Journal(Path(folder), versions_kept=2, disk=disk), Epoch(1), lambda _, work: work())
        step = OuterStep(Averaging.RADIAL, Nesterov(0.7, 0.9), codec)
        shard.seed(
            OuterState({name: np.ones(size, np.float32) for name in names}, tuple((n,) for n in names), step), {}
        )
        disk.written_bytes = disk.syncs = 0
        began = perf_counter()
        for version in range(1, rounds + 1):
            for p, name in enumerate(names):
                _merge(shard, FragmentId(p), name, Version(version), offers[version - 1], island_count)
        seconds, merges = perf_counter() - began, rounds * FRAGMENTS
        high = _highest_resident_bytes()
    by_parameter = merges * size
    return Figures(
        (high - before) / count, disk.written_bytes / by_parameter, disk.syncs / merges, seconds / (4e-9 * by_parameter)
    )


def _merge(shard: ParameterShard, p: FragmentId, name: str, version: Version, offer: memoryview, count: int) -> None:
    items = []
    for island in range(count):
        payload = PayloadId(f"{island}")
        content = wire_format.parse(offer)
        own = replace(content, tensors={name: content.tensors["w"]}, payload=None)
        assert isinstance(shard.receive(payload, p, wire_format.written(own)), Held)
        items.append(WeightedPayload(payload, IslandId(payload), 1 / count))
    shard.merge(MergeFragment(Epoch(1), p, version, 1, tuple(items), CloseReason.EVERYONE_IN, ""))
    for item in items:
        shard.release(item.payload)


def _highest_resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


if __name__ == "__main__":
    figures = run(*map(int, sys.argv[1:]))
    print(json.dumps([figures.memory_bytes, figures.journal_bytes, figures.syncs, figures.seconds]))
