"""The group of each tensor: what of the inner optimizer's settings applies to it.

A group names tensors by a pattern, by what they are for, or by both; of the groups that fit a tensor the first counts.

    embedding  its rows are looked up, or scored, one by one
    matrix     two dimensions, beside those that number layers and experts
    vector     all else: gains, biases, and what is stacked of them
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from orchestrator.errors import ConfigurationError
from orchestrator.parameters.roles import Roles, role_of


@dataclass(frozen=True, slots=True)
class TensorSettings:
    """``lr_ratio`` multiplies the step's learning rate; the decay of a step is lr · lr_ratio · weight_decay · θ."""

    use: str
    lr_ratio: float
    weight_decay: float


def use_of(tensor: str, dimension_count: int, roles: Roles) -> str:
    """What the tensor is for: ``embedding``, ``matrix`` or ``vector``."""
    role = role_of(tensor, dimension_count, roles)
    if role.embedding:
        return "embedding"
    return "matrix" if dimension_count - role.stacked_axes == 2 else "vector"


def settings_of(
    dimension_counts: Mapping[str, int], section: Mapping[str, Any], roles: Roles
) -> dict[str, TensorSettings]:
    """The settings of every tensor, by name; ``section`` is ``training.inner_optimizer`` of the job specification.

    Where its group says nothing of weight decay, it has that of all, unless its role says that it has none.

    Raises ConfigurationError for a group that is not the first to fit any tensor: its pattern is misspelt, or those before
    it take all.
    """
    groups: Sequence[Mapping[str, Any]] = section["groups"]
    fitting: set[int] = set()
    settings = {}
    for name, dimension_count in dimension_counts.items():
        use = use_of(name, dimension_count, roles)
        index = next((i for i, group in enumerate(groups) if _fits(group, name, use)), None)
        decay = section["weight_decay"] if role_of(name, dimension_count, roles).decays else 0.0
        if index is None:
            settings[name] = TensorSettings(use, 1.0, decay)
            continue
        fitting.add(index)
        own = groups[index]["weight_decay"]
        settings[name] = TensorSettings(use, groups[index]["lr_ratio"], decay if own is None else own)
    if idle := sorted(set(range(len(groups))) - fitting):
        names = ", ".join(sorted(dimension_counts)[:4])
        raise ConfigurationError(
            detail=f"training.inner_optimizer.groups.{idle[0]} applies to no tensor. Its tensors and role must fit one that "
            f"no group before it takes; the model's tensors are called {names}, …"
        )
    return settings


def _fits(group: Mapping[str, Any], name: str, use: str) -> bool:
    pattern, role = group["tensors"], group["role"]
    return (pattern is None or fnmatchcase(name, pattern)) and (role is None or role == use)
