"""Modules of other libraries as a ``Model``: Flax NNX and Equinox, for ``model.factory``.

A factory returns a module. Its parameters are the tensors, named by their paths, as in ``layers.0.query.kernel``. The module
maps tokens to logits, and the loss is the mean cross-entropy of each next token. To initialise with a seed, the factory is
called again with that seed in its specification, possibly while it is traced.

   Flax NNX   module(tokens): (batch, length) int32 → (batch, length, vocabulary)
   Equinox    module(tokens): (length,) int32 → (length, vocabulary), one sequence, as is usual there

Anything that an island could not merge or give to a peer is refused: parameters that are not float32, and other state, such
as running statistics. Each library is imported only if a factory returns one of its modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from learners.models.model import Logits, Model, Tensors, losses
from orchestrator.errors import ConfigurationError

Make = Callable[[Any], Any]
"""Returns a module for a seed."""


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
