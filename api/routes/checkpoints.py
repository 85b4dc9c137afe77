"""A job's checkpoints: list them, download one, take one now, go back to one."""

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
    """List the job's complete checkpoints, oldest first, also after its end. Files are verified only when used."""
    return Checkpoints(checkpoints=service.checkpoints(job))


@router.get("/checkpoints/{number}", response_class=Stream, responses=ARCHIVE)
@in_pool(DOWNLOADS)
def download_checkpoint(
    request: Request, job: str, number: Annotated[int, Path(ge=1, le=2**31 - 1)], service: ServiceHere
) -> Stream:
    """Download a complete checkpoint as a tar, also of a running job. Its manifest has the digest of every file.

    Unpack it into a folder that all nodes reach, and name that as `resume.checkpoint` in a specification.
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
    """Take a checkpoint now, while training continues. Refused while one is being taken, or while no island trains."""
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
    """Take a running job back to one of its checkpoints. Later merges are undone, and their tokens count as discarded.

    Versions keep rising. Every island adopts the checkpoint's parameters and keeps its inner optimizer state.
    """
    rollback = commands.Rollback((options or RollbackOptions()).checkpoint or 0)
    return accepted(service.submit_command(job, rollback, caller, idempotency_key), response)
