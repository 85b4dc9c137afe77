"""A trainer whose inner step is a few lines of NumPy: noisy gradient descent towards an island's own target."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np

from learners.contract import Arrays, HeldOutLoss, StepResult
from orchestrator.parameters.pieces import taken
from tests.laboratory.array_trainer import TOKENS, ArrayTrainer

SHAPES = {"embed": (6,), "a": (4, 3), "b": (5,), "c": (2, 2), "d": (7,)}
LR = np.float32(0.1)


def initial() -> Arrays:
    random = np.random.default_rng(0)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def gradient(name: str, value: np.ndarray, shard: int, batch: int) -> np.ndarray:
    """Of half the squared distance to the shard's target, with noise that depends on shard and batch alone."""
    noise = np.random.default_rng([2, shard, batch, *map(ord, name)]).standard_normal(value.shape)
    return (value - target(name, value.shape, shard) + 0.3 * noise).astype(np.float32)


@cache
def target(name: str, shape: tuple[int, ...], shard: int) -> np.ndarray:
    return np.random.default_rng([1, shard, len(name), *map(ord, name)]).standard_normal(shape)


class QuadraticTrainer(ArrayTrainer):
    """A ``learners.contract.Trainer``."""

    def __init__(self, spec: Mapping[str, Any], shard_index: int, shard_count: int) -> None:
        super().__init__(shard_index, initial())

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(SHAPES)

    def initial_parameters(self, pieces: Iterable[str] | None = None) -> Arrays:
        tensors = initial()
        return tensors if pieces is None else taken(tensors, pieces)

    def step(self, schedule_step: int) -> StepResult:
        for name, value in self.parameters.items():
            self.parameters[name] = value - LR * gradient(name, value, self._shard, self._cursor)
        self._cursor += 1
        return StepResult(TOKENS, 1.0)

    def evaluate(self, arrays: Mapping[str, np.ndarray], limit_s: float = math.inf) -> HeldOutLoss:
        return HeldOutLoss(float(sum(np.abs(array).sum() for array in arrays.values())), 1, 0.0)
