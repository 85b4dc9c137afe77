"""A job's checkpoints: look at them, take one now, go back to one."""

from __future__ import annotations

from fastapi import APIRouter, Response

from api.checkpoints.schemas import Checkpoints, RollbackOptions
from api.routes.dependencies import ANONYMOUS, Caller, IdempotencyKey, ServiceHere, accepted
from api.schemas import Command

router = APIRouter(prefix="/v1/jobs/{job}", tags=["checkpoints"])


@router.get("/checkpoints")
def list_checkpoints(job: str, service: ServiceHere) -> Checkpoints:
    """The job's whole checkpoints, oldest first, also after its end. Files are not verified here, but when one is used."""
    return Checkpoints(checkpoints=service.checkpoints(job))


@router.post("/checkpoints", status_code=202)
def take_checkpoint(
    job: str,
    response: Response,
    service: ServiceHere,
    caller: Caller = ANONYMOUS,
    idempotency_key: IdempotencyKey = None,
) -> Command:
    """Have the job save itself now, while it trains on. Refused while one is being taken, or while nobody trains."""
    return accepted(service.submit_command(job, "checkpoint", None, True, caller, idempotency_key), response)


@router.post("/rollback", status_code=202)
def roll_back(
    job: str,
    response: Response,
    service: ServiceHere,
    options: RollbackOptions | None = None,
    caller: Caller = ANONYMOUS,
    idempotency_key: IdempotencyKey = None,
) -> Command:
    """Take a running job back to a checkpoint that it keeps. What was merged since is undone, and told as discarded.

    Versions go on rising; every island adopts what the checkpoint has, and keeps its inner optimizer state.
    """
    number = (options or RollbackOptions()).checkpoint or 0
    command = service.submit_command(job, "rollback", None, True, caller, idempotency_key, count=number)
    return accepted(command, response)
