"""The islands of a job: look at them, kill or drain one, place one again.

The fleet: its node groups with what they have and what is free, and which of them take nothing new.
"""

from __future__ import annotations

from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, StrictBool

from api.http.pools import FLEET, JOBS, runs_in
from api.jobs.service import Service
from api.jobs.status_cache import tag_of
from api.jobs.translate import command_of
from api.routes.dependencies import (
    ANONYMOUS,
    VERSIONED,
    Caller,
    IdempotencyKey,
    IfMatch,
    IfNoneMatch,
    ServiceHere,
    accepted,
    versioned,
)
from api.schemas import Command, Island, Islands, NodeGroupChange, NodeGroups
from orchestrator.core import commands
from orchestrator.core.vocabulary import IslandId

fleet_router = APIRouter(prefix="/v1/node-groups", tags=["fleet"], route_class=runs_in(FLEET))


@fleet_router.get("", response_model=NodeGroups, responses=VERSIONED)
def list_node_groups(service: ServiceHere, if_none_match: IfNoneMatch = None) -> Response:
    """The node groups of the fleet, with what they have, what is free, and whether they take anything new.

    The ETag in ``If-Match`` of a cordon or an uncordon holds as long as no node group is cordoned or uncordoned.
    """
    generation = service.cordons.generation()
    body = NodeGroups(node_groups=service.cordons.node_groups()).model_dump_json().encode()
    return versioned(body, tag_of(generation, body), if_none_match)


@fleet_router.post("/{node_group}/cordon", status_code=202)
def cordon_node_group(
    node_group: str, service: ServiceHere, caller: Caller = ANONYMOUS, if_match: IfMatch = None
) -> NodeGroupChange:
    """Place nothing new there, in jobs that run and in those to come. What trains there, or is being placed, goes on.

    An island that is lost there waits, and so do those of a job that is submitted meanwhile. Asked twice, nothing changes.
    """
    return _changed(service, node_group, caller, if_match, cordoned=True)


@fleet_router.post("/{node_group}/uncordon", status_code=202)
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


router = APIRouter(prefix="/v1/jobs/{job}/islands", tags=["islands"], route_class=runs_in(JOBS))


class KillOptions(BaseModel):
    """``restart`` false keeps the island away until it is re-added."""

    model_config = ConfigDict(extra="forbid")

    restart: StrictBool = True


@router.get("")
def list_islands(job: str, service: ServiceHere) -> Islands:
    """The islands of a job as they stand, in the order of its specification."""
    return Islands(islands=service.job(job).islands)


@router.get("/{island}")
def get_island(job: str, island: str, service: ServiceHere) -> Island:
    """One island as it stands: its state and why, its process, how far and how fast it trains."""
    return service.island(job, island)


@router.post("/{island}/kill", status_code=202)
def kill_island(
    job: str,
    island: str,
    response: Response,
    service: ServiceHere,
    options: KillOptions | None = None,
    caller: Caller = ANONYMOUS,
    idempotency_key: IdempotencyKey = None,
) -> Command:
    """SIGKILL the island's process, no warning. It is placed again by itself unless ``restart`` is false."""
    kill = commands.Kill(IslandId(island), (options or KillOptions()).restart)
    return accepted(service.submit_command(job, kill, caller, idempotency_key), response)


@router.post("/{island}/drain", status_code=202)
def drain_island(
    job: str,
    island: str,
    response: Response,
    service: ServiceHere,
    caller: Caller = ANONYMOUS,
    idempotency_key: IdempotencyKey = None,
) -> Command:
    """Have the island step no more and see all its work merged, then end its process. It stays away until re-added.

    Refused where that could not be kept: the island does not train, or no quorum would go on merging without it.
    """
    return accepted(service.submit_command(job, commands.Drain(IslandId(island)), caller, idempotency_key), response)


@router.post("/{island}/readd", status_code=202)
def readd_island(
    job: str,
    island: str,
    response: Response,
    service: ServiceHere,
    caller: Caller = ANONYMOUS,
    idempotency_key: IdempotencyKey = None,
) -> Command:
    """Place an island that is away, now. It catches up before it contributes. One that is draining trains on."""
    return accepted(service.submit_command(job, commands.Readd(IslandId(island)), caller, idempotency_key), response)
