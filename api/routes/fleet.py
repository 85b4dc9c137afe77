"""The fleet: its node groups with what they have and what is free, and which of them take nothing new."""

from __future__ import annotations

from fastapi import APIRouter, Response

from api.http.pools import FLEET
from api.http.routing import runs_in
from api.jobs.service import Service
from api.jobs.status_cache import tag_of
from api.jobs.translate import command_of
from api.routes.dependencies import ANONYMOUS, VERSIONED, Caller, IfMatch, IfNoneMatch, ServiceHere, versioned
from api.schemas import NodeGroupChange, NodeGroups

router = APIRouter(prefix="/v1/node-groups", tags=["fleet"], route_class=runs_in(FLEET))


@router.get("", response_model=NodeGroups, responses=VERSIONED)
def list_node_groups(service: ServiceHere, if_none_match: IfNoneMatch = None) -> Response:
    """The node groups of the fleet, with what they have, what is free, and whether they take anything new.

    The ETag in ``If-Match`` of a cordon or an uncordon holds as long as no node group is cordoned or uncordoned.
    """
    generation = service.cordons.generation()
    body = NodeGroups(node_groups=service.cordons.node_groups()).model_dump_json().encode()
    return versioned(body, tag_of(generation, body), if_none_match)


@router.post("/{node_group}/cordon", status_code=202)
def cordon_node_group(
    node_group: str, service: ServiceHere, caller: Caller = ANONYMOUS, if_match: IfMatch = None
) -> NodeGroupChange:
    """Place nothing new there, in jobs that run and in those to come. What trains there, or is being placed, goes on.

    An island that is lost there waits, and so do those of a job that is submitted meanwhile. Asked twice, nothing changes.
    """
    return _changed(service, node_group, caller, if_match, cordoned=True)


@router.post("/{node_group}/uncordon", status_code=202)
def uncordon_node_group(
    node_group: str, service: ServiceHere, caller: Caller = ANONYMOUS, if_match: IfMatch = None
) -> NodeGroupChange:
    """Place islands there again, and at once those that wait for it. Asked twice, nothing changes."""
    return _changed(service, node_group, caller, if_match, cordoned=False)


def _changed(
    service: Service, node_group: str, caller: str, if_match: str | None, *, cordoned: bool
) -> NodeGroupChange:
    after, commands = service.cordons.change(node_group, caller, cordoned, if_match)
    return NodeGroupChange(node_group=after, commands=[command_of(row) for row in commands])
