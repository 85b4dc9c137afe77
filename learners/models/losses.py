"""The loss of a language model, and what a step minimises where that is more, both from the same logits.

Source: the z-loss is that of PaLM, arXiv:2204.02311, section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

Tensors = Mapping[str, jax.Array]
Logits = Callable[[Tensors, jax.Array], jax.Array]
"""(batch, length, vocabulary) of tokens (batch, length)."""


def losses(logits: Logits, z_loss: float) -> dict[str, Any]:
    """``Model.loss``, and ``Model.objective`` where the mean of log²Z counts by ``z_loss``, Z being a softmax's divisor."""

    def both(parameters: Tensors, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores = logits(parameters, tokens[:, :-1]).astype(jnp.float32)
        log_z = jax.nn.logsumexp(scores, axis=-1)
        chosen = jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)[..., 0]
        loss = jnp.mean(log_z - chosen)
        return loss + z_loss * jnp.mean(log_z**2), loss

    return {"loss": lambda parameters, tokens: both(parameters, tokens)[1], "objective": both if z_loss else None}
