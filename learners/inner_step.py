"""The inner step, as it is traced: one batch in, the next parameters and optimizer state out, and the loss.

    batch ─▶ A microbatches ─▶ gradient of the objective of each ─▶ their mean ─▶ update ─▶ θ − lr · update

With accumulation a step holds the activations of one microbatch and the gradient twice; its result is that of the whole
batch to float tolerance, except where an objective is no mean over sequences, such as a balance of experts, which then is
each microbatch's own. What is reported is the plain loss, whatever is minimised.

This module knows nothing of devices, of where arrays lie, nor of when a step is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from learners.contract import accumulation_of
from learners.model import Model
from orchestrator.errors import ConfigurationError

InnerStep = Callable[[Any, Any, jax.Array, jax.Array], tuple[Any, Any, jax.Array]]
"""(parameters, optimizer state, tokens, learning rate) → (parameters, optimizer state, loss).

Tokens are (batch, length + 1) int32; the learning rate is a float32 scalar; the loss is in nats per token."""


def build(spec: Mapping[str, Any], model: Model, optimizer: optax.GradientTransformation) -> InnerStep:
    """Return the step that minimises ``model.objective``, or its loss; it can be traced for any sharding.

    ``spec`` is the job specification as plain data, of an island or of none. Its z-loss is the model's to add, for only the
    model has logits. Raises ConfigurationError where it wants one and the model minimises nothing but its loss.
    """
    z_loss, accumulation = spec["training"]["z_loss"], accumulation_of(spec)
    if z_loss and model.objective is None:
        raise ConfigurationError(
            detail=f"training.z_loss is {z_loss:g}, and this model minimises its plain loss. Set it to 0, or use a model "
            "whose objective takes it from the specification."
        )
    value_and_grad = jax.value_and_grad(_objective(model), has_aux=True)

    def mean_gradient(parameters: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        if accumulation == 1:
            (_, loss), gradient = value_and_grad(parameters, tokens)
            return gradient, loss
        batch, length = tokens.shape
        # sequences a, a + A, … are microbatch a: where sequences lie on several devices, each device has some of every one
        microbatches = tokens.reshape(batch // accumulation, accumulation, length).swapaxes(0, 1)

        def add(total: Any, microbatch: jax.Array) -> tuple[Any, None]:
            (_, loss), gradient = value_and_grad(parameters, microbatch)
            return jax.tree.map(jnp.add, total, (gradient, loss)), None

        nothing = (jax.tree.map(jnp.zeros_like, parameters), jnp.zeros((), jnp.float32))
        total, _ = jax.lax.scan(add, nothing, microbatches)
        gradient, loss = jax.tree.map(lambda summed: summed / accumulation, total)
        return gradient, loss

    def step(parameters: Any, state: Any, tokens: jax.Array, lr: jax.Array) -> tuple[Any, Any, jax.Array]:
        gradient, loss = mean_gradient(parameters, tokens)
        updates, state = optimizer.update(gradient, state, parameters)
        return jax.tree.map(lambda parameter, update: parameter - lr * update, parameters, updates), state, loss

    return step


def _objective(model: Model) -> Callable[[Any, jax.Array], tuple[jax.Array, jax.Array]]:
    """What is minimised, and the loss."""
    if model.objective is not None:
        return model.objective

    def loss_alone(parameters: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss = model.loss(parameters, tokens)
        return loss, loss

    return loss_alone
