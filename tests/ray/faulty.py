"""A user's model whose code is wrong, and only where islands build it: the evaluator can, so that the job begins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray

from learners.models import plain
from learners.models.model import Model
from orchestrator.models.presets import PLAIN


def build(spec: Mapping[str, Any]) -> Model:
    name = ray.get_runtime_context().get_actor_name() or ""
    print(f"my factory is called in {name}")
    if ":evaluator-" not in name:
        raise ValueError("my own mistake")
    return plain.transformer(PLAIN["nano"], "float32")
