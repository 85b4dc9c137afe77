"""A model of bytes so small that islands of several processes train it on two cores, which every kind of mesh splits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from learners.model import Model

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


def build(spec: Mapping[str, Any]) -> Model:
    """As ``model.factory``."""
    return Model(_initial, _loss, axes=AXES, traceable=True)


def _initial(seed: int) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(seed), len(SHAPES))
    return {name: 0.1 * jax.random.normal(key, SHAPES[name]) for name, key in zip(SHAPES, keys, strict=True)}


def _loss(parameters: Mapping[str, jax.Array], tokens: jax.Array) -> jax.Array:
    read = parameters["embed"][tokens[:, :-1]]
    read += jax.nn.relu(read @ parameters["up"]) @ parameters["down"]
    chances = jax.nn.log_softmax(read @ parameters["unembed"])
    return -jnp.mean(jnp.take_along_axis(chances, tokens[:, 1:, None], axis=-1))
