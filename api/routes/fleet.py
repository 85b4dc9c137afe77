"""The fleet: its node groups with what they have and what is free, and which of them take nothing new."""

from __future__ import annotations

from fastapi import APIRouter

from api.routes.dependencies import ANONYMOUS, Caller, ServiceHere
from api.schemas import NodeGroupChange, NodeGroups
from api.service import Service
from api.translate import command_of

router = APIRouter(prefix="/v1/node-groups", tags=["fleet"])


@router.get("")
def list_node_groups(service: ServiceHere) -> NodeGroups:
    """The node groups of the fleet, with what they have, what is free, and whether they take anything new."""
    return NodeGroups(node_groups=service.cordons.node_groups())


@router.post("/{node_group}/cordon", status_code=202)
def cordon_node_group(node_group: str, service: ServiceHere, caller: Caller = ANONYMOUS) -> NodeGroupChange:
    """Place nothing new there, in jobs that run and in those to come. What trains there, or is being placed, goes on.

    An island that is lost there waits, and so do those of a job that is submitted meanwhile. Asked twice, nothing changes.
    """
    return _changed(service, node_group, caller, cordoned=True)


@router.post("/{node_group}/uncordon", status_code=202)
def uncordon_node_group(node_group: str, service: ServiceHere, caller: Caller = ANONYMOUS) -> NodeGroupChange:
    """Place islands there again, and at once those that wait for it. Asked twice, nothing changes."""
    return _changed(service, node_group, caller, cordoned=False)


def _changed(service: Service, node_group: str, caller: str, *, cordoned: bool) -> NodeGroupChange:
    after, told = service.cordons.change(node_group, caller, cordoned)
    return NodeGroupChange(node_group=after, commands=[command_of(row) for row in told])
