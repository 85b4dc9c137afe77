"""The inner step, as it is traced: one batch in, the next parameters and optimizer state out, and the loss.

   batch ─▶ A microbatches ─▶ gradient of the objective of each ─▶ their mean ─▶ update ─▶ θ + scale · update

The mean is by the weights of the microbatches' targets, or by their pairs, if a batch has weights. With accumulation a step
holds the activations of one microbatch and the gradient twice. Its result is that of the whole
batch to float tolerance, except if an objective is not a mean over sequences, such as a balance of experts, which is then
that of each microbatch. The step reports the plain loss, whatever it minimises.

The step measures the slope by which ``optimizer_settings.DescentCheck`` judges a factory's optimizer.

This module knows nothing of devices, of shardings, nor of when a step is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax

from learners.contract import Batch
from learners.model import Model
from learners.optimizer_settings import ROUNDING
from orchestrator.errors import ConfigurationError

InnerStep = Callable[..., tuple[Any, ...]]
"""(parameters, optimizer state, tokens, scale, frozen tensors) → (parameters, optimizer state, loss, slope, gradient norm),
and of a mixture the load of its experts.

Tokens are (batch, length + 1) int32, or a ``Batch``; the scale is a float32 scalar (``inner.update_scale``); the loss
is in nats per token. The slope is the inner product of update and gradient, negative if the update points downhill; a
float32 scalar. It is 0 unless the step was built to measure it, and if the update is no larger than the parameters'
rounding. The norm is the global L2 norm of the gradient, as it is before the optimizer clips it. The load is (2,) float32,
over all layers: the largest part of a layer's choices that one expert got, and the least entropy of a layer's choices as a
part of ln E."""
ALMOST_NO_WEIGHT = 1e-30
"""Less than the weight of any token: a batch without weight has no gradient."""


NOTHING: Mapping[str, jax.Array] = MappingProxyType({})
"""No frozen tensors."""


def build(
    model: Model,
    optimizer: optax.GradientTransformation,
    *,
    z_loss: float,
    accumulation: int,
    measures_slope: bool = False,
) -> InnerStep:
    """Return the step that minimises ``model.objective``, or else its loss. It can be traced for any sharding.

    ``optimizer`` follows optax's convention: its updates are added. ``accumulation`` is how many microbatches a batch has.
    The model adds the z-loss, because only the model has logits. Raises ConfigurationError if ``z_loss`` is not 0 and the
    model has no objective other than its loss.
    """
    if z_loss and model.objective is None:
        raise ConfigurationError(
            detail=f"training.z_loss is {z_loss:g}, but this model minimises its plain loss. Set it to 0, or use a model "
            "whose objective adds it."
        )
    value_and_grad = jax.value_and_grad(_objective(model), has_aux=True)

    def mean_gradient(
        parameters: Any, tokens: jax.Array | Batch, frozen: Any
    ) -> tuple[Any, jax.Array, jax.Array | None]:
        if accumulation == 1:
            (_, (loss, shares)), gradient = value_and_grad(parameters, tokens, frozen)
            return gradient, loss, shares
        # sequences a, a + A, … are microbatch a, so that each device has some of every microbatch
        microbatches = jax.tree.map(
            lambda array: array.reshape(array.shape[0] // accumulation, accumulation, -1).swapaxes(0, 1), tokens
        )

        def add(total: Any, microbatch: jax.Array | Batch) -> tuple[Any, jax.Array | None]:
            (_, (loss, shares)), gradient = value_and_grad(parameters, microbatch, frozen)
            own_weight = model.weight_of(microbatch)
            if own_weight is not None:
                weight = own_weight / whole
                gradient, loss = jax.tree.map(lambda mean: weight * mean, (gradient, loss))
            return jax.tree.map(jnp.add, total, (gradient, loss)), shares

        of_all = model.weight_of(tokens)
        whole = accumulation if of_all is None else jnp.maximum(of_all, ALMOST_NO_WEIGHT)
        nothing = (jax.tree.map(jnp.zeros_like, parameters), jnp.zeros((), jnp.float32))
        total, every_share = jax.lax.scan(add, nothing, microbatches)
        gradient, loss = total if of_all is not None else jax.tree.map(lambda summed: summed / accumulation, total)
        # padding has experts, too, so all microbatches have as many choices
        return gradient, loss, None if every_share is None else jnp.mean(every_share, axis=0)

    def step(parameters: Any, state: Any, tokens: Any, scale: jax.Array, frozen: Any = NOTHING) -> tuple[Any, ...]:
        gradient, loss, shares = mean_gradient(parameters, tokens, frozen)
        updates, state = optimizer.update(gradient, state, parameters)
        slope = _slope(updates, gradient, parameters) if measures_slope else jnp.zeros((), jnp.float32)
        moved = jax.tree.map(lambda parameter, update: parameter + scale * update, parameters, updates)
        # the same expression as of optax.clip_by_global_norm, so that XLA computes it once
        figures = (loss, slope, optax.tree.norm(gradient))
        return (moved, state, *figures) if shares is None else (moved, state, *figures, _expert_load(shares))

    return step


def _expert_load(shares: jax.Array) -> jax.Array:
    """Return the largest share and the least entropy ratio of shares (layers, experts) that add up to one by layer."""
    count = shares.shape[1]
    entropies = -jnp.sum(jax.scipy.special.xlogy(shares, shares), axis=1)
    ratio = jnp.min(entropies) / jnp.log(jnp.float32(count)) if count > 1 else jnp.float32(1)
    return jnp.stack([jnp.max(shares), ratio])


def _slope(updates: Any, gradient: Any, parameters: Any) -> jax.Array:
    moves = _inner_product(updates, updates) > ROUNDING**2 * _inner_product(parameters, parameters)
    return jnp.where(moves, _inner_product(updates, gradient), 0.0)


def _inner_product(one: Any, other: Any) -> jax.Array:
    products = jax.tree.map(lambda left, right: jnp.sum(left * right, dtype=jnp.float32), one, other)
    return jnp.sum(jnp.stack(jax.tree.leaves(products)))


def with_frozen(parameters: Any, frozen: Any) -> Any:
    """Return all tensors of the model, for its loss."""
    return {**frozen, **parameters} if frozen else parameters


def _objective(model: Model) -> Callable[[Any, Any, Any], tuple[jax.Array, tuple[jax.Array, jax.Array | None]]]:
    """Return a function for the objective, the loss and the shares of experts, of parameters, tokens and frozen tensors."""

    def every(parameters: Any, tokens: Any, frozen: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array | None]]:
        tensors = with_frozen(parameters, frozen)
        if model.measured is not None:
            objective, loss, shares = model.measured(tensors, tokens)
            return objective, (loss, shares)
        if model.objective is not None:
            objective, loss = model.objective(tensors, tokens)
            return objective, (loss, None)
        loss = model.loss(tensors, tokens)
        return loss, (loss, None)

    return every
