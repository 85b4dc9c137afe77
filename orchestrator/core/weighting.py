"""The weight of each contribution in a merge: the quantity of its tokens times their quality.

    w_m = c_tokens · (c_tokens / c_steps)

Source: Decoupled DiLoCo, arXiv:2604.21428 (token weighting). Normalised here so that the weights of one merge sum to one.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import fsum

from orchestrator.core.vocabulary import Contribution, WeightedPayload


def weigh(contributions: Iterable[Contribution]) -> tuple[WeightedPayload, ...]:
    """Give each contribution its share, in the order of island names, so that arrival order never changes a merge."""
    ordered = sorted(contributions, key=lambda c: c.island)
    raw = [c.token_count * (c.token_count / c.step_count) for c in ordered]
    total = fsum(raw)
    return tuple(WeightedPayload(c.payload, c.island, w / total) for c, w in zip(ordered, raw, strict=True))
