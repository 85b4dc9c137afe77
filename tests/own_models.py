"""Models of a user, as ``model.factory``: the smallest built-in one, a tiny one of bytes, and one whose code is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from learners.model import Model
from learners.models.plain import transformer
from orchestrator.models.presets import PLAIN, Architecture

WIDTH, HIDDEN, VOCABULARY = 16, 32, 256
SHAPES = {
    "embed": (VOCABULARY, WIDTH),
    "up": (WIDTH, HIDDEN),
    "down": (HIDDEN, WIDTH),
    "unembed": (WIDTH, VOCABULARY),
}
AXES = {
    "embed": ("vocabulary", "width"),
    "up": ("width", "hidden"),
    "down": ("hidden", "width"),
    "unembed": ("width", "vocabulary"),
}


def smallest(spec: Mapping[str, Any]) -> Model:
    """Return the built-in transformer with one block of width 64."""
    return transformer(Architecture(width=64, layer_count=1), jnp.float32)


def tiny(spec: Mapping[str, Any]) -> Model:
    """Return a model of bytes so small that islands of several processes train it on two cores. Every kind of mesh
    splits it.
    """
    return Model(_initial, _loss, axes=AXES, traceable=True)


def faulty(spec: Mapping[str, Any]) -> Model:
    """Raise where an island builds the model, and only there: the evaluator can build it, so that the job begins."""
    import ray

    name = ray.get_runtime_context().get_actor_name() or ""
    print(f"my factory is called in {name}")
    if ":evaluator-" not in name:
        raise ValueError("my own mistake")
    return transformer(PLAIN["nano"], "float32")


def _initial(seed: int) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(seed), len(SHAPES))
    return {name: 0.1 * jax.random.normal(key, SHAPES[name]) for name, key in zip(SHAPES, keys, strict=True)}


def _loss(parameters: Mapping[str, jax.Array], tokens: jax.Array) -> jax.Array:
    read = parameters["embed"][tokens[:, :-1]]
    read += jax.nn.relu(read @ parameters["up"]) @ parameters["down"]
    chances = jax.nn.log_softmax(read @ parameters["unembed"])
    return -jnp.mean(jnp.take_along_axis(chances, tokens[:, 1:, None], axis=-1))
