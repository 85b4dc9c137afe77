"""The model that a job specification asks for: a preset, a decoder by configuration, or a factory of a user's package.

It chooses the model and refuses anything that is not one. How a model computes is in ``learners.models``.

``model.factory`` may return a ``Model``, or a module of Flax NNX or Equinox, which becomes one. Its parameters are the
tensors, named by their paths, as in ``layers.0.query.kernel``. The module maps tokens to logits, and the loss is the mean
cross-entropy of each next token. To initialise with a seed, the factory is called again with that seed in its specification,
possibly while it is traced.

   Flax NNX   module(tokens): (batch, length) int32 → (batch, length, vocabulary)
   Equinox    module(tokens): (length,) int32 → (length, vocabulary), one sequence, as is usual there

Anything that an island could not merge or give to a peer is refused: parameters that are not float32, and other state, such
as running statistics. Each library is imported only if a factory returns one of its modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from learners.factories import called, guarded
from learners.island_spec import Document, IslandSpec
from learners.models import decoder
from learners.models.model import AXES, Logits, Model, Tensors, losses
from learners.models.plain import transformer
from orchestrator.errors import ConfigurationError
from orchestrator.models.huggingface.weights import Weights, described
from orchestrator.models.presets import Architecture

Make = Callable[[Any], Any]
"""Returns a module for a seed."""
__all__ = ["AXES", "Model", "build"]


def build(spec: IslandSpec | Document) -> Model:
    """Return the model that a job specification asks for, parsed or as plain data.

    ``model.factory`` names ``package.module:function`` of an installed package, which is called with the specification.
    Raises ConfigurationError if there is no such function, or if it returns neither a ``Model`` nor a module
    (``learners.model``).
    """
    spec = IslandSpec.of(spec)
    section, z_loss = spec.job.model, spec.job.training.z_loss
    network = section.network
    if section.factory is not None:
        return _from_factory(section.factory, spec)
    if network is None:
        assert section.initial_weights is not None, "otherwise there is a network"
        network = described(section.initial_weights, spec.roots)
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
    own = built if isinstance(built, Model) else model_of(built, make, spec.job.training.z_loss)
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


def model_of(module: Any, make: Make, z_loss: float = 0.0) -> Model | None:
    """Return the module as a model; None if it comes from no library known here. ``make`` creates it.

    Raises ConfigurationError if it cannot be trained.
    """
    libraries = {kind.__module__.partition(".")[0] for kind in type(module).__mro__}
    if "flax" in libraries:
        return _of_flax(module, make, z_loss)
    return _of_equinox(module, make, z_loss) if "equinox" in libraries else None


def _of_flax(module: Any, make: Make, z_loss: float) -> Model:
    from flax import nnx

    parts: Any = nnx.split(module, nnx.Param, nnx.RngState, ...)
    definition, parameters, chance, rest = parts
    for path, variable in nnx.to_flat_state(rest):
        raise ConfigurationError(
            detail=f"model.factory returned a module with {_named(path)}, a {type(variable).__name__}, which is not a "
            "parameter: islands merge only parameters. Use layers without other state, such as RMSNorm."
        )
    paths = {_named(path): path for path, _ in nnx.to_flat_state(parameters)}

    def tensors(other: Any) -> dict[str, jax.Array]:
        return {_named(path): variable[...] for path, variable in nnx.to_flat_state(nnx.state(other, nnx.Param))}

    def apply(values: Tensors, tokens: jax.Array) -> jax.Array:
        state = nnx.from_flat_state([(path, nnx.Param(values[name])) for name, path in paths.items()])
        logits: jax.Array = nnx.merge(definition, state, chance)(tokens)
        return logits

    return _model(tensors(module), lambda seed: tensors(make(seed)), apply, z_loss)


def _of_equinox(module: Any, make: Make, z_loss: float) -> Model:
    import equinox

    _, fixed = equinox.partition(module, equinox.is_inexact_array)

    def tensors(other: Any) -> dict[str, jax.Array]:
        leaves = jax.tree_util.tree_leaves_with_path(equinox.filter(other, equinox.is_inexact_array))
        return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}

    structure = jax.tree.structure(equinox.filter(module, equinox.is_inexact_array))
    names = list(tensors(module))

    def apply(values: Tensors, tokens: jax.Array) -> jax.Array:
        own = equinox.combine(jax.tree.unflatten(structure, [values[name] for name in names]), fixed)
        logits: jax.Array = jax.vmap(own)(tokens)
        return logits

    return _model(tensors(module), lambda seed: tensors(make(seed)), apply, z_loss)


def _model(parameters: Tensors, initialise: Callable[[Any], Tensors], apply: Logits, z_loss: float) -> Model:
    """Build the model. Raises ConfigurationError unless parameters are float32 and tokens become logits."""
    if other := sorted(name for name, array in parameters.items() if array.dtype != jnp.float32):
        raise ConfigurationError(
            detail=f"model.factory returned a module whose {other[0]} is {parameters[other[0]].dtype}; parameters must be "
            "float32. Set another type for computation instead (in Flax dtype, not param_dtype)."
        )
    tokens = jax.ShapeDtypeStruct((2, 3), jnp.int32)
    try:
        shape = jax.eval_shape(apply, dict(parameters), tokens).shape
    except Exception as error:  # a user's module may raise anything
        raise ConfigurationError(
            detail=f"model.factory returned a module that cannot be called with tokens ({type(error).__name__}: {error}). "
            "It gets token ids and must return logits."
        ) from error
    if len(shape) != 3 or shape[:2] != tokens.shape:
        raise ConfigurationError(
            detail=f"model.factory returned a module that maps tokens {tokens.shape} to {shape}; it must return logits, "
            "one for each token of the vocabulary, for each position."
        )

    return Model(initialise, **losses(apply, z_loss), traceable=True, vocabulary_size=shape[-1])


def _named(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))
