"""The outer step: from Θ and an outer gradient to the next Θ.

An optimizer is a frozen description with two pure functions; its state is one array per tensor, kept by the caller.
Steps are elementwise, so a caller may take them on any part of a tensor. What is returned is the decrement: the next Θ is
Θ − decrement, or what is published of it (``outer_state``). Nothing here knows where gradients come from.

Source: DiLoCo, arXiv:2311.08105, Algorithm 1. Both are checked against optax.
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
        """Of the momentum; None where there is none."""
        ...

    def initial_momentum(self, parameters: Array) -> Array:
        """The state at version 0."""
        ...

    def step(self, gradient: Array, momentum: Array) -> tuple[Array, Array]:
        """Return the decrement and the next momentum; the arguments stay as they are."""
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
    """The optimizer that a job specification asks for."""
    return create(settings.kind, settings.lr, settings.momentum)


def slowed(optimizer: OuterOptimizer, lr_ratio: float) -> OuterOptimizer:
    """The optimizer at this part of its learning rate; at 1 the same to the bit. Its momentum does not know of it."""
    match optimizer:
        case Nesterov() | Sgd():
            return replace(optimizer, lr=optimizer.lr * lr_ratio)
    raise InternalError(detail=f"{optimizer} has no learning rate that could be changed.")


def create(kind: str, lr: float, momentum: float) -> OuterOptimizer:
    """The optimizer of a job specification. Plain ``sgd`` has no use for ``momentum``."""
    if kind == "nesterov":
        return Nesterov(lr, momentum)
    if kind == "sgd":
        return Sgd(lr)
    raise ConfigurationError(
        detail=f"synchroniser.outer_optimizer.kind is {kind!r}, which is unknown. Use 'nesterov' or 'sgd'."
    )
