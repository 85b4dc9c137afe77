"""The model that a job specification asks for: a preset, a decoder by configuration, or a factory of somebody's package.

Responsible for choosing and for refusing what is none. Refuses to know how a model computes (``learners.models``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import jax.numpy as jnp

from learners.factories import imported
from learners.models import decoder, modules
from learners.models.model import AXES, Model
from learners.models.plain import transformer
from orchestrator.errors import ConfigurationError
from orchestrator.models.huggingface.weights import Weights
from orchestrator.models.plain import Architecture
from orchestrator.roots import AllowedRoots
from orchestrator.sections import ModelSection

__all__ = ["AXES", "Model", "build"]

NOWHERE = AllowedRoots()


def build(spec: Mapping[str, Any]) -> Model:
    """Return the model that a job specification (as plain data) asks for.

    ``model.factory`` names ``package.module:function`` of an installed package; it is called with the specification.
    Raises ConfigurationError when there is no such function or it returns neither a ``Model`` nor a module
    (``learners.models.modules``).
    """
    section = ModelSection.model_validate(spec["model"])
    network, z_loss = section.network, spec.get("training", {}).get("z_loss", 0.0)
    if network is None:
        return _from_factory(section.factory or "", spec)
    dtype = jnp.dtype(section.compute_dtype)
    if isinstance(network, Architecture):
        return transformer(network, dtype, z_loss)
    built = decoder.decoder(network, dtype, section.remat, z_loss)
    if section.initial_weights is None:
        return built
    folder, roots = section.initial_weights, spec.get("roots", NOWHERE)
    weights = cache(lambda: Weights(network, folder, roots))
    return replace(built, initial_weights=lambda pieces: weights().taken(pieces))


def _from_factory(path: str, spec: Mapping[str, Any]) -> Model:
    factory = imported("model.factory", path)
    built = factory(spec)
    own = (
        built
        if isinstance(built, Model)
        else modules.model_of(built, lambda seed: factory({**spec, "seed": seed}), spec["training"]["z_loss"])
    )
    if own is None:
        raise ConfigurationError(
            detail=f"model.factory {path!r} returned {type(built).__name__}; it must return a learners.model.Model, or a "
            "module of Flax NNX or Equinox."
        )
    return own
