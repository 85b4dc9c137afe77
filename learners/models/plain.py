"""The plain transformer: a small byte-level decoder in JAX, for jobs on a few CPU cores as well as on accelerators.

Parameters are a flat dictionary of float32 tensors with plain names (``blocks.0.attention.query``), one tensor per matrix
and layer, unstacked: a fragment is a set of names, and small tensors pack evenly into many fragments. Names that contain
``embed`` are embedding-like to the merge arithmetic; there are no biases and no norm gains, so everything else is a matrix.

This module knows nothing of optimizers, devices, data files or fragments.

Choices: RMS norm without gain before each half-block, rotary positions, squared ReLU (Primer, arXiv:2109.08668; GELU costs a
quarter of a nano step on a CPU), heads of 64, and a separate unembedding that starts at zero, so that the loss before the
first step is exactly that of guessing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from learners.contract import Batch
from learners.models.model import Model, log_likelihoods, losses
from orchestrator.models.presets import Architecture, parameter_shapes


def transformer(architecture: Architecture, compute_dtype: Any, z_loss: float = 0.0) -> Model:
    """Return the built-in transformer. Matrices multiply in ``compute_dtype``; norms, softmax and loss are float32."""
    dtype = jnp.dtype(compute_dtype)

    def scores(parameters: Mapping[str, jax.Array], inputs: Batch) -> jax.Array:
        return logits(architecture, dtype, parameters, inputs)

    return Model(
        initialise=lambda seed: _initial_parameters(architecture, seed),
        **losses(scores, z_loss),
        log_likelihoods=lambda parameters, batch: log_likelihoods(scores, parameters, batch),
        takes_batches=True,
        axes=architecture.dimensions,
        vocabulary_size=architecture.vocabulary_size,
        flops_per_token=lambda length: _flops_per_token(architecture, length),
    )


def logits(
    architecture: Architecture, dtype: Any, parameters: Mapping[str, jax.Array], inputs: jax.Array | Batch
) -> jax.Array:
    """Map (batch, length) int to (batch, length, vocabulary) float32.

    Position t sees only those of inputs 0 to t that are in its segment.
    """
    batch = Batch.of(inputs)
    length = batch.tokens.shape[1]
    visible: Any = np.tril(np.ones((length, length), bool))
    if batch.segments is not None:
        visible = visible & (batch.segments[:, None, :, None] == batch.segments[:, None, None, :])
    causal = jnp.where(visible, 0.0, -jnp.inf).astype(jnp.float32)
    rotation = _rotation(length, architecture.head_size)
    if batch.positions is not None:
        rotation = (jnp.asarray(rotation[0])[batch.positions], jnp.asarray(rotation[1])[batch.positions])
    stream = parameters["embed"][batch.tokens].astype(dtype)
    for layer in range(architecture.layer_count):
        block = {
            name: parameters[f"blocks.{layer}.{name}"].astype(dtype)
            for name in (
                *(f"attention.{part}" for part in ("query", "key", "value", "output")),
                *(f"feedforward.{part}" for part in ("up", "down")),
            )
        }
        stream = stream + _attention(architecture.head_size, block, _normalise(stream), causal, rotation)
        hidden = _normalise(stream) @ block["feedforward.up"]
        stream = stream + jnp.square(jax.nn.relu(hidden)) @ block["feedforward.down"]
    return (_normalise(stream) @ parameters["unembed"].astype(dtype)).astype(jnp.float32)


def _flops_per_token(architecture: Architecture, length: int) -> float:
    """Count matrix products, forward and backward; in attention those that the mask leaves, (length + 1) / 2 positions."""
    matrices = architecture.parameter_count - architecture.vocabulary_size * architecture.width
    return 6.0 * matrices + 12.0 * architecture.layer_count * architecture.width * (length + 1) / 2


def _initial_parameters(architecture: Architecture, seed: int) -> dict[str, np.ndarray]:
    """Draw parameters: normal with variance 1/inputs; those added to the residual stream shrink with depth (as in GPT-2)."""
    generator = np.random.default_rng(seed)
    parameters = {}
    for name, shape in parameter_shapes(architecture).items():
        if name == "unembed":
            parameters[name] = np.zeros(shape, np.float32)
            continue
        deviation = 1.0 if name == "embed" else 1 / math.sqrt(shape[0])
        if name.endswith((".output", ".down")):
            deviation /= math.sqrt(2 * architecture.layer_count)
        parameters[name] = generator.standard_normal(shape, np.float32) * np.float32(deviation)
    return parameters


def _attention(
    head_size: int, block: Mapping[str, jax.Array], x: jax.Array, causal: jax.Array, rotation: tuple[Any, Any]
) -> jax.Array:
    """Apply causal self-attention: (batch, length, width) → the same; scores and softmax in float32."""
    batch, length, width = x.shape
    heads = (batch, length, width // head_size, head_size)
    query = _rotate((x @ block["attention.query"]).reshape(heads), rotation)
    key = _rotate((x @ block["attention.key"]).reshape(heads), rotation)
    value = (x @ block["attention.value"]).reshape(heads)
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(scores * head_size**-0.5 + causal, axis=-1).astype(x.dtype)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
    return mixed.reshape(batch, length, width) @ block["attention.output"]


def _normalise(x: jax.Array) -> jax.Array:
    """Scale each position to root mean square 1; computed in float32, returned in x's own type."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)


def _rotation(length: int, head_size: int) -> tuple[Any, Any]:
    """Return cosines and sines (length, 1, head_size / 2) float32 of rotary positions, arXiv:2104.09864."""
    frequencies = 10_000.0 ** (-np.arange(0, head_size, 2) / head_size)
    angles = np.arange(length)[:, None, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _rotate(x: jax.Array, rotation: tuple[Any, Any]) -> jax.Array:
    cosines, sines = rotation
    first, second = jnp.split(x, 2, axis=-1)
    turned = (first * cosines - second * sines, second * cosines + first * sines)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
