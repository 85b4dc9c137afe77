"""A job's checkpoints: look at them, take one now."""

from __future__ import annotations

from fastapi import APIRouter, Response

from api.checkpoints.schemas import Checkpoints
from api.routes.dependencies import ANONYMOUS, Caller, IdempotencyKey, ServiceHere, accepted
from api.schemas import Command

router = APIRouter(prefix="/v1/jobs/{job}/checkpoints", tags=["checkpoints"])


@router.get("")
def list_checkpoints(job: str, service: ServiceHere) -> Checkpoints:
    """The job's whole checkpoints, oldest first, also after its end. Files are not verified here, but when one is used."""
    return Checkpoints(checkpoints=service.checkpoints(job))


@router.post("", status_code=202)
def take_checkpoint(
    job: str,
    response: Response,
    service: ServiceHere,
    caller: Caller = ANONYMOUS,
    idempotency_key: IdempotencyKey = None,
) -> Command:
    """Have the job save itself now, while it trains on. Refused while one is being taken, or while nobody trains."""
    return accepted(service.submit_command(job, "checkpoint", None, True, caller, idempotency_key), response)
