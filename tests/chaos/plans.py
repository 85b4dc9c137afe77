"""Plans for tests, and the fleet they are drawn for."""

from __future__ import annotations

from typing import Any

from orchestrator.chaos.plan import ChaosPlan, parse
from orchestrator.core.vocabulary import IslandId, IslandPlan, NodeGroupId

FLEET = tuple(
    IslandPlan(IslandId(name), NodeGroupId(name), region, 1)
    for name, region in (("us-east", "us"), ("us-west", "us"), ("europe", "europe"), ("asia", "asia"))
)
RANDOM_KILLS = {"kind": "kill", "target": {"random": 1}, "poisson": {"mtbf": 20}}


def plan(*faults: dict[str, Any], **changes: Any) -> ChaosPlan:
    """A plan that is right in itself, with these faults."""
    return parse(document(*faults, **changes))


def document(*faults: dict[str, Any], **changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"duration": 200, "faults": list(faults), "objectives": ["bystander_gap_max_s < 1"]}
    return base | changes
