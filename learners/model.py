"""The model that a job specification asks for: a preset, a decoder by configuration, or a factory of a user's package.

It chooses the model and refuses anything that is not one. How a model computes is in ``learners.models``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import jax.numpy as jnp

from learners.factories import called, guarded
from learners.island_spec import Document, IslandSpec
from learners.models import decoder, modules
from learners.models.model import AXES, Model
from learners.models.plain import transformer
from orchestrator.errors import ConfigurationError
from orchestrator.models.huggingface.weights import Weights
from orchestrator.models.presets import Architecture

__all__ = ["AXES", "Model", "build"]


def build(spec: IslandSpec | Document) -> Model:
    """Return the model that a job specification asks for, parsed or as plain data.

    ``model.factory`` names ``package.module:function`` of an installed package, which is called with the specification.
    Raises ConfigurationError if there is no such function, or if it returns neither a ``Model`` nor a module
    (``learners.models.modules``).
    """
    spec = IslandSpec.of(spec)
    section, z_loss = spec.job.model, spec.job.training.z_loss
    network = section.network
    if network is None:
        return _from_factory(section.factory or "", spec)
    dtype = jnp.dtype(section.compute_dtype)
    if isinstance(network, Architecture):
        return transformer(network, dtype, z_loss)
    built = decoder.decoder(network, dtype, section.remat, z_loss)
    if section.initial_weights is None:
        return built
    folder, roots = section.initial_weights, spec.roots
    weights = cache(lambda: Weights(network, folder, roots))
    return replace(built, initial_weights=lambda pieces: weights().taken(pieces))


def _from_factory(path: str, spec: IslandSpec) -> Model:
    def make(seed: Any) -> Any:
        return called("model.factory", path, {**spec.document, "seed": seed})

    built = called("model.factory", path, spec.document)
    own = built if isinstance(built, Model) else modules.model_of(built, make, spec.job.training.z_loss)
    if own is None:
        raise ConfigurationError(
            detail=f"model.factory {path!r} returned {type(built).__name__}; it must return a learners.model.Model, or a "
            "module of Flax NNX or Equinox."
        )
    return _checked(path, own)


def _checked(path: str, own: Model) -> Model:
    """Return the model with functions that raise ConfigurationError for errors and for results that cannot be trained."""
    subject = f"{{}} of the model from model.factory {path!r}"
    initialise = guarded(subject.format("initialise"), own.initialise)

    def sound_parameters(seed: Any) -> Mapping[str, Any]:
        tensors = initialise(seed)
        what = _wrong_with(tensors, own.traceable)
        if what:
            raise ConfigurationError(
                detail=f"{subject.format('initialise')} returns {what}. It must return float32 arrays by name."
            )
        return dict(tensors)

    def of_scalars(name: str, function: Any, count: int) -> Any:
        run = guarded(subject.format(name), function)

        def scalars(parameters: Any, tokens: Any) -> Any:
            result = run(parameters, tokens)
            every = result if isinstance(result, tuple) else (result,)
            if len(every) != count or any(getattr(each, "shape", None) != () for each in every):
                shown = ", ".join(str(getattr(each, "shape", type(each).__name__)) for each in every)
                raise ConfigurationError(
                    detail=f"{subject.format(name)} returns {shown} for tokens {tokens.shape}. It must return "
                    f"{'a scalar' if count == 1 else 'two scalars'}: the mean over all positions."
                )
            return result

        return scalars

    return replace(
        own,
        initialise=sound_parameters,
        loss=of_scalars("loss", own.loss, 1),
        objective=None if own.objective is None else of_scalars("objective", own.objective, 2),
    )


def _wrong_with(tensors: Any, traceable: bool) -> str:
    """Return why these cannot be a model's parameters; empty if they can. NumPy's other float types are converted later."""
    if not isinstance(tensors, Mapping):
        return f"{type(tensors).__name__}"
    if not tensors:
        return "no tensors"
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not name:
            return f"a tensor named {name!r}"
        dtype, shape = getattr(tensor, "dtype", None), getattr(tensor, "shape", None)
        if dtype is None or shape is None:
            return f"{name} as {type(tensor).__name__}"
        if not jnp.issubdtype(dtype, jnp.floating) or (traceable and dtype != jnp.float32):
            return f"{name} of {dtype}"
        if not prod(shape):
            return f"{name} of shape {tuple(shape)}, which is empty"
    return ""
