"""Synthetic trainers: one that steps when a test says so, within the loop; and one of several processes of an island."""

from __future__ import annotations

import threading

import numpy as np

from learners import synthetic
from learners.contract import HeldPart, HostCopy
from learners.loop import IslandLoop, LoopPlan
from learners.outbox import Outbox
from orchestrator.core.messages import Offer
from tests.waiting import PATIENCE_S

ISLANDS, TOKENS = 2, 4 * 32


class SteppedTrainer(synthetic.SyntheticTrainer):
    """A synthetic trainer that takes a step only when told, so that a boundary is a moment one can look at."""

    def __init__(self, spec, shard_index: int = 0) -> None:
        super().__init__(spec, shard_index)
        self.permits, self.at_gate = threading.Semaphore(0), threading.Semaphore(0)
        self.fails: BaseException | None = None
        self.schedule: list[int] = []
        self.lr_ratios: list[float] = []

    def step(self, schedule_step, lr_ratio=1.0):
        self.schedule.append(schedule_step)
        self.lr_ratios.append(lr_ratio)
        self.at_gate.release()
        self.permits.acquire()
        if self.fails is not None:
            raise self.fails
        return super().step(schedule_step)


class Island:
    """A loop, its trainer and its outbox, driven from outside."""

    def __init__(
        self, spec, adoption: str = "replace", interval: int = 4, fragments: int = 2, report_every_s: float = 0.0
    ) -> None:
        self.trainer_spec = spec
        self.trainer = SteppedTrainer(spec)
        names = sorted(self.trainer.tensor_shapes())
        self.fragments = tuple(tuple(names[index::fragments]) for index in range(fragments))
        plan = LoopPlan(
            self.fragments,
            interval,
            adoption,
            mix_alpha=0.25,
            report_every_s=report_every_s,
            tokens_per_schedule_step=ISLANDS * TOKENS,
        )
        self.outbox = Outbox()
        self.loop = IslandLoop(self.trainer, plan, self.outbox)

    def start(self, step: int = 0, versions: tuple[int, ...] | None = None) -> Island:
        versions = versions or (0,) * len(self.fragments)
        self.loop.load(self.trainer.initial_parameters(), versions, step, cursor=0)
        self.loop.start()
        assert self.trainer.at_gate.acquire(timeout=PATIENCE_S)
        return self

    def steps(self, count: int) -> list:
        """Take so many steps and return the letters written up to the boundary after the last."""
        for _ in range(count):
            self.trainer.permits.release()
            assert self.trainer.at_gate.acquire(timeout=PATIENCE_S)
        return self.outbox.take(0)

    def published(self, fragment: int, value: float) -> dict[str, np.ndarray]:
        shapes = self.trainer.tensor_shapes()
        return {name: np.full(shapes[name], value, np.float32) for name in self.fragments[fragment]}

    def own(self, fragment: int) -> dict[str, np.ndarray]:
        return self.trainer.snapshot(self.fragments[fragment]).arrays()

    def letters_until(self, last: type) -> list:
        letters: list = []
        while not any(isinstance(letter, last) for letter in letters):
            got = self.outbox.take(PATIENCE_S)
            assert got, f"no {last.__name__} came; so far: {letters}"
            letters += got
        return letters


def offers(letters: list) -> list[Offer]:
    return [letter for letter in letters if isinstance(letter, Offer)]


def alone(spec, steps: int) -> dict[str, np.ndarray]:
    """What the same trainer holds after so many steps that nobody disturbs."""
    witness = synthetic.create(spec, 0, 1)
    for step in range(steps):
        witness.step(step)
    return witness.snapshot(witness.tensor_shapes()).arrays()


class Sliced(synthetic.SyntheticTrainer):
    """Of every tensor each process has its share of the rows; what it computes of the others nobody asks for.

    Its state has a moment besides, which lies like the parameters.
    """

    def __init__(self, spec, rank: int, size: int) -> None:
        super().__init__(spec, 0, 2)
        self._rank, self._size = rank, size
        self.moments = {name: np.full(shape, len(name), np.float16) for name, shape in self._shapes.items()}

    def held(self, piece: str) -> HeldPart:
        rows, columns = self._shapes[piece]
        bounds = (rows * self._rank // self._size, rows * (self._rank + 1) // self._size)
        return HeldPart((bounds, (0, columns)), (self._rank,))

    def rows(self, piece: str) -> slice:
        return slice(*self.held(piece).bounds[0])

    def snapshot(self, pieces):
        return HostCopy({name: array[self.rows(name)] for name, array in super().snapshot(pieces).arrays().items()})

    def export_state(self, pieces=None):
        names = self._shapes if pieces is None else pieces
        moments = {f"moment/{name}": self.moments[name][self.rows(name)] for name in names}
        return HostCopy({**self.snapshot(names).arrays(), **moments, "steps": np.array(self._steps)})

    def held_state(self, pieces):
        held = {name: self.held(name) for name in pieces}
        moments = {f"moment/{name}": part for name, part in held.items()}
        return {**held, **moments, "steps": HeldPart((), tuple(range(self._size)))}

    def import_state(self, state) -> None:
        self.load({name: state[name] for name in self._shapes})
        for name, array in self._wide(
            {name: state[f"moment/{name}"] for name in self._shapes}, self.moments.get
        ).items():
            self.moments[name] = array
        self._steps = int(state["steps"])

    def _wide(self, arrays, fill):
        wide = {name: fill(name) for name in arrays}
        for name, array in arrays.items():
            wide[name][self.rows(name)] = array if len(array) < self._shapes[name][0] else array[self.rows(name)]
        return wide

    def load(self, arrays) -> None:
        super().load(self._wide(arrays, lambda name: self._parameters[name].copy()))

    def add(self, arrays) -> None:
        super().add(self._wide(arrays, lambda name: np.zeros(self._shapes[name], np.float32)))
