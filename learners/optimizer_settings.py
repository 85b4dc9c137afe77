"""Which settings of the inner optimizer apply to a step and to a tensor, whatever library computes the update.

A group of settings names tensors by a pattern, by their use, or by both. The first group that fits a tensor applies to it.

   embedding  its rows are looked up, or scored, one by one
   matrix     two dimensions, besides those that number layers and experts
   vector     everything else: gains, biases, and stacks of them

The learning rate is a pure function of the position in the schedule. It is not part of an optimizer's state: the schedule
follows what the whole job has trained (``orchestrator.replica.replica``), an optimizer's moments what this island has. So it
is computed outside and passed to each step.

   cosine  warm-up, then half a cosine down to lr · lr_final_ratio at the horizon
   linear  warm-up, then a line down to it
   wsd     warm-up, constant, and a line down to it over the last ``decay_ratio`` of the horizon

``DescentCheck`` tests whether a factory's optimizer descends.

It imports neither JAX nor PyTorch, because trainers of both read it. Sources: cosine, arXiv:1608.03983; warm-up, stable,
decay, arXiv:2404.06395.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from orchestrator.errors import ConfigurationError
from orchestrator.parameters.pieces import Roles, role_of
from orchestrator.specification.training_sections import InnerOptimizerSection, OptimizerGroupSection

WITH_MOMENTUM = 5
"""This many slopes in a row must be positive after an import, whose momentum may point against single gradients."""
STILL_STEPS_MAX = 1_000
"""The most steps without movement with which a factory may begin, in a job of twice as many or more."""
ROUNDING = 2.0**-22
"""Updates below this fraction of the parameters come from rounding. schedule_free_adamw has them at a learning rate of 0."""


@dataclass(frozen=True, slots=True)
class Remedies:
    """What to return instead of an optimizer that ascends, or that stands still, in the words of its library."""

    ascends: str
    still: str


class DescentCheck:
    """Judges the first slopes of a trainer whose optimizer comes from a factory, and no later ones.

    An optimizer with the wrong sign would train upwards, and one that never moves would not train at all. The slope of a
    step is the inner product of its update and its gradient: negative if the step goes downhill, and 0 if nothing moves.
    The loss of one step, or of one batch, is less reliable.

    A slope of 0 is inconclusive: warm-up from a learning rate of 0, and updates collected over several steps, begin with
    it. Too many of them are refused: more than half of the job's ``steps``, or than ``STILL_STEPS_MAX``.
    """

    def __init__(self, factory: str, steps: int, remedies: Remedies) -> None:
        self._factory, self._remedies = factory, remedies
        self._needed, self._positive_count, self._decided = 1, 0, False
        self._still_count, self._still_max = 0, min(STILL_STEPS_MAX, steps // 2)

    @property
    def is_decided(self) -> bool:
        """Whether no slope is needed any more."""
        return self._decided

    def state_was_imported(self) -> None:
        """Start again: the state may come from a peer, or from a checkpoint of another build."""
        self._needed, self._positive_count, self._decided = WITH_MOMENTUM, 0, False

    def judge(self, slope: float) -> None:
        """Raise ConfigurationError if the slopes so far show that the optimizer ascends or does nothing."""
        if self._decided:
            return
        if not slope:
            self._still_count += 1
            if self._still_count > self._still_max:
                raise ConfigurationError(
                    detail=f"training.inner_optimizer.factory {self._factory!r} returns an optimizer that did not change "
                    f"the parameters in {self._still_count:,} steps. {self._remedies.still}"
                )
            return
        if not slope > 0.0:  # downhill, or NaN, which the check of contributions refuses
            self._decided = True
            return
        self._positive_count += 1
        if self._positive_count >= self._needed:
            raise ConfigurationError(
                detail=f"training.inner_optimizer.factory {self._factory!r} returns an optimizer that ascends: the inner "
                f"product of its update and the gradient is {slope:.3g}, and must be negative. {self._remedies.ascends}"
            )


def learning_rate(section: InnerOptimizerSection, horizon_steps: int, step: int) -> float:
    """Return the learning rate of the inner step that starts at step ``step`` of the schedule (0 for the first).

    ``section`` is ``training.inner_optimizer`` of the job specification. Linear from lr / warm-up to lr over
    ``warmup_steps``, then by ``schedule``; constant from ``horizon_steps`` on.
    """
    peak: float = section.lr
    warmup: int = section.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    floor: float = section.lr_final_ratio
    schedule = section.schedule
    if schedule == "wsd":
        decay_steps = section.decay_ratio * horizon_steps
        left = (horizon_steps - step) / decay_steps if decay_steps else math.inf
        return peak * (floor + (1 - floor) * min(1.0, max(0.0, left)))
    progress = min(1.0, (step - warmup) / max(1, horizon_steps - warmup))
    if schedule == "linear":
        return peak * (1 - (1 - floor) * progress)
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def update_scale(section: InnerOptimizerSection, horizon_steps: int, step: int) -> float:
    """Return the factor of the optimizer's update in the inner step that starts at ``step`` of the schedule.

    The updates of a kind have no learning rate, so this is the learning rate. A factory's optimizer has its own, of which
    this is the fraction: from 1 / warm-up to 1, then down to ``lr_final_ratio``.
    """
    lr = learning_rate(section, horizon_steps, step)
    return lr / section.lr if section.factory else lr


@dataclass(frozen=True, slots=True)
class TensorSettings:
    """Settings of a tensor. ``lr_ratio`` multiplies the learning rate; weight decay is lr · lr_ratio · weight_decay · θ."""

    use: str
    lr_ratio: float
    weight_decay: float


def use_of(tensor: str, dimension_count: int, roles: Roles) -> str:
    """Return the use of the tensor: ``embedding``, ``matrix`` or ``vector``."""
    role = role_of(tensor, dimension_count, roles)
    if role.embedding:
        return "embedding"
    return "matrix" if dimension_count - role.stacked_axes == 2 else "vector"


def settings_of(
    dimension_counts: Mapping[str, int], section: InnerOptimizerSection, roles: Roles
) -> dict[str, TensorSettings]:
    """Return the settings of every tensor, by name. ``section`` is ``training.inner_optimizer`` of the job specification.

    A group without a weight decay has the general one, unless the tensor's role excludes it.

    Raises ConfigurationError for a group that is not the first to fit any tensor: its pattern is misspelt, or earlier groups
    take all its tensors.
    """
    groups = section.groups
    fitting: set[int] = set()
    settings = {}
    for name, dimension_count in dimension_counts.items():
        use = use_of(name, dimension_count, roles)
        index = next((i for i, group in enumerate(groups) if _fits(group, name, use)), None)
        decay = section.weight_decay if role_of(name, dimension_count, roles).decays else 0.0
        if index is None:
            settings[name] = TensorSettings(use, 1.0, decay)
            continue
        fitting.add(index)
        own = groups[index].weight_decay
        settings[name] = TensorSettings(use, groups[index].lr_ratio, decay if own is None else own)
    if idle := sorted(set(range(len(groups))) - fitting):
        names = ", ".join(sorted(dimension_counts)[:4])
        raise ConfigurationError(
            detail=f"training.inner_optimizer.groups.{idle[0]} applies to no tensor. Its tensors and role must fit one that "
            f"no earlier group takes; the model's tensors are called {names}, …"
        )
    return settings


def _fits(group: OptimizerGroupSection, name: str, use: str) -> bool:
    pattern, role = group.tensors, group.role
    return (pattern is None or fnmatchcase(name, pattern)) and (role is None or role == use)
