"""Plans for tests, the fleet they are drawn for, and runs of them on machines that may be too busy for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestrator.chaos.plan import ChaosPlan, parse
from orchestrator.core.vocabulary import IslandId, IslandPlan, NodeGroupId

FLEET = tuple(
    IslandPlan(IslandId(name), NodeGroupId(name), region, 1)
    for name, region in (("us-east", "us"), ("us-west", "us"), ("europe", "europe"), ("asia", "asia"))
)
ATTEMPTS = 5
RANDOM_KILLS = {"kind": "kill", "target": {"random": 1}, "poisson": {"mtbf": 20}}


def plan(*faults: dict[str, Any], **changes: Any) -> ChaosPlan:
    """A plan that is right in itself, with these faults."""
    return parse(document(*faults, **changes))


def document(*faults: dict[str, Any], **changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"duration": 200, "faults": list(faults), "objectives": ["bystander_gap_max_s < 1"]}
    return base | changes


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
