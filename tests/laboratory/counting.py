"""A trainer that only counts: its parameters say how many inner steps of which shard are in them.

Every tensor has one number a shard; an inner step adds 1 to its own shard's. With plain averages and an outer step of 1,
what a merge must give follows from the tape's counters alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from learners.contract import Arrays, StepResult
from tests.laboratory.quadratic import TOKENS, Copy

NAMES = ("a", "b", "c", "d")


class CountingTrainer:
    """A ``learners.contract.Trainer``. ``sought`` are the places in its data that it was sent to."""

    device_count = 1

    def __init__(self, spec: Mapping[str, Any], shard_index: int, shard_count: int) -> None:
        self._shard, self._count, self._cursor = shard_index, shard_count, 0
        self.sought: list[int] = []
        self.parameters = self.initial_parameters()

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(NAMES, (self._count,))

    def initial_parameters(self) -> Arrays:
        return {name: np.zeros(self._count, np.float32) for name in NAMES}

    def warm_up(self) -> None:
        """There is nothing to compile."""

    def step(self, logical_step: int) -> StepResult:
        for name in NAMES:
            self.parameters[name] = self.parameters[name] + one_hot(self._shard, self._count)
        self._cursor += 1
        return StepResult(TOKENS, 1.0)

    def snapshot(self, names: Iterable[str]) -> Copy:
        return Copy({name: self.parameters[name].copy() for name in names})

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.parameters.update({name: array.copy() for name, array in arrays.items()})

    def export_state(self) -> Copy:
        return self.snapshot(NAMES)

    def import_state(self, state: Mapping[str, np.ndarray]) -> None:
        self.load(state)

    def cursor(self) -> int:
        return self._cursor

    def seek(self, cursor: int) -> None:
        self._cursor = cursor
        self.sought.append(cursor)

    def evaluate(self, arrays: Mapping[str, np.ndarray]) -> float:
        return float(sum(array.sum() for array in arrays.values()))

    def unigram_loss(self) -> float:
        return 1.0


def one_hot(shard: int, count: int) -> np.ndarray:
    return np.eye(count, dtype=np.float32)[shard]
