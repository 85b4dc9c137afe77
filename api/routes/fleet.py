"""The fleet: its node groups with what they have and what is free."""

from __future__ import annotations

from fastapi import APIRouter

from api.routes.dependencies import ServiceHere
from api.schemas import NodeGroup, NodeGroups

router = APIRouter(prefix="/v1/node-groups", tags=["fleet"])


@router.get("")
def list_node_groups(service: ServiceHere) -> NodeGroups:
    return NodeGroups(node_groups=[NodeGroup.model_validate(group) for group in service.node_groups()])
