"""The peak host memory of an island, in bytes per parameter, through everything that an island does.

A process of its own holds an island of 24 fragments, with real arrays: parameters and two moments in host memory, as on
an island that computes on CPU. It catches up from a peer, trains two rounds in which every fragment is offered in four
bits, published and adopted, gives its state to a peer, and writes its part of a checkpoint. The figure is the peak of its
resident set, less the memory of the process before. Gradients and activations, which are the model's, are not included.
An island whose parameters are on an accelerator needs 12 bytes less. The default is 100 million parameters;
``--parameters`` takes another number.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from learners import checkpointing
from learners.contract import Arrays, HeldOutLoss, HostCopy, StepResult
from learners.loop import IslandLoop, LoopPlan
from learners.outbox import Outbox
from learners.plain_arrays import flattened, restored
from learners.state_transfer import Donor, DonorReply, HeldStates, StateFetch
from orchestrator.checkpoints.folder import Folder
from orchestrator.core.messages import Offer
from orchestrator.core.vocabulary import FragmentId, Incarnation, IslandId, Version
from orchestrator.parameters import wire_format
from orchestrator.parameters.pieces import BY_NAME, Roles, taken
from orchestrator.parameters.tensors import digest
from orchestrator.replica.replica import Publication
from orchestrator.runtime.settings import ray_environment
from orchestrator.specification.memory_budget import GRADIENT_BYTES, island_bytes_per_parameter
from tests.bench.goals import Goal, at_most
from tests.bench.options import PARAMETERS, Options

FRAGMENTS, ROUNDS = 24, 2
SMALL_PARAMETERS = 24_000_000
FREE_BYTES_A_PARAMETER = 70
"""The free memory that is required before a run starts."""
BOUNDARY_S = 600.0
SAVED = "saved"
STATE_PARTS = ("parameters", "moment", "square")


def main(asked: Options) -> list[Goal]:
    count = SMALL_PARAMETERS if asked.small else asked.parameters or PARAMETERS
    if psutil.virtual_memory().available < FREE_BYTES_A_PARAMETER * count:
        print(f"island     not run: {FREE_BYTES_A_PARAMETER * count / 1e9:.0f} GB of memory are not free")
        return []
    command = [sys.executable, "-m", __spec__.name, str(count)]
    environment = os.environ | {
        name: value for name, value in ray_environment(Path()).items() if name.startswith("MALLOC")
    }
    answer = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    highest: dict[str, float] = json.loads(answer.splitlines()[-1])
    budgets = {
        stage: island_bytes_per_parameter(on_cpu=True, saves=stage == SAVED) - GRADIENT_BYTES for stage in highest
    }
    goals = [
        at_most(f"island memory {stage}, bytes a parameter", value, budgets[stage]) for stage, value in highest.items()
    ]
    for stage, goal in zip(highest, goals, strict=True):
        print(
            f"island     {count / 1e6:.0f}M parameters, int4 both ways, {stage}: at the highest so far {goal.value:.1f} "
            f"bytes a parameter, 12 of them the trainer's ({goal})"
        )
    return goals


class HostTrainer:
    """A ``contract.Trainer`` with parameters and moments in host arrays. A step changes a little of them."""

    device_count = 1

    def __init__(self, names: Iterable[str], size: int) -> None:
        self._state = {f"{part}/{name}": np.ones(size, np.float32) for part in STATE_PARTS for name in names}
        self._names, self._size, self._cursor = tuple(names), size, 0

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(self._names, (self._size,))

    def roles(self) -> Roles:
        return BY_NAME

    def initial_parameters(self, pieces: Iterable[str] | None = None) -> Arrays:
        tensors = {name: np.ones(self._size, np.float32) for name in self._names}
        return tensors if pieces is None else taken(tensors, pieces)

    def warm_up(self) -> None:
        """Do nothing: nothing is compiled."""

    def step(self, schedule_step: int) -> StepResult:
        self._parameter(self._names[self._cursor % len(self._names)])[::7] += np.float32(1e-3)
        self._cursor += 1
        return StepResult(token_count=1, loss=1.0)

    def snapshot(self, pieces: Iterable[str]) -> HostCopy:
        return HostCopy({name: self._parameter(name).copy() for name in pieces})

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        for name, array in arrays.items():
            self._parameter(name)[...] = array

    def add(self, arrays: Mapping[str, np.ndarray]) -> None:
        for name, array in arrays.items():
            self._parameter(name).__iadd__(array)

    def export_state(self, pieces: Iterable[str] | None = None) -> HostCopy:
        names = self._names if pieces is None else tuple(pieces)
        return HostCopy(
            {f"{part}/{name}": self._state[f"{part}/{name}"].copy() for part in STATE_PARTS for name in names}
        )

    def import_state(self, state: Mapping[str, np.ndarray]) -> None:
        for name, array in self._state.items():
            array[...] = state[name]

    def cursor(self) -> int:
        return self._cursor

    def seek(self, cursor: int) -> None:
        self._cursor = cursor

    def take_shard(self, index: int) -> None:
        """Do nothing: there is no data."""

    def evaluate(self, arrays: Mapping[str, np.ndarray], limit_s: float = 0.0) -> HeldOutLoss:
        return HeldOutLoss(1.0, 1, 0.0)

    def unigram_loss(self) -> float:
        return 1.0

    def _parameter(self, name: str) -> np.ndarray:
        return self._state[f"parameters/{name}"]


class Life:
    """The life of an island in this process, and a Θ whose fragments all have the same values."""

    def __init__(self, count: int) -> None:
        size = count // FRAGMENTS
        self.names = [f"w{p:02d}" for p in range(FRAGMENTS)]
        self.trainer, self.outbox = HostTrainer(self.names, size), Outbox()
        fragments = tuple((name,) for name in self.names)
        plan = LoopPlan(fragments, FRAGMENTS, "rebase", codec="int4", tokens_per_schedule_step=1)
        self.loop = IslandLoop(self.trainer, plan, self.outbox)
        generator = np.random.default_rng(0)
        self._values = generator.standard_normal(size, np.float32)
        self._learned = np.float32(1e-3) * generator.standard_normal(size, np.float32)
        self._taken: dict[FragmentId, memoryview] = {}
        self._offers: dict[FragmentId, int] = {}

    def catch_up(self) -> None:
        """Take the state of a peer, fragment by fragment."""
        done = threading.Event()
        versions = (Version(0),) * FRAGMENTS

        def give(fragments: tuple[int, ...] | None) -> DonorReply:
            assert fragments is not None
            (name,) = (self.names[p] for p in fragments)
            table, content = flattened({f"{part}/{name}": self._values for part in STATE_PARTS})
            return DonorReply(restored(table, content), versions, 0)

        def take(state: Any) -> None:
            self.loop.load_peer(state, 0)
            done.set()

        fetch = StateFetch(FRAGMENTS, of_one_boundary=True, take=take, failed=lambda _, error: done.set())
        fetch.ask({"peer": Donor(IslandId("peer"), give)})
        done.wait()
        fetch.close()
        self.loop.open()

    def train(self) -> None:
        """Publish every fragment, first as values, then as updates. Every offer is fetched, and the next version contains
        it.
        """
        for version in range(1, ROUNDS + 2):
            content = wire_format.encode({"w": self._learned}, "int4", Version(version - 1))
            if version > 1:
                self._values = wire_format.parse(content).added_to({"w": self._values})["w"]
            for p, name in enumerate(self.names):
                since = None if version == 1 else Version(version - 1)
                update = wire_format.encode({name: self._learned}, "int4", since)
                payload = wire_format.encode({name: self._values}) if since is None else update
                of = digest({name: self._values})
                fragment = FragmentId(p)
                news = Publication(fragment, Version(version), 0, self._offers.get(fragment, 0))
                assert self.loop.receive(news, since, of, [payload]) == version
                self.loop.advance()
                self._fetch_offers()

    def give_state(self) -> None:
        """Give the state of one boundary to a peer, fragment by fragment."""
        held = HeldStates(lambda: self.loop.export_fragments(BOUNDARY_S), BOUNDARY_S)
        served: memoryview | None = None

        def give() -> None:
            nonlocal served
            for p in range(FRAGMENTS):
                _, served = flattened(held.give("peer", p).arrays())

        giving = threading.Thread(target=give)
        giving.start()
        while giving.is_alive():
            self.loop.advance()
            self._fetch_offers()
            giving.join(0.05)

    def save(self) -> None:
        """Write the part of a checkpoint."""
        future = self.loop.request_cut()
        self.loop.advance()
        with tempfile.TemporaryDirectory(prefix="atoll-bench-", dir=Path.cwd()) as folder:
            target = Folder.own(Path(folder))
            checkpointing.write(future.result(), target, IslandId("here"), Incarnation(1))

    def _fetch_offers(self) -> None:
        for report in self.outbox.take(0.0):
            if isinstance(report, Offer):
                content = self.loop.take(report.fragment, report.offer)
                assert content is not None
                self._taken[report.fragment], self._offers[report.fragment] = content, report.offer


def run(count: int) -> dict[str, float]:
    """Run in this process, whose resident set is measured. Return the peak so far after each stage, in bytes per
    parameter.
    """
    before = psutil.Process().memory_info().rss
    life = Life(count)
    highest: dict[str, float] = {}
    for stage, work in {
        "caught up": life.catch_up,
        "trained": life.train,
        "state given": life.give_state,
        SAVED: life.save,
    }.items():
        work()
        highest[stage] = (highest_resident_bytes() - before) / count
    return highest


def highest_resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]))))
