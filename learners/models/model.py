"""What a model is to whoever trains it: data, with functions for how its parameters start and what they lose on a batch.

This module knows no model; ``learners.model.build`` makes the one that a specification asks for.

The loss of a language model, and what a step minimises where that is more, both from the same logits.

Source: the z-loss is that of PaLM, arXiv:2204.02311, section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from orchestrator.models.presets import BYTE_VALUES
from orchestrator.parameters.pieces import Roles

Tensors = Mapping[str, jax.Array]
Logits = Callable[[Tensors, jax.Array], jax.Array]
"""(batch, length, vocabulary) of tokens (batch, length)."""
AXES = ("layers", "experts", "vocabulary", "width", "heads", "hidden")
"""The names of dimensions: stacked layers, experts, tokens, the residual stream, all heads together, a hidden layer."""


def losses(logits: Logits, z_loss: float) -> dict[str, Any]:
    """``Model.loss``, and ``Model.objective`` where the mean of log²Z counts by ``z_loss``, Z being a softmax's divisor."""

    def both(parameters: Tensors, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores = logits(parameters, tokens[:, :-1]).astype(jnp.float32)
        log_z = jax.nn.logsumexp(scores, axis=-1)
        chosen = jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)[..., 0]
        loss = jnp.mean(log_z - chosen)
        return loss + z_loss * jnp.mean(log_z**2), loss

    return {"loss": lambda parameters, tokens: both(parameters, tokens)[1], "objective": both if z_loss else None}


@dataclass(frozen=True, slots=True)
class Model:
    """The model of a trainer, as a user's factory returns it.

    initialise(seed)               float32 tensors by name: a function of the seed alone. NumPy on the host; or, with
                                   ``traceable``, JAX that can be traced (``jax.random``), which is run sharded on
                                   the devices
    loss(parameters, tokens)       scalar float32, mean nats per token; tokens (batch, length + 1) int32: all but the
                                   last are read, all but the first predicted
    objective(parameters, tokens)  what a step minimises, where that is more than the loss, such as a balance of
                                   experts; and the loss, from the same forward pass
    roles                          what tensors are for, by name, where the name does not say it: embedding-like,
                                   stacked by layer or expert, free of weight decay
    axes                           what a tensor's dimensions are, by name, one of ``AXES`` or None each: what a mesh
                                   splits. Of a tensor that is missing the longest dimension is split
    vocabulary_size                token values are below it
    flops_per_token(length)        floating-point operations of a training step for each token of a sequence so long,
                                   forward and backward; None where nobody has counted them
    initial_weights(pieces)        these pieces of version 0, or all tensors with None, where that is not what
                                   ``initialise`` makes: NumPy float32 by name. Only whoever makes version 0 calls it;
                                   islands get theirs from the synchroniser
    """

    initialise: Callable[[Any], Mapping[str, Any]]
    loss: Callable[[Mapping[str, jax.Array], jax.Array], jax.Array]
    roles: Roles = field(default_factory=dict)
    axes: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)
    objective: Callable[[Mapping[str, jax.Array], jax.Array], tuple[jax.Array, jax.Array]] | None = None
    traceable: bool = False
    vocabulary_size: int = BYTE_VALUES
    flops_per_token: Callable[[int], float] | None = None
    initial_weights: Callable[[Iterable[str] | None], Mapping[str, Any]] | None = None
