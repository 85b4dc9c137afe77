"""The islands of a job: look at them, kill or drain one, place one again."""

from __future__ import annotations

from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, StrictBool

from api.http.pools import JOBS
from api.http.routing import runs_in
from api.routes.dependencies import ANONYMOUS, Caller, IdempotencyKey, ServiceHere, accepted
from api.schemas import Command, Island, Islands
from orchestrator.core import commands
from orchestrator.core.vocabulary import IslandId

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
