"""The islands of a job (list, kill, drain, place again, profile), and the node groups of the fleet."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt

from api.http.pools import DOWNLOADS, FLEET, JOBS, chunks_in, in_pool, runs_in
from api.http.streams import Stream
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
from api.schemas import Command, Island, Islands, NodeGroupChange, NodeGroups, Profile
from orchestrator.core import commands
from orchestrator.core.vocabulary import IslandId

fleet_router = APIRouter(prefix="/v1/node-groups", tags=["fleet"], route_class=runs_in(FLEET))


@fleet_router.get("", response_model=NodeGroups, responses=VERSIONED)
def list_node_groups(service: ServiceHere, if_none_match: IfNoneMatch = None) -> Response:
    """List the node groups of the fleet, with their resources, what is free, and whether they are cordoned.

    In ``If-Match`` of a cordon or uncordon, the ETag matches until some node group is cordoned or uncordoned.
    """
    generation = service.cordons.generation()
    body = NodeGroups(node_groups=service.cordons.node_groups()).model_dump_json().encode()
    return versioned(body, tag_of(generation, body), if_none_match)


@fleet_router.post("/{node_group}/cordon", status_code=202)
def cordon_node_group(
    node_group: str, service: ServiceHere, caller: Caller = ANONYMOUS, if_match: IfMatch = None
) -> NodeGroupChange:
    """Place nothing new on the node group, in running and future jobs. Islands that train or start there continue.

    An island that is lost there waits, and so do the islands of jobs submitted meanwhile. Idempotent.
    """
    return _changed(service, node_group, caller, if_match, cordoned=True)


@fleet_router.post("/{node_group}/uncordon", status_code=202)
def uncordon_node_group(
    node_group: str, service: ServiceHere, caller: Caller = ANONYMOUS, if_match: IfMatch = None
) -> NodeGroupChange:
    """Place islands on the node group again, starting with those that wait for it. Idempotent."""
    return _changed(service, node_group, caller, if_match, cordoned=False)


@fleet_router.post("/{node_group}/nodes/{node}/cordon", status_code=202)
def cordon_node(
    node_group: str, node: str, service: ServiceHere, caller: Caller = ANONYMOUS, if_match: IfMatch = None
) -> NodeGroupChange:
    """Place nothing new on this node of the group. Islands that train there continue. Idempotent.

    Refused with 409 for the last node of the group that can be used: cordon the group instead.
    """
    return NodeGroupChange(
        node_group=service.cordons.change_node(node_group, node, caller, True, if_match), commands=[]
    )


@fleet_router.post("/{node_group}/nodes/{node}/uncordon", status_code=202)
def uncordon_node(
    node_group: str, node: str, service: ServiceHere, caller: Caller = ANONYMOUS, if_match: IfMatch = None
) -> NodeGroupChange:
    """Place islands on this node again, also if the rule cordoned it. Its failures count from now on only. Idempotent."""
    return NodeGroupChange(
        node_group=service.cordons.change_node(node_group, node, caller, False, if_match), commands=[]
    )


def _changed(
    service: Service, node_group: str, caller: str, if_match: str | None, *, cordoned: bool
) -> NodeGroupChange:
    after, commands = service.cordons.change(node_group, caller, cordoned, if_match)
    return NodeGroupChange(node_group=after, commands=[command_of(row) for row in commands])


router = APIRouter(prefix="/v1/jobs/{job}/islands", tags=["islands"], route_class=runs_in(JOBS))


class KillOptions(BaseModel):
    """Options of a kill. An island with ``restart`` false stays away until it is re-added."""

    model_config = ConfigDict(extra="forbid")

    restart: StrictBool = True


@router.get("")
def list_islands(job: str, service: ServiceHere) -> Islands:
    """List the islands of a job with their current state, in the order of the specification."""
    return Islands(islands=service.job(job).islands)


@router.get("/{island}")
def get_island(job: str, island: str, service: ServiceHere) -> Island:
    """Return one island: its state with the reason, its process, its progress and speed."""
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
    """Kill the island's process with SIGKILL. The island is placed again automatically unless ``restart`` is false."""
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
    """Stop the island's training, merge all its work, then end its process. It stays away until it is re-added.

    Refused if the island does not train, or if no quorum would remain without it.
    """
    return accepted(service.submit_command(job, commands.Drain(IslandId(island)), caller, idempotency_key), response)


PROFILE_STEPS_MAX = 100
PROFILE_NAME = r"^[A-Za-z0-9_-]{1,200}$"
Name = Annotated[str, Path(pattern=PROFILE_NAME)]
ZIP = "application/zip"


class ProfileOptions(BaseModel):
    """Options of a profile: how many inner steps the trace has."""

    model_config = ConfigDict(extra="forbid")

    steps: StrictInt = Field(default=5, ge=1, le=PROFILE_STEPS_MAX)


@router.post("/{island}/profiles/{profile}", status_code=202)
def record_profile(
    job: str,
    island: str,
    profile: Name,
    service: ServiceHere,
    options: ProfileOptions | None = None,
    caller: Caller = ANONYMOUS,
) -> Profile:
    """Record a trace of the island's next inner steps, while it trains, under a name that the caller chooses.

    The island stands still while its profiler starts and writes its files (`stalled_s`). It records one trace at a time,
    of at most two minutes and 256 MiB, and drops it when no byte was read for ten minutes, or when it records another.
    Refused unless the island trains in JAX or PyTorch. Idempotent by name.
    """
    return service.profile(job, island, profile, (options or ProfileOptions()).steps, caller)


@router.get("/{island}/profiles/{profile}")
def get_profile(job: str, island: str, profile: Name, service: ServiceHere) -> Profile:
    """Return how far a trace is. 404 if the island's process does not know it, for example because it was replaced."""
    return service.profile(job, island, profile, None)


@router.delete("/{island}/profiles/{profile}")
def cancel_profile(job: str, island: str, profile: Name, service: ServiceHere, caller: Caller = ANONYMOUS) -> Profile:
    """End a recording at the island's next step, without a trace, or drop a complete trace. Idempotent."""
    return service.profile(job, island, profile, commands.CANCEL_PROFILE, caller)


@router.get("/{island}/profiles/{profile}/trace", response_class=Stream, responses={200: {"content": {ZIP: {}}}})
@in_pool(DOWNLOADS)
def download_trace(request: Request, job: str, island: str, profile: Name, service: ServiceHere) -> Stream:
    """Download a complete trace as a zip of the profiler's files, which TensorBoard, XProf or Perfetto opens."""
    state, chunks = service.trace(job, island, profile)
    headers = {
        "Content-Disposition": f'attachment; filename="{state.job}-{island}-profile.zip"',
        "Content-Length": str(state.byte_count),
    }
    return Stream(request, chunks_in(DOWNLOADS, chunks), ZIP, headers)


@router.post("/{island}/readd", status_code=202)
def readd_island(
    job: str,
    island: str,
    response: Response,
    service: ServiceHere,
    caller: Caller = ANONYMOUS,
    idempotency_key: IdempotencyKey = None,
) -> Command:
    """Place an island again now. It catches up before it contributes. An island that is draining resumes training."""
    return accepted(service.submit_command(job, commands.Readd(IslandId(island)), caller, idempotency_key), response)
