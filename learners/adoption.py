"""The arithmetic of adoption: a published fragment combined with what is kept of the island's own.

The rules, their sources, and which of them applies from where on are ``orchestrator.replica.work``'s. Arrays are float32, by
tensor name, of the same names and shapes.
"""

from __future__ import annotations

import numpy as np

from learners.contract import Arrays


def mixed(published: Arrays, own: Arrays, alpha: float) -> Arrays:
    """α·θ + (1 − α)·Θ."""
    own_share = np.float32(alpha)
    return {name: own_share * own[name] + (1 - own_share) * array for name, array in published.items()}


def rebased(published: Arrays, own: Arrays, since: Arrays) -> Arrays:
    """Θ + (θ − θ_since)."""
    return {name: array + (own[name] - since[name]) for name, array in published.items()}
