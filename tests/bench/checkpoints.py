"""The cost of a checkpoint for the steps of an island: the same island with and without, in turn, in one process.

A JAX island of preset `nano` steps back to back. In every other stretch of ``STRETCH`` steps its state is cut and written
to this disk, in a thread, as ``learners.island`` does. The stretches take turns as A B B A, so that a machine that slows
down affects both. The first checkpoint is not counted and is shown separately.
"""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from learners import jax_trainer
from learners.checkpointing import write
from learners.loop import IslandLoop, LoopPlan
from learners.outbox import Outbox, lower_priority
from orchestrator.checkpoints.folder import Folder
from orchestrator.core.vocabulary import Incarnation, IslandId
from orchestrator.specification.config import parse_job
from tests.bench.goals import Goal, at_most
from tests.bench.options import Options

STRETCH, TURNS, RATIO_GOAL = 100, (False, True, True, False) * 2, 1.03
SMALL_STRETCH = 5


class Clocked:
    """A trainer that notes when each step ended, and wakes a waiter after a given number."""

    def __init__(self, trainer: jax_trainer.JaxTrainer) -> None:
        self._trainer = trainer
        self.ends: list[float] = []
        self._stepped = threading.Condition()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    def step(self, schedule_step: int) -> Any:
        result = self._trainer.step(schedule_step)
        with self._stepped:
            self.ends.append(perf_counter())
            self._stepped.notify_all()
        return result

    def wait_for(self, count: int) -> None:
        with self._stepped:
            self._stepped.wait_for(lambda: len(self.ends) >= count)


def main(asked: Options) -> list[Goal]:
    stretch = SMALL_STRETCH if asked.small else STRETCH
    spec = parse_job({"islands": [{"node_group": "here"}], "budget": {"steps": 10**6}})
    trainer = Clocked(jax_trainer.create(spec.model_dump(mode="json"), 0, 1))
    trainer.warm_up()
    names = sorted(trainer.tensor_shapes())
    plan = LoopPlan((tuple(names),), 10**6, tokens_per_schedule_step=spec.tokens_per_schedule_step)
    loop = IslandLoop(trainer, plan, Outbox())
    loop.load(trainer.initial_parameters(), (0,), 0, 0)
    loop.start()
    with tempfile.TemporaryDirectory(prefix="atoll-bench-", dir=Path.cwd()) as folder:
        first_s, _ = _saved(loop, Folder.own(Path(folder, "first")))
        rates: dict[bool, list[float]] = {True: [], False: []}
        took, held = [], []
        for turn, saving in enumerate(TURNS):
            began = len(trainer.ends)
            trainer.wait_for(began + 1)
            if saving:
                seconds, held_s = _saved(loop, Folder.own(Path(folder, str(turn))))
                took.append(seconds)
                held.append(held_s)
            trainer.wait_for(began + 1 + stretch)
            rates[saving].append((trainer.ends[began + stretch] - trainer.ends[began]) / stretch)
        loop.stop()
        size = sum(path.stat().st_size for path in Path(folder, "1").rglob("*") if path.is_file())
    ratio = median(rates[True]) / median(rates[False])
    goal = at_most("checkpoints step ratio", ratio, RATIO_GOAL)
    print(f"checkpoint step {1e3 * median(rates[True]):.1f} ms with one in {stretch} steps, ", end="")
    print(f"{1e3 * median(rates[False]):.1f} ms without: ratio {ratio:.3f} ({goal}); ", end="")
    print(f"{size / 1e6:.1f} MB in {median(took):.2f} s, the first in {first_s:.2f} s; ", end="")
    print(f"the loop was held for {1e3 * max(held):.1f} ms at most")
    return [goal]


def _saved(loop: IslandLoop, folder: Folder) -> tuple[float, float]:
    """Return how long the whole checkpoint took, and how long it held the loop."""
    began = perf_counter()
    cut = loop.request_cut().result()

    def work() -> None:
        lower_priority()
        write(cut, folder, IslandId("it"), Incarnation(1))

    writing = threading.Thread(target=work)
    writing.start()
    writing.join()
    return perf_counter() - began, cut.held_seconds
