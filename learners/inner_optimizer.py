"""The inner optimizer: AdamW with clipping, and the learning rate as a pure function of where the schedule is.

The learning rate is not part of the optimizer's own state: the schedule goes by what the whole job has trained
(``orchestrator.replica.schedule_position``), Adam's count of moments by what this island has. So the schedule is computed
outside and enters each step as an argument.

This module knows nothing of fragments, islands or devices. Source: AdamW, arXiv:1711.05101; clipping by global norm,
linear warm-up and cosine decay are customary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import optax

from learners.contract import tokens_per_schedule_step
from orchestrator.parameters.roles import BY_NAME, Roles, role_of


def build(section: Mapping[str, Any], roles: Roles = BY_NAME) -> optax.GradientTransformation:
    """Return AdamW without its learning rate: its updates are to be scaled by ``-learning_rate(…)`` and added.

    ``section`` is ``training.inner_optimizer`` of the job specification. Weight decay spares the tensors whose role says
    so: by their names, vectors and those that contain ``embed``.
    """

    def decaying(parameters: Mapping[str, jax.Array]) -> dict[str, bool]:
        return {name: role_of(name, tensor.ndim, roles).decays for name, tensor in parameters.items()}

    return optax.chain(
        optax.clip_by_global_norm(section["clip_norm"]),
        optax.scale_by_adam(b1=section["beta1"], b2=section["beta2"]),
        optax.add_decayed_weights(section["weight_decay"], mask=decaying),
    )


def learning_rate(section: Mapping[str, Any], horizon_steps: int, step: int) -> float:
    """The learning rate of the inner step that starts at step ``step`` of the schedule (0 for the first).

    Linear from lr / warm-up to lr over ``warmup_steps``, then a cosine down to lr · lr_final_ratio at ``horizon_steps``,
    constant after.
    """
    peak: float = section["lr"]
    warmup: int = section["warmup_steps"]
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, horizon_steps - warmup))
    floor: float = section["lr_final_ratio"]
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def horizon_steps(spec: Mapping[str, Any]) -> int:
    """How many inner steps each island takes if all are equally fast: ``JobSpec.horizon_steps``, from plain data."""
    budget = spec["budget"]
    if budget.get("steps"):
        return int(budget["steps"])
    return max(1, int(budget["tokens"]) // tokens_per_schedule_step(spec))
