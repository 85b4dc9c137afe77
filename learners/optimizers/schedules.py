"""The learning rate of an inner step: a pure function of where the job is in its schedule.

It is not part of an optimizer's own state: the schedule goes by what the whole job has trained
(``orchestrator.replica.schedule_position``), an optimizer's moments by what this island has. So it is computed outside and
enters each step as an argument.

    cosine  warm-up, then half a cosine down to lr · lr_final_ratio at the horizon
    linear  warm-up, then a line down to it
    wsd     warm-up, constant, and a line down to it over the last ``decay_ratio`` of the horizon

Sources: cosine, arXiv:1608.03983; warm-up, stable, decay, arXiv:2404.06395.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from learners.contract import tokens_per_schedule_step


def learning_rate(section: Mapping[str, Any], horizon_steps: int, step: int) -> float:
    """The learning rate of the inner step that starts at step ``step`` of the schedule (0 for the first).

    ``section`` is ``training.inner_optimizer`` of the job specification. Linear from lr / warm-up to lr over
    ``warmup_steps``, then by ``schedule``; constant from ``horizon_steps`` on.
    """
    peak: float = section["lr"]
    warmup: int = section["warmup_steps"]
    if step < warmup:
        return peak * (step + 1) / warmup
    floor: float = section["lr_final_ratio"]
    schedule = section["schedule"]
    if schedule == "wsd":
        decay_steps = section["decay_ratio"] * horizon_steps
        left = (horizon_steps - step) / decay_steps if decay_steps else math.inf
        return peak * (floor + (1 - floor) * min(1.0, max(0.0, left)))
    progress = min(1.0, (step - warmup) / max(1, horizon_steps - warmup))
    if schedule == "linear":
        return peak * (1 - (1 - floor) * progress)
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def update_scale(section: Mapping[str, Any], horizon_steps: int, step: int) -> float:
    """Return what the optimizer's update is multiplied by in the inner step that starts at ``step`` of the schedule.

    The updates of a kind have no learning rate, so this is the learning rate. A factory's optimizer brings its own, which
    the schedule takes a part of: from 1 / warm-up to 1, then down to ``lr_final_ratio``.
    """
    lr = learning_rate(section, horizon_steps, step)
    return lr / section["lr"] if section["factory"] else lr


def horizon_steps(spec: Mapping[str, Any]) -> int:
    """How many inner steps each island takes if all are equally fast: ``JobSpec.horizon_steps``, from plain data."""
    budget = spec["budget"]
    if budget.get("steps"):
        return int(budget["steps"])
    return max(1, int(budget["tokens"]) // tokens_per_schedule_step(spec))
