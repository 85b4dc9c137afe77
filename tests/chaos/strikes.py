"""Runs of plans on machines that may be too busy for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ATTEMPTS = 5


def struck(verdict: dict[str, Any]) -> list[dict[str, Any]]:
    """The faults that were carried out."""
    return [fault for fault in verdict["faults"] if not fault["spared"]]


def verdict_with_strikes(attempt: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The verdict of the first attempt in which a fault strikes.

    A fault that comes due while a busy machine does not look, or after its job's end, is spared, and a run without any
    shows nothing of what the caller wants to see.
    """
    for _ in range(ATTEMPTS - 1):
        if struck(verdict := attempt()):
            return verdict
    return attempt()
