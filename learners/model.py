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

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from learners.contract import Batch
from learners.factories import called, guarded
from learners.island_spec import Document, IslandSpec
from learners.models import decoder
from learners.models.model import AXES, Frozen, Model, Tensors, losses, preferences
from learners.models.plain import transformer
from learners.optimizer_settings import use_of
from orchestrator.errors import ConfigurationError, InvalidJobSpec
from orchestrator.models import trainable
from orchestrator.models.huggingface.weights import Weights, described
from orchestrator.models.presets import Architecture
from orchestrator.models.trainable import A, B
from orchestrator.parameters.pieces import Role, role_of
from orchestrator.specification.training_sections import LoraSection, TrainableSection

ADAPTERS = 0x10A
"""Separates the draws of adapters from those of the model."""
REFERENCE = "reference."
"""What the tensors of the model with which training began have before their names, where these are trained."""
Make = Callable[[Any], Any]
"""Returns a module for a seed."""
Apply = Callable[[Tensors, jax.Array], jax.Array]
"""Maps tokens (batch, length) to logits (batch, length, vocabulary)."""
__all__ = ["AXES", "Model", "build"]


def build(spec: IslandSpec | Document) -> Model:
    """Return the model that a job specification asks for, parsed or as plain data.

    ``model.factory`` names ``package.module:function`` of an installed package, which is called with the specification.
    Raises ConfigurationError if there is no such function, or if it returns neither a ``Model`` nor a module
    (``learners.model``).
    """
    spec = IslandSpec.of(spec)
    whole = _whole(spec)
    built = whole if spec.job.trainable is None else _partly_trained(whole, spec.job.trainable, spec.job.seed)
    objective = spec.job.training.objective
    return built if objective is None else _preferring(whole, built, objective.beta, spec)


def _whole(spec: IslandSpec) -> Model:
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
    built = decoder.decoder(network, dtype, section.remat, z_loss, section.attention)
    if section.initial_weights is None:
        return built
    folder, roots, digest = section.initial_weights, spec.roots, section.weights_digest
    weights = cache(lambda: Weights(network, folder, roots, digest))
    return replace(built, initial_weights=lambda pieces: weights().taken(pieces))


def require_batches(built: Model, spec: IslandSpec) -> None:
    """Raise ConfigurationError if the job's batches have weights and segments, and the model takes tokens alone."""
    if spec.job.data.has_segments and not built.takes_batches:
        raise ConfigurationError(
            detail=f"{spec.job.data.segmented_by}, but the model from model.factory {spec.job.model.factory!r} "
            "takes tokens without weights and segments. Use a preset or model.decoder, or return a learners.model.Model "
            "with takes_batches whose loss takes a learners.contract.Batch."
        )


def _partly_trained(whole: Model, section: TrainableSection, seed: int) -> Model:
    """Return the model of which only adapters, or the selected tensors, are parameters. Its other tensors are frozen.

    Raises InvalidJobSpec if the model does not have what is to be trained.
    """
    drawn = cache(lambda: dict(whole.initialise(seed)))
    tensors = jax.eval_shape(partial(whole.initialise, seed)) if whole.traceable else drawn()
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    is_matrix = {name: use_of(name, len(shape), whole.roles) == "matrix" for name, shape in shapes.items()}
    matrices = {name: shape for name, shape in shapes.items() if is_matrix[name]}
    if problems := tuple(section.problems_with(matrices, shapes)):
        raise InvalidJobSpec(problems=problems)
    if section.lora is not None:
        adapted = _adapted(whole, section.lora, matrices)
        names = list(shapes)
    else:
        own = trainable.trained(section.only, shapes)
        adapted = _selected(whole, own)
        names = [name for name in shapes if name not in own]

    def value(name: str) -> Any:
        if whole.initial_weights is not None:
            return whole.initial_weights([name])[name]
        return whole.initialise(seed)[name] if whole.traceable else drawn()[name]

    dtypes = {name: whole.compute_dtypes.get(name, jnp.float32) for name in names}
    frozen = Frozen(
        outline={name: jax.ShapeDtypeStruct(shapes[name], dtypes[name]) for name in names},
        value=value,
        traceable=whole.traceable and whole.initial_weights is None,
        axes=whole.axes,
        roles=whole.roles,
        model=shapes,
    )
    return replace(adapted, frozen=frozen, flops_per_token=None)


def _preferring(whole: Model, built: Model, beta: float, spec: IslandSpec) -> Model:
    """Return the model with the objective DPO. Tensors that are trained are also held as they were before, unless adapters.

    Raises ConfigurationError for a model that does not tell the likelihoods of its targets.
    """
    own, before = built.log_likelihoods, whole.log_likelihoods
    if own is None or before is None:
        raise ConfigurationError(
            detail=f"training.objective.kind is dpo, but the model from model.factory {spec.job.model.factory!r} has no "
            "log_likelihoods. Use a preset or model.decoder, or return a learners.model.Model that has them."
        )
    seed, section = spec.job.seed, spec.job.trainable
    is_adapted = section is not None and section.lora is not None
    frozen = built.frozen if is_adapted else _with_reference(whole, built, seed)
    assert frozen is not None, "adapters have frozen tensors"
    names = list(frozen.model)

    def measured(parameters: Tensors, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
        reference = {name: parameters.get(REFERENCE + name, parameters[name]) for name in names}
        fixed = jax.lax.stop_gradient(before(reference, batch))
        return preferences(own(parameters, batch), fixed, batch, beta)

    def loss(parameters: Tensors, tokens: Any) -> jax.Array:
        return measured(parameters, Batch.of(tokens))[0]

    return replace(
        built, loss=loss, objective=None, measured=None, preferences=measured, frozen=frozen, flops_per_token=None
    )


def _with_reference(whole: Model, built: Model, seed: int) -> Frozen:
    """Return the frozen tensors with those that are trained, as training begins with them."""
    drawn = cache(lambda: dict(whole.initialise(seed)))
    tensors = jax.eval_shape(partial(whole.initialise, seed)) if whole.traceable else drawn()
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    before = built.frozen
    names = [name for name in shapes if before is None or name not in before.outline]
    held = {name: jax.ShapeDtypeStruct(shapes[name], whole.compute_dtypes.get(name, jnp.float32)) for name in names}

    def value(name: str) -> Any:
        if before is not None and name in before.outline:
            return before.value(name)
        own = name.removeprefix(REFERENCE)
        if whole.initial_weights is not None:
            return whole.initial_weights([own])[own]
        return whole.initialise(seed)[own] if whole.traceable else drawn()[own]

    return Frozen(
        outline={**({} if before is None else before.outline), **{REFERENCE + name: held[name] for name in names}},
        value=value,
        traceable=whole.traceable and whole.initial_weights is None,
        axes={**whole.axes, **{REFERENCE + name: axes for name, axes in whole.axes.items()}},
        roles={**whole.roles, **{REFERENCE + name: role for name, role in whole.roles.items()}},
        model=shapes,
    )


def _selected(whole: Model, names: list[str]) -> Model:
    """Return the model with these tensors as its parameters."""
    weights = whole.initial_weights

    def initialise(seed: Any) -> dict[str, Any]:
        values = whole.initialise(seed)
        return {name: values[name] for name in names}

    return replace(
        whole,
        initialise=initialise,
        roles=_of_names(whole.roles, names),
        axes=_of_names(whole.axes, names),
        initial_weights=None if weights is None else lambda pieces: weights(names if pieces is None else pieces),
    )


def _adapted(whole: Model, section: LoraSection, matrices: Mapping[str, tuple[int, ...]]) -> Model:
    """Return the model with adapters as its parameters. A is uniform within ±1/√inputs, as in PEFT, and B is zero."""
    shapes = trainable.adapter_shapes(section.rank, section.targets, matrices)
    targets = trainable.selected(section.targets, matrices)
    roles: dict[str, Role] = {}
    axes: dict[str, tuple[str | None, ...]] = {}
    for target in targets:
        stacked = role_of(target, len(matrices[target]), whole.roles).stacked_axes
        roles |= {target + A: Role(stacked_axes=stacked), target + B: Role(stacked_axes=stacked)}
        if named := whole.axes.get(target):
            axes |= {target + A: (*named[:-1], None), target + B: (*named[:-2], None, named[-1])}

    def initialise(seed: Any) -> dict[str, jax.Array]:
        key = jax.random.fold_in(jax.random.key(seed), ADAPTERS)
        return {
            name: jnp.zeros(shape, jnp.float32)
            if name.endswith(B)
            else jax.random.uniform(jax.random.fold_in(key, number), shape, jnp.float32, -1, 1) * shape[-2] ** -0.5
            for number, (name, shape) in enumerate(shapes.items())
        }

    def tensors(parameters: Tensors) -> dict[str, jax.Array]:
        scaled = {name: section.scale * parameters[name] for name in shapes if name.endswith(B)}
        if whole.applies_adapters:
            return {**parameters, **scaled}
        whole_tensors = {name: tensor for name, tensor in parameters.items() if name not in shapes}
        adapted = {name: whole_tensors[name] + parameters[name + A] @ scaled[name + B] for name in targets}
        return whole_tensors | adapted

    objective, measured, likelihoods = whole.objective, whole.measured, whole.log_likelihoods
    return replace(
        whole,
        initialise=initialise,
        log_likelihoods=None if likelihoods is None else lambda own, batch: likelihoods(tensors(own), batch),
        loss=lambda parameters, tokens: whole.loss(tensors(parameters), tokens),
        objective=None if objective is None else lambda parameters, tokens: objective(tensors(parameters), tokens),
        measured=None if measured is None else lambda parameters, tokens: measured(tensors(parameters), tokens),
        roles=roles,
        axes=axes,
        traceable=True,
        initial_weights=None,
    )


def _of_names(by_name: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: by_name[name] for name in names if name in by_name}


def _from_factory(path: str, spec: IslandSpec) -> Model:
    def make(seed: Any) -> Any:
        return called("model.factory", path, {**spec.document, "seed": seed}, settings=settings)

    settings = spec.job.model.settings
    built = called("model.factory", path, spec.document, settings=settings)
    own = built if isinstance(built, Model) else model_of(built, make, spec.job.training.z_loss)
    if own is None:
        raise ConfigurationError(
            detail=f"model.factory {path!r} returned {type(built).__name__}; it must return a learners.model.Model, or a "
            "module of Flax NNX or Equinox."
        )
    return _checked(path, own)


def _checked(path: str, own: Model) -> Model:
    """Return the model with functions that raise ConfigurationError for errors and for results that cannot be trained.

    It minimises its own objective, also where that is a changed one of a built-in mixture, so nothing is ``measured``.
    """
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
                shape = Batch.of(tokens).tokens.shape
                raise ConfigurationError(
                    detail=f"{subject.format(name)} returns {shown} for tokens {shape}. It must return "
                    f"{'a scalar' if count == 1 else 'two scalars'}: the mean over all positions."
                )
            return result

        return scalars

    return replace(
        own,
        initialise=sound_parameters,
        loss=of_scalars("loss", own.loss, 1),
        objective=None if own.objective is None else of_scalars("objective", own.objective, 2),
        measured=None,
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


def _model(parameters: Tensors, initialise: Callable[[Any], Tensors], apply: Apply, z_loss: float) -> Model:
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

    of_tokens = losses(lambda values, inputs: apply(values, inputs.tokens), z_loss)
    return Model(initialise, **of_tokens, traceable=True, vocabulary_size=shape[-1])


def _named(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))
