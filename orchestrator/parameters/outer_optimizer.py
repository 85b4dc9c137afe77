"""The outer step: from Θ and an outer gradient to the next Θ.

An optimizer is a frozen description; the caller keeps its state, one flat float32 array per tensor: the *moments*, each with
as many values as the tensor, one after another, and with Adam the number of steps taken. Steps are elementwise, so a caller
may take them on any part of a tensor. A step returns the decrement: the next Θ is Θ − decrement, or what is published of it
(``outer_state``). Nothing here knows where gradients come from.

    kind        moments   steps counted   equal to
    sgd            0           no         optax.sgd(lr)
    momentum       1           no         optax.sgd(lr, momentum=decay)
    nesterov       1           no         optax.sgd(lr, momentum=decay, nesterov=True)
    adam           2           yes        optax.adam(lr, b1=beta1, b2=beta2, eps=epsilon)

``Rule`` is one step as numbers, which the kernels take; ``taken`` defines it in NumPy. Each operation is one float32
operation of IEEE 754, and Adam's corrections come from products alone, so a step has the same bits on every machine.

Source: DiLoCo, arXiv:2311.08105, Algorithm 1; Adam: Kingma and Ba, arXiv:1412.6980; as an outer optimizer: Reddi et al.,
arXiv:2003.00295. All are checked against optax.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np

from orchestrator.errors import ConfigurationError, InternalError
from orchestrator.parameters.tensors import Array

STEPS_COUNTED_MAX = 1 << 24
"""Float32 counts so far exactly. The corrections of Adam are 1 long before, so the count stays there."""


class Kind(IntEnum):
    """The rules of the kernels, with their numbers in ``kernels.h``."""

    SGD = 0
    MOMENTUM = 1
    NESTEROV = 2
    ADAM = 3


class Rule(NamedTuple):
    """One outer step. What a kind does not use is 0.

    decay           of the momentum, or of Adam's first moment
    decay_square    of Adam's second moment
    scale           1/(1 − beta1ᵗ) at Adam's step t = 1, 2, …
    scale_square    1/(1 − beta2ᵗ)
    """

    kind: Kind
    lr: float
    decay: float = 0.0
    decay_square: float = 0.0
    scale: float = 0.0
    scale_square: float = 0.0
    epsilon: float = 0.0


class OuterOptimizer(Protocol):
    @property
    def lr(self) -> float: ...

    @property
    def moment_count(self) -> int:
        """Return the number of arrays in its state that have a value for each of the tensor's."""
        ...

    @property
    def counts_steps(self) -> bool:
        """Return whether the state ends with the number of steps taken."""
        ...

    def rule(self, steps_taken: int) -> Rule:
        """Return the step after so many steps."""
        ...


@dataclass(frozen=True, slots=True)
class Nesterov:
    """Gradient descent with Nesterov momentum.

    gradient    (n,) float32  Δ, merged from Θ − θ_m. It points *away* from the islands, so descending it moves Θ
                              towards them
    momentum    (n,) float32  μ at version v; zeros at version 0

    μ' = decay·μ + Δ              decrement = lr·(Δ + decay·μ')
    """

    lr: float
    decay: float
    moment_count = 1
    counts_steps = False

    def rule(self, steps_taken: int) -> Rule:
        return Rule(Kind.NESTEROV, self.lr, self.decay)


@dataclass(frozen=True, slots=True)
class Momentum:
    """Gradient descent with heavy-ball momentum: μ' = decay·μ + Δ, decrement = lr·μ'."""

    lr: float
    decay: float
    moment_count = 1
    counts_steps = False

    def rule(self, steps_taken: int) -> Rule:
        return Rule(Kind.MOMENTUM, self.lr, self.decay)


@dataclass(frozen=True, slots=True)
class Sgd:
    """Plain gradient descent, decrement = lr·Δ; lr = 1 is the islands' average itself.

    Its state is an empty array.
    """

    lr: float
    moment_count = 0
    counts_steps = False

    def rule(self, steps_taken: int) -> Rule:
        return Rule(Kind.SGD, self.lr)


@dataclass(frozen=True, slots=True)
class Adam:
    """Adam. t counts the steps of a fragment since its moments were zero, so a fragment that lost them begins at 1 again.

    m' = beta1·m + (1 − beta1)·Δ            v' = beta2·v + (1 − beta2)·Δ²
    decrement = lr · m'/(1 − beta1ᵗ) / (√(v'/(1 − beta2ᵗ)) + epsilon)
    """

    lr: float
    beta1: float
    beta2: float
    epsilon: float
    moment_count = 2
    counts_steps = True

    def rule(self, steps_taken: int) -> Rule:
        t = steps_taken + 1
        scales = 1 / (1 - _power(self.beta1, t)), 1 / (1 - _power(self.beta2, t))
        return Rule(Kind.ADAM, self.lr, self.beta1, self.beta2, *scales, self.epsilon)


def _power(base: float, exponent: int) -> float:
    """Return the power by products alone, which every machine rounds in the same way."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base, exponent = base * base, exponent >> 1
    return result


def taken(rule: Rule, gradient: Array, moments: Array) -> tuple[Array, Array]:
    """Return the decrement and the next moments; ``moments`` are (moment_count, n). The arguments do not change."""
    match rule.kind:
        case Kind.SGD:
            return rule.lr * gradient, moments
        case Kind.MOMENTUM | Kind.NESTEROV:
            after = np.multiply(moments, rule.decay)
            after += gradient
            decrement: Array = after[0].copy()
            if rule.kind is Kind.NESTEROV:
                decrement *= rule.decay
                decrement += gradient
            decrement *= rule.lr
            return decrement, after
        case Kind.ADAM:
            fresh = np.stack(((1 - rule.decay) * gradient, (1 - rule.decay_square) * (gradient * gradient)))
            after = np.array([[rule.decay], [rule.decay_square]], np.float32) * moments
            after += fresh
            width = np.sqrt(after[1] * rule.scale_square)
            width += rule.epsilon
            return rule.lr * ((after[0] * rule.scale) / width), after


def state_size(optimizer: OuterOptimizer, value_count: int) -> int:
    """Return the number of values in the state of a tensor of so many."""
    return optimizer.moment_count * value_count + optimizer.counts_steps


def initial_state(optimizer: OuterOptimizer, value_count: int) -> Array:
    """Return the state before the first step."""
    return np.zeros(state_size(optimizer, value_count), np.float32)


def moments_of(optimizer: OuterOptimizer, state: Array) -> tuple[Array, int]:
    """Return the moments of a tensor, (moment_count, n), as a view of its state, and the number of steps taken."""
    if not optimizer.counts_steps:
        return (state.reshape(optimizer.moment_count, -1) if optimizer.moment_count else state.reshape(0, 0)), 0
    return state[:-1].reshape(optimizer.moment_count, -1), int(state[-1])


def step(optimizer: OuterOptimizer, gradient: Array, state: Array) -> tuple[Array, Array]:
    """Return the decrement and the next state. The arguments do not change."""
    moments, steps_taken = moments_of(optimizer, state)
    decrement, after = taken(optimizer.rule(steps_taken), gradient, moments)
    next_state = np.empty_like(state)
    next_state[: after.size] = after.reshape(-1)
    count_step(optimizer, next_state, steps_taken)
    return decrement, next_state


def count_step(optimizer: OuterOptimizer, next_state: Array, steps_taken: int) -> None:
    """Write the number of steps into the next state, if the optimizer counts them."""
    if optimizer.counts_steps:
        next_state[-1] = min(steps_taken + 1, STEPS_COUNTED_MAX)


class Settings(Protocol):
    """``synchroniser.outer_optimizer`` of a job specification."""

    @property
    def kind(self) -> str: ...

    @property
    def lr(self) -> float: ...

    @property
    def momentum(self) -> float: ...

    @property
    def beta1(self) -> float: ...

    @property
    def beta2(self) -> float: ...

    @property
    def epsilon(self) -> float: ...

    @property
    def clip_norm(self) -> float | None: ...


def of(settings: Settings) -> OuterOptimizer:
    """Return the optimizer that a job specification asks for. Settings of other kinds have no effect."""
    match settings.kind:
        case "nesterov":
            return Nesterov(settings.lr, settings.momentum)
        case "momentum":
            return Momentum(settings.lr, settings.momentum)
        case "sgd":
            return Sgd(settings.lr)
        case "adam":
            return Adam(settings.lr, settings.beta1, settings.beta2, settings.epsilon)
    raise ConfigurationError(
        detail=f"synchroniser.outer_optimizer.kind is {settings.kind!r}, which is unknown. "
        f"Set it to one of {', '.join(kind.name.lower() for kind in Kind)}."
    )


def slowed(optimizer: OuterOptimizer, lr_ratio: float) -> OuterOptimizer:
    """Return the optimizer at this fraction of its learning rate; at 1 with the same bits. Moments are not affected."""
    match optimizer:
        case Nesterov() | Momentum() | Sgd() | Adam():
            return replace(optimizer, lr=optimizer.lr * lr_ratio)
    raise InternalError(detail=f"{optimizer} has no learning rate that can be changed.")
