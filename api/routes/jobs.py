"""Jobs: submit, list, look, cancel, and the report of a finished one."""

from __future__ import annotations

import json
from typing import Any

import yaml
from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from api.routes.dependencies import ANONYMOUS, Caller, IdempotencyKey, ServiceHere
from api.schemas import Command, Job, Jobs
from orchestrator.config import JobSpec
from orchestrator.errors import ConfigurationError

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

SPEC_BYTES_MAX = 1 << 20
SPEC_SCHEMA = {"schema": JobSpec.model_json_schema()}
SPEC_BODY = {
    "requestBody": {"required": True, "content": {"application/json": SPEC_SCHEMA, "application/yaml": SPEC_SCHEMA}}
}


class PlainYaml(yaml.SafeLoader):
    """YAML without aliases: a short text could otherwise stand for a very long document."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise ConfigurationError(detail="YAML aliases (*name) are not accepted here; write the value out.")
        return super().compose_node(parent, index)


@router.post("", status_code=201, openapi_extra=SPEC_BODY)
async def submit_job(
    request: Request,
    response: Response,
    service: ServiceHere,
    caller: Caller = ANONYMOUS,
    idempotency_key: IdempotencyKey = None,
) -> Job:
    """Submit a job specification, JSON or YAML. It is checked against the fleet first; 422 lists every problem."""
    document = parse_body(await read_body(request), request.headers.get("content-type", ""))
    job = await run_in_threadpool(service.submit, document, caller, idempotency_key)
    response.headers["Location"] = f"/v1/jobs/{job.job}"
    return job


@router.get("")
def list_jobs(service: ServiceHere) -> Jobs:
    """All jobs, newest first."""
    return Jobs(jobs=service.jobs())


@router.get("/{job}")
def get_job(job: str, service: ServiceHere) -> Job:
    """One job with its islands, fragments, losses, goodput and statistics. ``latest`` is the newest."""
    return service.job(job)


@router.post("/{job}/cancel", status_code=202)
def cancel_job(
    job: str,
    response: Response,
    service: ServiceHere,
    caller: Caller = ANONYMOUS,
    idempotency_key: IdempotencyKey = None,
) -> Command:
    """Stop a job without waiting for the work in flight. It still writes its report."""
    command = service.submit_command(job, "cancel", None, False, caller, idempotency_key)
    response.headers["Location"] = f"/v1/jobs/{command.job}/commands/{command.command}"
    return command


@router.get("/{job}/report", response_class=FileResponse)
@router.get("/{job}/report.json", response_class=FileResponse)
def get_report(job: str, service: ServiceHere) -> FileResponse:
    """The figures of a finished job; 409 while it is not finished."""
    return FileResponse(service.report_path(job, "json"), media_type="application/json")


@router.get("/{job}/report.html", response_class=FileResponse)
def get_report_page(job: str, service: ServiceHere) -> FileResponse:
    """The page of a finished job, complete in itself; 409 while it is not finished."""
    return FileResponse(service.report_path(job, "html"), media_type="text/html")


async def read_body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > SPEC_BYTES_MAX:
            raise HTTPException(413, f"A job specification has at most {SPEC_BYTES_MAX} bytes.")
    return bytes(body)


def parse_body(body: bytes, content_type: str) -> dict[str, Any]:
    """The mapping that the body holds. JSON when it says so, else YAML, of which JSON is a part."""
    try:
        is_json = content_type.split(";")[0].strip() == "application/json"
        document = json.loads(body) if is_json else yaml.load(body, Loader=PlainYaml)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigurationError(detail=f"The body is neither JSON nor YAML: {error}") from error
    if not isinstance(document, dict) or not all(isinstance(name, str) for name in document):
        raise ConfigurationError(detail="The body holds no mapping of fields to values; deploy/configs has examples.")
    return document
