"""What a model is to a trainer: data, and functions for its initial parameters and its loss on a batch.

This module knows no particular model; ``learners.model.build`` builds the one that a specification asks for. ``losses``
derives the loss of a language model, and what a step minimises if that differs, from the same logits.

Source: the z-loss is that of PaLM, arXiv:2204.02311, section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from learners.contract import Batch
from orchestrator.models.presets import BYTE_VALUES
from orchestrator.parameters.pieces import Roles

Tensors = Mapping[str, jax.Array]
Logits = Callable[[Tensors, Batch], jax.Array]
"""Maps what is read, (batch, length), to logits (batch, length, vocabulary)."""
AXES = ("layers", "experts", "vocabulary", "width", "heads", "hidden")
"""The names of dimensions: stacked layers, experts, tokens, the residual stream, all heads together, a hidden layer."""


jax.tree_util.register_dataclass(Batch, ("tokens", "weights", "segments", "positions"), ())


def losses(logits: Logits, z_loss: float) -> dict[str, Any]:
    """Return ``Model.loss``, and ``Model.objective`` if ``z_loss`` weighs the mean of log²Z, Z being a softmax's divisor."""

    def both(parameters: Tensors, tokens: jax.Array | Batch) -> tuple[jax.Array, jax.Array]:
        batch = Batch.of(tokens)
        scores, weights = logits(parameters, batch.inputs).astype(jnp.float32), batch.target_weights
        log_z = jax.nn.logsumexp(scores, axis=-1)
        chosen = jnp.take_along_axis(scores, batch.targets[..., None], axis=-1)[..., 0]
        loss = weighted_mean(log_z - chosen, weights)
        return loss + z_loss * weighted_mean(log_z**2, weights), loss

    return {"loss": lambda parameters, tokens: both(parameters, tokens)[1], "objective": both if z_loss else None}


def weighted_mean(values: jax.Array, weights: jax.Array | None) -> jax.Array:
    """Return Σ w·x / Σ w, 0 if all weights are 0; without weights the plain mean. Arrays of one shape to a scalar."""
    if weights is None:
        return jnp.mean(values)
    total = jnp.sum(weights)
    return jnp.sum(weights * values) / jnp.where(total > 0, total, 1.0)


def log_likelihoods(logits: Logits, parameters: Tensors, batch: Batch) -> jax.Array:
    """Return ln of each target's probability: (rows, length) float32."""
    scores = logits(parameters, batch.inputs).astype(jnp.float32)
    chosen = jnp.take_along_axis(scores, batch.targets[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(scores, axis=-1)


def preferences(
    own: jax.Array, reference: jax.Array, batch: Batch, beta: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the loss of DPO, the share of pairs that prefer the chosen answer, and their mean margin; scalars.

        own, reference   (rows, length) float32  ln of each target's probability by the trained and by the first model
        margin           beta · ((ln π(chosen) − ln π₀(chosen)) − (ln π(rejected) − ln π₀(rejected))), in nats
        loss             the mean of −ln σ(margin) over pairs

    Segments 1 and 2 of a row are its first pair, 3 and 4 the next. Source: arXiv:2305.18290, equation 7; checked against
    trl's formula in ``tests/learners/test_preferences.py``.
    """
    is_pair = pairs(batch)
    gains = _by_segment(batch.target_weights * (own - reference), batch)
    margins = beta * (gains[:, 1:-1:2] - gains[:, 2::2])
    return tuple(  # type: ignore[return-value]  # of three
        weighted_mean(values, is_pair) for values in (jax.nn.softplus(-margins), jnp.float32(margins > 0), margins)
    )


def pairs(batch: Batch) -> jax.Array:
    """Return 1 for each pair of segments that is there, else 0: (rows, pairs that a row may have)."""
    counts = _by_segment(batch.target_weights, batch)
    return (counts[:, 2::2] > 0).astype(jnp.float32)


def _by_segment(values: jax.Array, batch: Batch) -> jax.Array:
    """Return the sums of values of targets over the segments of each row: (rows, an odd number of segments)."""
    own = batch.segments[:, 1:]
    count = own.shape[1] // 2 * 2 + 3
    sums: jax.Array = jax.vmap(lambda row, numbers: jax.ops.segment_sum(row, numbers, num_segments=count))(values, own)
    return sums


@dataclass(frozen=True, slots=True)
class Frozen:
    """The tensors of a model that are not trained, by name. Every process gets them by itself, and they never travel.

    outline    their shapes, with the types in which they are held
    value      returns one of them, as ``Model.initialise`` does: NumPy, or JAX that can be traced
    axes       as ``Model.axes``, and ``roles`` as ``Model.roles``, of all tensors of the model
    model      the shapes of these: a mesh must divide them, and not the adapters, which are small
    """

    outline: Mapping[str, jax.ShapeDtypeStruct]
    value: Callable[[str], Any]
    traceable: bool
    axes: Mapping[str, tuple[str | None, ...]]
    roles: Roles
    model: Mapping[str, tuple[int, ...]]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.outline.items()}


@dataclass(frozen=True, slots=True)
class Model:
    """The model of a trainer, as a user's factory returns it.

    initialise(seed)               float32 tensors by name, which depend only on the seed. NumPy on the host; or, with
                                   ``traceable``, JAX that can be traced (``jax.random``), which is run sharded on
                                   the devices
    loss(parameters, tokens)       scalar float32, mean nats per token; tokens (batch, length + 1) int32: all but the
                                   last are read, all but the first predicted
    objective(parameters, tokens)  what a step minimises, if that is more than the loss (for a balance of experts,
                                   say); and the loss, from the same forward pass
    measured(parameters, tokens)   of a mixture: objective and loss as above, and the part of each layer's choices that each
                                   expert got, (layers, experts) float32. A step then minimises this objective
    log_likelihoods(parameters, batch)
                                   ln of each target's probability, (rows, length) float32, for objectives that compare
                                   with the model of before; None: the model cannot tell
    preferences(parameters, batch) loss, accuracy and margin of ``preferences``, if the objective is one of pairs, whose
                                   mean is over pairs
    takes_batches                  whether loss and objective also take a ``Batch`` with weights, segments and positions
    roles                          the roles of tensors whose names do not show them: embedding-like, stacked by layer
                                   or expert, free of weight decay
    axes                           the names of each tensor's dimensions, from ``AXES`` or None, by which a mesh splits
                                   it. Of a tensor that is missing here the longest dimension is split
    vocabulary_size                token values are below it
    flops_per_token(length)        floating-point operations of a training step per token of a sequence of this length,
                                   forward and backward; None if unknown
    compute_dtypes                 the type to which the loss casts a tensor before its use, if that is not float32: a
                                   tensor that is not trained is held in it
    applies_adapters               the loss applies ``NAME.lora_a`` and ``NAME.lora_b`` to the matrix NAME if it gets them
                                   (``orchestrator.models.trainable``); otherwise they are added to the matrix
    frozen                         what the loss needs besides the parameters; None if that is nothing
    initial_weights(pieces)        these pieces of version 0 (None: all tensors), if that is not the result of
                                   ``initialise``: NumPy float32 by name. Called only where version 0 is made; islands
                                   get theirs from the synchroniser
    """

    initialise: Callable[[Any], Mapping[str, Any]]
    loss: Callable[[Mapping[str, jax.Array], Any], jax.Array]
    roles: Roles = field(default_factory=dict)
    axes: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)
    objective: Callable[[Mapping[str, jax.Array], Any], tuple[jax.Array, jax.Array]] | None = None
    measured: Callable[[Mapping[str, jax.Array], Any], tuple[jax.Array, jax.Array, jax.Array]] | None = None
    log_likelihoods: Callable[[Mapping[str, jax.Array], Batch], jax.Array] | None = None
    preferences: Callable[[Mapping[str, jax.Array], Batch], tuple[jax.Array, jax.Array, jax.Array]] | None = None
    traceable: bool = False
    takes_batches: bool = False
    vocabulary_size: int = BYTE_VALUES
    flops_per_token: Callable[[int], float] | None = None
    initial_weights: Callable[[Iterable[str] | None], Mapping[str, Any]] | None = None
    compute_dtypes: Mapping[str, Any] = field(default_factory=dict)
    applies_adapters: bool = False
    frozen: Frozen | None = None

    def weight_of(self, tokens: Any) -> jax.Array | None:
        """Return how much a batch counts in a mean over batches: its pairs or its learned tokens; None: as its rows."""
        batch = Batch.of(tokens)
        if self.preferences is not None:
            return jnp.sum(pairs(batch))
        weights = batch.target_weights
        return None if weights is None else jnp.sum(weights)
