"""The smallest model of the built-in kind: one block of width 64. A ``model.factory``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from learners.model import Model
from learners.models.plain import transformer
from orchestrator.models.presets import Architecture


def build(spec: Mapping[str, Any]) -> Model:
    return transformer(Architecture(width=64, layer_count=1), jnp.float32)
