"""Modules of other libraries as a ``Model``: Flax NNX and Equinox, for ``model.factory``.

A factory returns a module; its own parameters are the tensors, named by the way to each, as in ``layers.0.query.kernel``. It
is a function of tokens to logits, and the loss is the mean cross-entropy of each next token. To begin with a seed, the
factory is called once more with that seed in its specification, which may be traced.

    Flax NNX   module(tokens): (batch, length) int32 → (batch, length, vocabulary)
    Equinox    module(tokens): (length,) int32 → (length, vocabulary), one sequence, as modules are there

Refused is what an island could not merge or give to a peer: parameters that are not float32, and state beside them, such as
running statistics. The libraries are imported only where a factory returns a module of theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from learners.models.model import Logits, Model, Tensors, losses
from orchestrator.errors import ConfigurationError

Make = Callable[[Any], Any]
"""A module from a seed."""


def model_of(module: Any, make: Make, z_loss: float = 0.0) -> Model | None:
    """The module, which ``make`` makes, as a model; None if it is of no library that is known here.

    Raises ConfigurationError for one that cannot be trained.
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
            detail=f"model.factory returned a module with {_named(path)}, a {type(variable).__name__}, which is no "
            "parameter: islands merge parameters only. Use layers without state of their own, such as RMSNorm."
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
    """Raises ConfigurationError unless parameters are float32, and tokens become logits of them."""
    if other := sorted(name for name, array in parameters.items() if array.dtype != jnp.float32):
        raise ConfigurationError(
            detail=f"model.factory returned a module whose {other[0]} is {parameters[other[0]].dtype}; parameters are "
            "float32 here. Compute in another type instead (in Flax dtype, not param_dtype)."
        )
    tokens = jax.ShapeDtypeStruct((2, 3), jnp.int32)
    try:
        shape = jax.eval_shape(apply, dict(parameters), tokens).shape
    except Exception as error:  # whatever a user's module may raise
        raise ConfigurationError(
            detail=f"model.factory returned a module that cannot be called with tokens ({type(error).__name__}: {error}). "
            "It is given token ids, and returns logits."
        ) from error
    if len(shape) != 3 or shape[:2] != tokens.shape:
        raise ConfigurationError(
            detail=f"model.factory returned a module that makes {shape} of tokens {tokens.shape}; it must return logits, "
            "one for each token of the vocabulary, for each position."
        )

    return Model(initialise, **losses(apply, z_loss), traceable=True, vocabulary_size=shape[-1])


def _named(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))
