"""The built-in model: a byte-level decoder-only transformer in plain JAX, in three sizes.

A model is data: how its parameters start, and what their loss on a batch is. Parameters are a flat dictionary of
float32 tensors with plain names (``blocks.0.attention.query``), one tensor per matrix and layer, unstacked: a fragment
is a set of names, and small tensors pack evenly into many fragments. Names with ``embed`` in them are embedding-like
to the merge arithmetic; there are no biases and no norm gains, so everything else is a matrix.

This module knows nothing of optimizers, devices, data files or fragments.

Choices, for CPU cores as much as accelerators: RMS norm without gain before each half-block, rotary positions, squared
ReLU (Primer, arXiv:2109.08668; GELU costs a quarter of a nano step on a CPU), heads of 64, an unembedding of its own
that starts at zero, so that the loss before the first step is exactly ln 256.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orchestrator.errors import ConfigurationError
from orchestrator.parameters.roles import Roles

VOCABULARY_SIZE = 256
"""Tokens are bytes."""
AXES = ("layers", "experts", "vocabulary", "width", "heads", "hidden")
"""The names of dimensions: stacked layers, experts, tokens, the residual stream, all heads together, a hidden layer."""


@dataclass(frozen=True, slots=True)
class Model:
    """The model of a trainer, as a user's factory returns it.

    initialise(seed)               float32 tensors by name: a function of the seed alone. NumPy on the host; or, with
                                   ``traceable``, JAX that can be traced (``jax.random``), which is run sharded on
                                   the devices
    loss(parameters, tokens)       scalar float32, mean nats per token; tokens (batch, length + 1) int32: all but the
                                   last are read, all but the first predicted
    objective(parameters, tokens)  what a step minimises, where that is more than the loss, such as a balance of
                                   experts
    roles                          what tensors are for, by name, where the name does not say it: embedding-like,
                                   stacked by layer or expert, free of weight decay
    axes                           what a tensor's dimensions are, by name, one of ``AXES`` or None each: what a mesh
                                   splits. Of a tensor that is missing the longest dimension is split
    vocabulary_size                token values are below it
    flops_per_token(length)        floating-point operations of a training step for each token of a sequence so long,
                                   forward and backward; None where nobody has counted them
    """

    initialise: Callable[[Any], Mapping[str, Any]]
    loss: Callable[[Mapping[str, jax.Array], jax.Array], jax.Array]
    roles: Roles = field(default_factory=dict)
    axes: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)
    objective: Callable[[Mapping[str, jax.Array], jax.Array], jax.Array] | None = None
    traceable: bool = False
    vocabulary_size: int = VOCABULARY_SIZE
    flops_per_token: Callable[[int], float] | None = None


@dataclass(frozen=True, slots=True)
class Architecture:
    """``width`` is a multiple of ``head_size``; the hidden layer is four times as wide."""

    width: int
    layer_count: int
    head_size: int = 64


PRESETS = {
    "nano": Architecture(width=128, layer_count=4),
    "micro": Architecture(width=320, layer_count=8),
    "small": Architecture(width=1024, layer_count=10),
}
"""0.85, 10.0 and 126 million parameters; the largest of 24 fragments of micro or small is at most a fifth above the mean."""


def build(spec: Mapping[str, Any]) -> Model:
    """Return the model that a job specification (as plain data) asks for.

    ``model.factory`` names ``package.module:function`` of an installed package; it is called with the specification.
    Raises ConfigurationError when there is no such function or it returns something else than a ``Model``.
    """
    section = spec["model"]
    if section.get("factory"):
        return _from_factory(section["factory"], spec)
    dtype = jnp.dtype(section.get("compute_dtype", "bfloat16"))
    return transformer(PRESETS[section["preset"]], dtype)


def transformer(architecture: Architecture, compute_dtype: Any) -> Model:
    """Return the built-in transformer; matrices multiply in ``compute_dtype``, norms, softmax and loss in float32."""
    return Model(
        initialise=lambda seed: _initial_parameters(architecture, seed),
        loss=lambda parameters, tokens: _loss(architecture, jnp.dtype(compute_dtype), parameters, tokens),
    )


def parameter_shapes(architecture: Architecture) -> dict[str, tuple[int, int]]:
    """Names and shapes of all tensors; a matrix maps (inputs, outputs)."""
    width, hidden = architecture.width, 4 * architecture.width
    shapes = {"embed": (VOCABULARY_SIZE, width)}
    for layer in range(architecture.layer_count):
        for name in ("query", "key", "value", "output"):
            shapes[f"blocks.{layer}.attention.{name}"] = (width, width)
        shapes[f"blocks.{layer}.feedforward.up"] = (width, hidden)
        shapes[f"blocks.{layer}.feedforward.down"] = (hidden, width)
    shapes["unembed"] = (width, VOCABULARY_SIZE)
    return shapes


def logits(architecture: Architecture, dtype: Any, parameters: Mapping[str, jax.Array], inputs: jax.Array) -> jax.Array:
    """(batch, length) int → (batch, length, 256) float32; position t sees inputs 0 to t only."""
    length = inputs.shape[1]
    causal = jnp.where(np.tril(np.ones((length, length), bool)), 0.0, -jnp.inf).astype(jnp.float32)
    rotation = _rotation(length, architecture.head_size)
    stream = parameters["embed"][inputs].astype(dtype)
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


def _initial_parameters(architecture: Architecture, seed: int) -> dict[str, np.ndarray]:
    """Normal with variance 1/inputs; what is added to the residual stream shrinks with depth (as in GPT-2)."""
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


def _loss(architecture: Architecture, dtype: Any, parameters: Mapping[str, jax.Array], tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of each next byte, float32."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    scores = logits(architecture, dtype, parameters, inputs)
    chosen = jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(scores, axis=-1) - chosen)


def _attention(
    head_size: int, block: Mapping[str, jax.Array], x: jax.Array, causal: jax.Array, rotation: tuple[Any, Any]
) -> jax.Array:
    """Causal self-attention: (batch, length, width) → the same; scores and softmax in float32."""
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


def _rotation(length: int, head_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines (length, 1, head_size / 2) float32 of rotary positions, arXiv:2104.09864."""
    frequencies = 10_000.0 ** (-np.arange(0, head_size, 2) / head_size)
    angles = np.arange(length)[:, None, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _rotate(x: jax.Array, rotation: tuple[Any, Any]) -> jax.Array:
    cosines, sines = rotation
    first, second = jnp.split(x, 2, axis=-1)
    turned = (first * cosines - second * sines, second * cosines + first * sines)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def _from_factory(path: str, spec: Mapping[str, Any]) -> Model:
    module, _, name = path.partition(":")
    try:
        factory = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            detail=f"model.factory {path!r} cannot be imported ({error}). Name package.module:function of a package "
            "that is installed on every node."
        ) from error
    built = factory(spec)
    if not isinstance(built, Model):
        raise ConfigurationError(
            detail=f"model.factory {path!r} returned {type(built).__name__}; it must return a learners.model.Model."
        )
    return built
