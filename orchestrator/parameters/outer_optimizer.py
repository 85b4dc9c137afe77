"""The outer step: from Θ and an outer gradient to the next Θ.

An optimizer is a frozen description with two pure functions; the caller keeps its state, one array per tensor.
Steps are elementwise, so a caller may take them on any part of a tensor. A step returns the decrement: the next Θ is
Θ − decrement, or what is published of it (``outer_state``). Nothing here knows where gradients come from.

Source: DiLoCo, arXiv:2311.08105, Algorithm 1. Both optimizers are checked against optax.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from orchestrator.errors import ConfigurationError, InternalError
from orchestrator.parameters.tensors import Array


class OuterOptimizer(Protocol):
    @property
    def lr(self) -> float: ...

    @property
    def decay(self) -> float | None:
        """The decay of the momentum; None without momentum."""
        ...

    def initial_momentum(self, parameters: Array) -> Array:
        """Return the state at version 0."""
        ...

    def step(self, gradient: Array, momentum: Array) -> tuple[Array, Array]:
        """Return the decrement and the next momentum. The arguments do not change."""
        ...


@dataclass(frozen=True, slots=True)
class Nesterov:
    """Gradient descent with Nesterov momentum.

        gradient    (n,) float32  Δ, merged from Θ − θ_m. It points *away* from the islands, so descending it moves Θ
                                  towards them
        momentum    (n,) float32  μ at version v; zeros at version 0

        μ' = decay·μ + Δ              decrement = lr·(Δ + decay·μ')

    Equal to ``optax.sgd(lr, momentum=decay, nesterov=True)``.
    """

    lr: float
    decay: float

    def initial_momentum(self, parameters: Array) -> Array:
        return np.zeros_like(parameters)

    def step(self, gradient: Array, momentum: Array) -> tuple[Array, Array]:
        next_momentum: Array = np.multiply(momentum, self.decay)
        next_momentum += gradient
        decrement: Array = np.multiply(next_momentum, self.decay)
        decrement += gradient
        decrement *= self.lr
        return decrement, next_momentum


@dataclass(frozen=True, slots=True)
class Sgd:
    """Plain gradient descent, decrement = lr·Δ. Equal to ``optax.sgd(lr)``; lr = 1 is the islands' average itself.

    It has no momentum: an empty array, which can be sliced and assigned to like any other.
    """

    lr: float

    @property
    def decay(self) -> None:
        return None

    def initial_momentum(self, parameters: Array) -> Array:
        return np.empty(0, np.float32)

    def step(self, gradient: Array, momentum: Array) -> tuple[Array, Array]:
        return self.lr * gradient, momentum


class Settings(Protocol):
    """``synchroniser.outer_optimizer`` of a job specification."""

    @property
    def kind(self) -> str: ...

    @property
    def lr(self) -> float: ...

    @property
    def momentum(self) -> float: ...


def of(settings: Settings) -> OuterOptimizer:
    """Return the optimizer that a job specification asks for."""
    return create(settings.kind, settings.lr, settings.momentum)


def slowed(optimizer: OuterOptimizer, lr_ratio: float) -> OuterOptimizer:
    """Return the optimizer at this fraction of its learning rate; at 1 with the same bits. Momentum is not affected."""
    match optimizer:
        case Nesterov() | Sgd():
            return replace(optimizer, lr=optimizer.lr * lr_ratio)
    raise InternalError(detail=f"{optimizer} has no learning rate that can be changed.")


def create(kind: str, lr: float, momentum: float) -> OuterOptimizer:
    """Return the optimizer of a job specification. Plain ``sgd`` ignores ``momentum``."""
    if kind == "nesterov":
        return Nesterov(lr, momentum)
    if kind == "sgd":
        return Sgd(lr)
    raise ConfigurationError(
        detail=f"synchroniser.outer_optimizer.kind is {kind!r}, which is unknown. Set it to 'nesterov' or 'sgd'."
    )
