"""Jobs: submit, list, read, prioritise, cancel, scale, remove, report; and what each has.

That is its commands, its files to download, and its checkpoints: list them, download one, take one now, go back to one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from api.http.guard import DOCUMENT
from api.http.pools import BODY, DOWNLOADS, JOBS, LISTS, PARSING, SUBMITS, chunks_in, in_pool, runs_in
from api.http.streams import File, Stream
from api.jobs.job_list import JobList, Retainer
from api.jobs.parameters import OpenParameters, Parameters
from api.jobs.path_check import PIECE_BYTES
from api.jobs.status_cache import tag_of
from api.jobs.translate import settings_command
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
from api.schemas import (
    Checkpoints,
    Command,
    Commands,
    Job,
    JobCheck,
    Jobs,
    JobState,
    Restart,
    RetentionPlan,
    RollbackOptions,
    Scale,
    SettingsChange,
    Specification,
)
from orchestrator.core import commands
from orchestrator.core.vocabulary import NodeGroupId
from orchestrator.host.records import HELD_CHARACTERS_MAX
from orchestrator.specification import documents
from orchestrator.specification.config import JobSpec
from orchestrator.system.run_folder import REPORT, REPORT_PAGE, Retention

checkpoints_router = APIRouter(prefix="/v1/jobs/{job}", tags=["checkpoints"], route_class=runs_in(JOBS))
TAR = "application/x-tar"
ARCHIVE: dict[int | str, dict[str, Any]] = {200: {"content": {TAR: {}}}}
commands_router = APIRouter(prefix="/v1/jobs/{job}/commands", tags=["commands"], route_class=runs_in(JOBS))
parameters_router = APIRouter(prefix="/v1/jobs", tags=["jobs"], route_class=runs_in(DOWNLOADS))
BYTES: dict[int | str, dict[str, Any]] = {200: {"content": {"application/octet-stream": {}}}}
NEWER = BYTES | {204: {"description": "The caller's versions are the newest"}}
HeldVersions = Annotated[
    str, Query(max_length=HELD_CHARACTERS_MAX, pattern=r"^((-1|[0-9]{1,15})(,(-1|[0-9]{1,15}))*)?$")
]
router = APIRouter(prefix="/v1/jobs", tags=["jobs"], route_class=runs_in(JOBS))
REPORT_JSON: dict[int | str, dict[str, Any]] = {200: {"content": {"application/json": {"schema": {"type": "object"}}}}}
REPORT_HTML: dict[int | str, dict[str, Any]] = {200: {"content": {"text/html": {"schema": {"type": "string"}}}}}
PRIORITY_MAX = 100
"""The lowest priority is its negative."""
SPEC_SCHEMA = {"schema": JobSpec.model_json_schema()}
SPEC_BODY = {
    "requestBody": {"required": True, "content": {"application/json": SPEC_SCHEMA, "application/yaml": SPEC_SCHEMA}}
}


class JobChange(BaseModel):
    """The fields of a queued job that may be changed."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"priority": 10}]})

    priority: int = Field(strict=True, ge=-PRIORITY_MAX, le=PRIORITY_MAX)


@router.post("", status_code=201, openapi_extra=SPEC_BODY)
async def submit_job(
    request: Request,
    response: Response,
    service: ServiceHere,
    priority: Annotated[
        int, Query(ge=-PRIORITY_MAX, le=PRIORITY_MAX, description="jobs of higher priority start first")
    ] = 0,
    caller: Caller = ANONYMOUS,
    idempotency_key: IdempotencyKey = None,
) -> Job:
    """Submit a job specification, JSON or YAML. It is checked against the fleet first; 422 lists every problem.

    The job starts at once if there is room. Otherwise it is `queued`: by priority, then by order of submission. No job
    overtakes another.
    """
    document = await PARSING.run(parse_body, await request.body(), request.headers.get("content-type", ""))
    job = await SUBMITS.run(service.submit, document, caller, idempotency_key, priority)
    response.headers["Location"] = f"/v1/jobs/{job.job}"
    return job


@router.post("/check", openapi_extra=SPEC_BODY)
async def check_job(request: Request, service: ServiceHere) -> JobCheck:
    """Check a job specification, JSON or YAML, as a submission would; nothing is queued.

    422 lists every problem. The model's code is not run, and no text is read: `atoll check` does both.
    """
    document = await PARSING.run(parse_body, await request.body(), request.headers.get("content-type", ""))
    spec = await SUBMITS.run(service.check, document)
    return JobCheck(
        name=spec.name,
        island_count=spec.island_count,
        token_budget=spec.token_budget,
        steps=spec.horizon_steps,
        specification=spec.model_dump(mode="json"),
    )


@router.get("", response_model=Jobs, responses=VERSIONED)
@in_pool(LISTS)
def list_jobs(
    job_list: JobListHere,
    if_none_match: IfNoneMatch = None,
    state: Annotated[JobState | None, Query(description="only jobs in this state")] = None,
    name: Annotated[str | None, Query(max_length=200, description="only jobs with this name")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[str | None, Query(max_length=200, description="`next_cursor` of the previous page")] = None,
) -> Response:
    """List jobs, newest first. A job that does not answer is shown in its last known state, with the reason."""
    body = job_list.page(state, name, limit, cursor).model_dump_json().encode()
    return versioned(body, tag_of("list", body), if_none_match)


@router.get("/{job}", response_model=Job, responses=VERSIONED)
def get_job(job: str, service: ServiceHere, if_none_match: IfNoneMatch = None) -> Response:
    """Return one job with its islands, fragments, losses, goodput and statistics. ``latest`` is the newest.

    In ``If-Match`` of a cancel, scale or delete, the ETag matches until the job gets another command.
    """
    snapshot = service.snapshot(job)
    return versioned(snapshot.body, snapshot.tag, if_none_match)


@router.get("/{job}/spec")
def get_specification(job: str, service: ServiceHere) -> Specification:
    """Return the specification that the job was submitted with, and all defaults."""
    return service.specification(job)


@router.patch("/{job}")
def change_job(job: str, change: JobChange, service: ServiceHere) -> Job:
    """Change the priority of a queued job, and with it its place in the queue. 409 if it is no longer queued."""
    return service.prioritise(job, change.priority)


@router.delete("/{job}", status_code=204)
def delete_job(job: str, job_list: JobListHere, if_match: IfMatch = None) -> None:
    """Remove a job that has ended, with its files: tape, report, merged parameters. 409 if it has not ended."""
    job_list.remove(job, if_match)


@router.post("/{job}/cancel", status_code=202)
def cancel_job(
    job: str,
    response: Response,
    service: ServiceHere,
    caller: Caller = ANONYMOUS,
    idempotency_key: IdempotencyKey = None,
    if_match: IfMatch = None,
) -> Command:
    """Stop a job without waiting for the work in flight. It still writes its report. A queued job is cancelled at once."""
    return accepted(service.submit_command(job, commands.Cancel(), caller, idempotency_key, if_match), response)


@router.post("/{job}/finish", status_code=202)
def finish_job(
    job: str,
    response: Response,
    service: ServiceHere,
    caller: Caller = ANONYMOUS,
    idempotency_key: IdempotencyKey = None,
    if_match: IfMatch = None,
) -> Command:
    """End a running job early, as at the end of its budget: islands give their last work, and it completes with it.

    Refused if it finishes already, or if no island has trained yet.
    """
    return accepted(service.submit_command(job, commands.Finish(), caller, idempotency_key, if_match), response)


@router.post("/{job}/set", status_code=202)
def set_job(
    job: str,
    change: SettingsChange,
    response: Response,
    service: ServiceHere,
    caller: Caller = ANONYMOUS,
    idempotency_key: IdempotencyKey = None,
    if_match: IfMatch = None,
) -> Command:
    """Change settings of a running job, all of them or none. Islands use them from their next boundary on.

    Refused with field, value and bounds if a setting is outside its bounds. `settings` of the job shows them.
    """
    command = settings_command(change, service.specification(job).specification)
    return accepted(service.submit_command(job, command, caller, idempotency_key, if_match), response)


@router.post("/{job}/restart", status_code=202)
def restart_job(job: str, service: ServiceHere, caller: Caller = ANONYMOUS) -> Restart:
    """End the process of a running job's synchroniser, even one that hangs. A new one continues from tape and journal.

    Islands train meanwhile, and no merged work is lost. 409 if the job is queued, or has ended.
    """
    return service.restart(job, caller)


@router.post("/{job}/upgrade", status_code=202)
@in_pool(SUBMITS)
def upgrade_job(
    job: str,
    response: Response,
    service: ServiceHere,
    caller: Caller = ANONYMOUS,
    idempotency_key: IdempotencyKey = None,
    if_match: IfMatch = None,
) -> Command:
    """Restart a running job's synchroniser in the release of this service, once a checkpoint is complete.

    Islands train on meanwhile, and go on in their own release. 409 with the reason if the job has ended, runs in this
    release already, or cannot continue in it. If the new synchroniser does not start, the job continues in the old release.
    """
    return accepted(service.upgrade(job, caller, idempotency_key, if_match), response)


@router.post("/{job}/scale", status_code=202)
def scale_job(
    job: str,
    scale: Scale,
    response: Response,
    service: ServiceHere,
    caller: Caller = ANONYMOUS,
    idempotency_key: IdempotencyKey = None,
    if_match: IfMatch = None,
) -> Command:
    """Change the number of a running job's islands on a node group. Islands that leave are drained, the last first.

    Refused beyond the ``count_max`` of the specification, or if too few islands for a merge would remain.
    """
    command = commands.Scale(NodeGroupId(scale.node_group), scale.count)
    return accepted(service.submit_command(job, command, caller, idempotency_key, if_match), response)


@router.get("/{job}/report", response_class=File, responses=REPORT_JSON)
@router.get("/{job}/report.json", response_class=File, responses=REPORT_JSON)
def get_report(request: Request, job: str, service: ServiceHere) -> File:
    """Return the results of an ended job; 409 if it has not ended."""
    service.report(job)  # refuses a damaged report, with the reason
    return File(request, service.result(job, REPORT), "application/json")


@router.get("/{job}/report.html", response_class=File, responses=REPORT_HTML)
def get_report_page(request: Request, job: str, service: ServiceHere) -> File:
    """Return the report of an ended job as a self-contained page; 409 if it has not ended."""
    page = service.result(job, REPORT_PAGE)
    return File(request, page, "text/html", headers={"Content-Security-Policy": DOCUMENT})


def parse_body(body: bytes, content_type: str) -> dict[str, Any]:
    """Return the mapping in the body: JSON if the content type says so, else YAML. Raises ConfigurationError.

    Takes up to a second of CPU, so it runs in a thread.
    """
    is_json = content_type.split(";")[0].strip().lower() == "application/json"
    read = documents.read_json if is_json else documents.read_yaml
    return documents.mapping(read(body, documents.REQUEST, BODY), BODY)


@checkpoints_router.get("/checkpoints")
@in_pool(DOWNLOADS)
def list_checkpoints(job: str, service: ServiceHere) -> Checkpoints:
    """List the job's complete checkpoints, oldest first, also after its end. Files are verified only when used."""
    return Checkpoints(checkpoints=service.checkpoints(job))


@checkpoints_router.get("/checkpoints/{number}", response_class=Stream, responses=ARCHIVE)
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


@checkpoints_router.post("/checkpoints", status_code=202)
def take_checkpoint(
    job: str,
    response: Response,
    service: ServiceHere,
    caller: Caller = ANONYMOUS,
    idempotency_key: IdempotencyKey = None,
) -> Command:
    """Take a checkpoint now, while training continues. Refused while one is being taken, or while no island trains."""
    return accepted(service.submit_command(job, commands.Checkpoint(), caller, idempotency_key), response)


@checkpoints_router.post("/rollback", status_code=202)
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


@commands_router.get("")
def list_commands(job: str, service: ServiceHere) -> Commands:
    """List all commands of a job, oldest first."""
    return Commands(commands=service.commands(job))


@commands_router.get("/{command}")
def get_command(job: str, command: str, service: ServiceHere) -> Command:
    """Return one command. It is ``pending`` until the job has decided."""
    return service.command(job, command)


async def parameters_of(request: Request) -> Parameters:
    parameters: Parameters = request.app.state.parameters
    return parameters


@parameters_router.get("/{job}/parameters", response_class=Stream, responses=BYTES)
def download_parameters(
    request: Request, job: str, parameters: Annotated[Parameters, Depends(parameters_of)]
) -> Stream:
    """Download the merged parameters as safetensors: the final ones, or the current ones of a running job.

    The file's metadata has the job's specification under `spec`, and for a running job the fragments' `versions`. 409 while
    there are none yet.
    """
    export = parameters.open(job)
    headers = {
        "Content-Disposition": f'attachment; filename="{export.job}.safetensors"',
        "Content-Length": str(export.bytes_count),
    }
    return Stream(request, chunks_in(DOWNLOADS, export.chunks()), "application/octet-stream", headers)


@parameters_router.get("/{job}/updates", response_class=Stream, responses=NEWER)
def download_updates(
    request: Request, job: str, parameters: Annotated[Parameters, Depends(parameters_of)], held: HeldVersions = ""
) -> Response:
    """Download what leads from the versions that a follower holds to the merged parameters: `atoll follow` uses it.

    `held` are the versions of all fragments, in order, -1 for a fragment that is not held; empty for nothing. A fragment
    comes as the encoded updates that islands get, or whole where those are gone. 204 if nothing is newer; 409 while there
    are no parameters.
    """
    newer = parameters.updates(job, tuple(map(int, held.split(","))) if held else ())
    if newer is None:
        return Response(status_code=204)
    headers = {}
    if isinstance(newer, OpenParameters):
        headers["Content-Length"] = str(newer.bytes_count)
        newer = newer.chunks()
    return Stream(request, chunks_in(DOWNLOADS, newer), "application/octet-stream", headers)


@parameters_router.get("/{job}/tokenizer", response_class=Stream, responses=BYTES)
def download_tokenizer(request: Request, job: str, service: ServiceHere) -> Stream:
    """Download the job's tokenizer: a tokenizer.json, or a SentencePiece model.

    404 if the job's tokens are bytes; 409 if the run's folder has no copy and the original file has changed since the job
    was submitted.
    """
    file, size = service.tokenizer(job)
    headers = {"Content-Length": str(size)}
    return Stream(request, chunks_in(DOWNLOADS, _pieces(file)), "application/octet-stream", headers)


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the whole file in pieces, then close it."""
    with file:
        while piece := file.read(PIECE_BYTES):
            yield piece


@parameters_router.get("/{job}/origin", response_class=Response, responses=BYTES)
def download_origin(job: str, service: ServiceHere) -> Response:
    """Download the small files of the job's initial checkpoint (`model.initial_weights`), as JSON, for exports.

    404 if the job began without a checkpoint; 409 if nothing was kept and the checkpoint is gone.
    """
    return Response(service.origin(job).content(), media_type="application/octet-stream")


async def job_list_of(request: Request) -> JobList:
    job_list: JobList = request.app.state.job_list
    return job_list


JobListHere = Annotated[JobList, Depends(job_list_of)]


retention_router = APIRouter(prefix="/v1/retention", tags=["jobs"], route_class=runs_in(JOBS))
DAYS_MAX = 36_500.0
BYTES_MAX = 2**60
Days = Annotated[float | None, Query(gt=0, le=DAYS_MAX, allow_inf_nan=False)]


async def retainer_of(request: Request) -> Retainer:
    retainer: Retainer = request.app.state.retainer
    return retainer


@retention_router.get("")
def plan_retention(
    retainer: Annotated[Retainer, Depends(retainer_of)],
    days: Days = None,
    failed_days: Days = None,
    bytes: Annotated[int | None, Query(ge=0, le=BYTES_MAX)] = None,
) -> RetentionPlan:
    """Return what the service removes of ended jobs, and what it would remove now. Nothing is removed.

    With `days`, `failed_days` or `bytes`: what it would remove with these settings instead of its own.
    """
    wanted = Retention(days, failed_days, bytes)
    return retainer.plan(wanted if wanted.removes else None)
