"""Runs of plans on machines that may be too busy for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ATTEMPTS = 5


def injected(verdict: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the faults that were carried out."""
    return [fault for fault in verdict["faults"] if not fault["spared"]]


def verdict_with_faults(attempt: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the verdict of the first attempt in which a fault is injected.

    A fault that comes due while a busy machine does not look, or after its job's end, is skipped, and a run without any
    shows nothing of what the caller wants to see.
    """
    for _ in range(ATTEMPTS - 1):
        if injected(verdict := attempt()):
            return verdict
    return attempt()
