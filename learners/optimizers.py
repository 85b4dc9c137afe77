"""The inner optimizer: what one island does with a gradient, and at which learning rate.

Optax's convention: updates are added to the parameters.

   kind     gradient ─▶ clipped by global norm ─▶ direction ─▶ + weight decay · θ ─▶ × lr_ratio of its group ─▶ × −1
   factory  gradient ─▶ clipped, if `clip_norm` is set ─▶ the factory's optimizer ─▶ × lr_ratio of its group

A step is θ ← θ + scale · update. ``update_scale`` is the learning rate of a kind. For a factory's optimizer, which has its
own learning rate, it is the fraction of it at this point of the schedule.

Every moment with a tensor's shape is in a tree like that of the parameters, under the tensor's name, so that a state can be
cut, sent and sharded like parameters. What an optimizer keeps in other shapes, such as a count, or Adafactor's factors of
rows and columns, belongs to no tensor and is sent as a whole.

Which settings apply to a tensor, and the scale of a step, are computed in ``learners.optimizer_settings``.

This module knows nothing of fragments, islands or devices. Sources: AdamW, arXiv:1711.05101; Muon, arXiv:2502.16982; Lion,
arXiv:2302.06675; Adafactor, arXiv:1804.04235. All directions are optax's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from learners.factories import called, guarded
from learners.optimizer_settings import TensorSettings, settings_of, use_of
from orchestrator.errors import ConfigurationError
from orchestrator.parameters.pieces import BY_NAME, Roles, role_of
from orchestrator.specification.training_sections import InnerOptimizerSection

MUON_RMS = 0.2
"""The root mean square of an update of Muon, as in AdamW, so that both use the same learning rate.

Source: arXiv:2502.16982, section 2.2.
"""
Tensors = Mapping[str, jax.Array]


def build(section: InnerOptimizerSection, roles: Roles = BY_NAME) -> optax.GradientTransformation:
    """Return the optimizer. Its updates point downhill; multiply them by ``update_scale(…)`` and add them.

    ``section`` is ``training.inner_optimizer`` of the job specification. Raises ConfigurationError if its factory cannot be
    used. The optimizer's ``init`` raises it if a group applies to no tensor.
    """
    parts: list[optax.GradientTransformation] = []
    if section.clip_norm is not None:
        parts.append(optax.clip_by_global_norm(section.clip_norm))
    if section.factory:
        parts.append(_from_factory(section.factory, section))
        if section.groups:
            parts.append(_by_groups(section, roles, decays=False))
    else:
        parts.append(_direction(section, roles))
        parts.append(_by_groups(section, roles, decays=True) if section.groups else _decay(section, roles))
        parts.append(optax.scale(-1.0))
    return optax.chain(*parts)


def _direction(section: InnerOptimizerSection, roles: Roles) -> optax.GradientTransformation:
    kind = section.kind
    if kind == "lion":
        return optax.scale_by_lion(b1=section.beta1, b2=section.beta2)
    if kind == "adafactor":  # without scaling by parameters, so that learning rates are comparable
        return optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))
    adam = optax.scale_by_adam(b1=section.beta1, b2=section.beta2)
    return adam if kind == "adamw" else _muon(section, adam, roles)


def _muon(
    section: InnerOptimizerSection, others: optax.GradientTransformation, roles: Roles
) -> optax.GradientTransformation:
    """Return Muon for matrices, each layer and expert of a stack separately, and ``others`` for embeddings and vectors."""

    def dimensions(tensors: Tensors) -> dict[str, contrib.MuonDimensionNumbers]:
        numbers: dict[str, contrib.MuonDimensionNumbers] = jax.tree.map(
            lambda tensor: contrib.MuonDimensionNumbers(tensor.ndim - 2, tensor.ndim - 1), tensors
        )
        return numbers

    def labels(tensors: Tensors) -> dict[str, str]:
        uses = {name: use_of(name, tensor.ndim, roles) for name, tensor in tensors.items()}
        return {name: "muon" if use == "matrix" else "others" for name, use in uses.items()}

    def even(updates: Tensors, parameters: Any) -> Any:
        """Scale updates to a common root mean square: an orthogonal matrix has a smaller one the larger it is."""
        return jax.tree.map(lambda update: MUON_RMS * max(update.shape[-2:]) ** 0.5 * update, updates)

    muon = optax.chain(
        contrib.scale_by_muon(beta=section.momentum, weight_dimension_numbers=dimensions), optax.stateless(even)
    )
    return optax.partition({"muon": muon, "others": others}, labels)


def _decay(section: InnerOptimizerSection, roles: Roles) -> optax.GradientTransformation:
    def decaying(parameters: Tensors) -> dict[str, bool]:
        return {name: role_of(name, tensor.ndim, roles).decays for name, tensor in parameters.items()}

    return optax.add_decayed_weights(section.weight_decay, mask=decaying)


def _by_groups(section: InnerOptimizerSection, roles: Roles, *, decays: bool) -> optax.GradientTransformation:
    """Apply the rate of each tensor's group, and its weight decay if ``decays``."""

    def settings(tensors: Tensors) -> dict[str, TensorSettings]:
        return settings_of({name: tensor.ndim for name, tensor in tensors.items()}, section, roles)

    def checked(parameters: Any) -> optax.EmptyState:
        settings(parameters)
        return optax.EmptyState()

    def update(updates: Any, state: optax.EmptyState, parameters: Any = None) -> tuple[Any, optax.EmptyState]:
        by_name = settings(parameters)
        if not decays:
            return {name: own.lr_ratio * updates[name] for name, own in by_name.items()}, state
        return {
            name: own.lr_ratio * (updates[name] + own.weight_decay * parameters[name]) for name, own in by_name.items()
        }, state

    return optax.GradientTransformation(checked, update)


def _from_factory(path: str, section: InnerOptimizerSection) -> optax.GradientTransformation:
    field = "training.inner_optimizer.factory"
    own = _Section(section.model_dump(mode="json"))
    built = called(field, path, own, settings=section.settings)
    if not isinstance(built, optax.GradientTransformation):
        raise ConfigurationError(
            detail=f"{field} {path!r} returned {type(built).__name__}; it must return an optax.GradientTransformation "
            "whose updates are added to the parameters, such as optax.adamw(3e-4). For optax.MultiSteps return its "
            "gradient_transformation()."
        )
    if unread := own.unread():
        name = unread[0]
        raise ConfigurationError(
            detail=f"training.inner_optimizer.{name} is {own[name]:g}, but the factory {path!r} never reads it, "
            f'so it has no effect. Let the factory use section["{name}"], or remove the field.'
        )
    subject = f"{{}} of the transformation from {field} {path!r}"
    init, run = guarded(subject.format("init"), built.init), guarded(subject.format("update"), built.update)

    def begin(parameters: Any) -> Any:
        state = init(parameters)
        if any(jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key) for leaf in jax.tree.leaves(state)):
            raise ConfigurationError(
                detail=f"{field} {path!r} returned a transformation that keeps a jax.random.key in its state, as "
                "optax.add_noise does. A state must consist of numbers, so that it can be saved and sent. Keep "
                "jax.random.key_data(key) instead, or leave the noise out."
            )
        return state

    def update(updates: Any, state: Any, parameters: Any = None, **more: Any) -> tuple[Any, Any]:
        result: Any = run(updates, state, parameters, **more)
        is_pair = isinstance(result, tuple) and len(result) == 2
        if not is_pair or _outline(result[0]) != _outline(updates):
            raise ConfigurationError(
                detail=f"{subject.format('update')} returns {'updates of other shapes' if is_pair else 'no pair'}. It must "
                "return an update of the same shape for each gradient, and the next state."
            )
        next_updates, next_state = result
        return next_updates, next_state

    return type(built)(begin, update)


class _Section(dict[str, Any]):
    """The section for a factory. It records which settings were read."""

    _SETTINGS = ("lr", "beta1", "beta2", "momentum", "weight_decay")

    def __init__(self, section: Mapping[str, Any]) -> None:
        super().__init__(section)
        defaults = InnerOptimizerSection.model_fields
        self._unread = {name for name in self._SETTINGS if section[name] != defaults[name].default}

    def unread(self) -> list[str]:
        """Return the settings that differ from their defaults and were not read."""
        return sorted(self._unread)

    def __getitem__(self, name: str) -> Any:
        self._unread.discard(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._unread.discard(name)
        return super().get(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        self._unread.discard(name)
        return super().pop(name, *default)

    def __iter__(self) -> Iterator[str]:  # ``**section`` uses it, too
        return super().__iter__()

    def items(self) -> Any:
        self._unread.clear()
        return super().items()

    def values(self) -> Any:
        self._unread.clear()
        return super().values()


def _outline(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [getattr(leaf, "shape", None) for leaf in leaves]
