"""A trainer that only counts: its parameters say how many inner steps of which shard are in them.

Every tensor has one number a shard; an inner step adds 1 to its own shard's. With plain averages and an outer step of 1,
what a merge must give follows from the tape's counters alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from learners.contract import Arrays, HeldOutLoss, StepResult
from orchestrator.parameters.pieces import taken
from tests.laboratory.array_trainer import TOKENS, ArrayTrainer

NAMES = ("a", "b", "c", "d")


class CountingTrainer(ArrayTrainer):
    """A ``learners.contract.Trainer``. ``sought`` are the places in its data that it was sent to."""

    def __init__(self, spec: Mapping[str, Any], shard_index: int, shard_count: int) -> None:
        self._count = shard_count
        self.sought: list[int] = []
        super().__init__(shard_index, self.initial_parameters())

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(NAMES, (self._count,))

    def initial_parameters(self, pieces: Iterable[str] | None = None) -> Arrays:
        tensors = {name: np.zeros(self._count, np.float32) for name in NAMES}
        return tensors if pieces is None else taken(tensors, pieces)

    def step(self, schedule_step: int) -> StepResult:
        for name in NAMES:
            self.parameters[name] = self.parameters[name] + one_hot(self._shard, self._count)
        self._cursor += 1
        return StepResult(TOKENS, 1.0)

    def seek(self, cursor: int) -> None:
        super().seek(cursor)
        self.sought.append(cursor)

    def evaluate(self, arrays: Mapping[str, np.ndarray], limit_s: float = math.inf) -> HeldOutLoss:
        return HeldOutLoss(float(sum(array.sum() for array in arrays.values())), 1, 0.0)


def one_hot(shard: int, count: int) -> np.ndarray:
    return np.eye(count, dtype=np.float32)[shard]
