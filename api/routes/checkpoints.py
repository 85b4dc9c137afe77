"""A job's checkpoints: look at them, download one, take one now, go back to one."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response

from api.http.pools import DOWNLOADS, JOBS, chunks_in, in_pool, runs_in
from api.http.streams import Stream
from api.routes.dependencies import ANONYMOUS, Caller, IdempotencyKey, ServiceHere, accepted
from api.schemas import Checkpoints, Command, RollbackOptions
from orchestrator.core import commands

router = APIRouter(prefix="/v1/jobs/{job}", tags=["checkpoints"], route_class=runs_in(JOBS))
TAR = "application/x-tar"
ARCHIVE: dict[int | str, dict[str, Any]] = {200: {"content": {TAR: {}}}}


@router.get("/checkpoints")
@in_pool(DOWNLOADS)
def list_checkpoints(job: str, service: ServiceHere) -> Checkpoints:
    """The job's whole checkpoints, oldest first, also after its end. Files are not verified here, but when one is used."""
    return Checkpoints(checkpoints=service.checkpoints(job))


@router.get("/checkpoints/{number}", response_class=Stream, responses=ARCHIVE)
@in_pool(DOWNLOADS)
def download_checkpoint(
    request: Request, job: str, number: Annotated[int, Path(ge=1, le=2**31 - 1)], service: ServiceHere
) -> Stream:
    """One whole checkpoint as a tar, also of a running job. Its manifest has the digest of every file.

    Unpacked, it is a folder that `resume.checkpoint` of a specification takes, where all nodes reach it.
    """
    name, archive = service.run(job).job, service.checkpoint_archive(job, number)
    headers = {
        "Content-Disposition": f'attachment; filename="{name}-checkpoint-{number}.tar"',
        "Content-Length": str(archive.byte_count),
    }
    return Stream(request, chunks_in(DOWNLOADS, archive.chunks()), TAR, headers)


@router.post("/checkpoints", status_code=202)
def take_checkpoint(
    job: str,
    response: Response,
    service: ServiceHere,
    caller: Caller = ANONYMOUS,
    idempotency_key: IdempotencyKey = None,
) -> Command:
    """Have the job save itself now, while it trains on. Refused while one is being taken, or while nobody trains."""
    return accepted(service.submit_command(job, commands.Checkpoint(), caller, idempotency_key), response)


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
    rollback = commands.Rollback((options or RollbackOptions()).checkpoint or 0)
    return accepted(service.submit_command(job, rollback, caller, idempotency_key), response)
