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


def update(published: Arrays, since: Arrays) -> Arrays:
    """Θ − θ_since: what is added to θ where own work is kept, for Θ + (θ − θ_since) is θ + (Θ − θ_since).

    It needs nothing of what is on the devices, so whoever receives a publication can work it out while steps go on.
    """
    return {name: array - since[name] for name, array in published.items()}
