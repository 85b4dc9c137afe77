"""Routes of chaos: inject one fault into a job; list the shipped plans, start one, read its state and verdict, end it.

The bodies of single faults are derived from ``core.faults``. ``kill_api`` is not among them: only a plan can have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import HTMLResponse
from pydantic import Field

from api.chaos.plans import plan_text, shown, text_of
from api.chaos.runs import ChaosRuns
from api.chaos.schemas import ChaosRun, ChaosRunList, PlanRequest, ShippedPlan, ShownPlans, VerdictDocument
from api.http.guard import DOCUMENT
from api.http.pools import JOBS, runs_in
from api.routes.dependencies import ANONYMOUS, Caller, IdempotencyKey, ServiceHere, accepted
from api.schemas import Command
from orchestrator.chaos.plan import PAYLOADS_MAX
from orchestrator.core.commands import Inject
from orchestrator.core.faults import CLASSES, JobFault, Kind
from orchestrator.specification import documents
from orchestrator.specification.bounds import PRINTABLE, BytesPerSecond, HostNumber, Section
from orchestrator.specification.policy_source import section_of

runs_router = APIRouter(prefix="/v1", tags=["chaos"], route_class=runs_in(JOBS))
RUNS = "/jobs/{job}/chaos/runs"


async def runs_of(request: Request) -> ChaosRuns:
    runs: ChaosRuns = request.app.state.chaos
    return runs


RunsHere = Annotated[ChaosRuns, Depends(runs_of)]


@runs_router.get("/chaos/plans")
def list_chaos_plans() -> ShownPlans:
    """List the plans that come with atoll, each with its text and a description of what it does."""
    return ShownPlans(plans=shown())


@runs_router.post(RUNS, status_code=202)
def start_chaos_plan(
    job: str,
    plan: PlanRequest,
    response: Response,
    runs: RunsHere,
    caller: Caller = ANONYMOUS,
    idempotency_key: IdempotencyKey = None,
) -> ChaosRun:
    """Run a plan against a job, a shipped one or your own.

    It begins when enough islands train, and is judged at the job's end. The service runs the plan without its caller,
    also through restarts. Each of its faults is a command of the job.
    422 names every problem of the plan; 409 while another plan runs against the job.
    """
    if isinstance(plan, ShippedPlan):
        text = plan_text(plan.shipped)
    else:
        text = plan.plan if isinstance(plan.plan, str) else text_of(plan.plan)
    document = documents.mapping(documents.read_yaml(text, name="the plan"), "the plan")
    run = runs.start(job, text, document, plan.reference, caller, idempotency_key)
    response.headers["Location"] = f"/v1/jobs/{run.job}/chaos/runs/{run.run}"
    return run


@runs_router.get(RUNS)
def list_chaos_runs(job: str, runs: RunsHere) -> ChaosRunList:
    """List all runs of plans against a job, newest first."""
    return ChaosRunList(runs=runs.list(job))


@runs_router.get(RUNS + "/{run}")
def get_chaos_run(job: str, run: str, runs: RunsHere) -> ChaosRun:
    """Return one run: its state, the outcome of every fault so far, and what comes next. ``latest`` is the newest."""
    return runs.run(job, run)


@runs_router.post(RUNS + "/{run}/stop", status_code=202)
def stop_chaos_run(job: str, run: str, runs: RunsHere, caller: Caller = ANONYMOUS) -> ChaosRun:
    """End a run: no further fault is injected, stopped islands continue, the job runs on, and there is no verdict."""
    return runs.stop(job, run, caller)


@runs_router.get(RUNS + "/{run}/verdict")
def get_chaos_verdict(job: str, run: str, runs: RunsHere) -> VerdictDocument:
    """Return which objectives held, by how much, and when they were at their worst; 409 until the job has ended."""
    return VerdictDocument.model_validate(runs.verdict(job, run))


@runs_router.get(RUNS + "/{run}/report", response_class=HTMLResponse)
def get_chaos_report(job: str, run: str, runs: RunsHere) -> HTMLResponse:
    """Return the verdict as a self-contained HTML page; 409 until the job has ended."""
    return HTMLResponse(runs.report(job, run), headers={"Content-Security-Policy": DOCUMENT})


router = APIRouter(prefix="/v1/jobs/{job}/chaos", tags=["chaos"], route_class=runs_in(JOBS))

STOP_MAX_S = 3600.0
BOUNDS: Mapping[str, Any] = {
    "island": Annotated[
        str, Field(min_length=1, max_length=200, pattern=PRINTABLE, description="an island of the job")
    ],
    "duration_s": Annotated[float, Field(strict=True, ge=0.001, le=STOP_MAX_S, allow_inf_nan=False)],
    "bytes_per_second": BytesPerSecond,
    "payloads": Annotated[int, Field(strict=True, ge=1, le=PAYLOADS_MAX, description="how many of its next payloads")],
    "host": Annotated[HostNumber | None, Field(description="counted from 0; the last one if absent")],
}
"""The range of each field of a fault that is injected at once."""
EXAMPLES: Mapping[str, Any] = {
    "island": "asia",
    "duration_s": 6.0,
    "bytes_per_second": 50_000.0,
    "payloads": 3,
    "host": 0,
}


def _body(fault: type[JobFault]) -> type[Section]:
    """Return the body of a request for this kind of fault: its fields beside ``kind``."""
    body = section_of(fault, BOUNDS.get, kind=(Literal[fault.kind.value], ...))
    example = {"kind": fault.kind.value, **{field.name: EXAMPLES[field.name] for field in fields(fault)}}
    body.model_config = {**body.model_config, "json_schema_extra": {"examples": [example]}}
    body.model_rebuild(force=True)
    return body


if TYPE_CHECKING:
    Fault = Section
else:
    Fault = Annotated[Union[tuple(map(_body, get_args(JobFault)))], Field(discriminator="kind")]  # noqa: UP007


@router.post("/faults", status_code=202)
def inject_fault(
    job: str,
    fault: Fault,
    response: Response,
    service: ServiceHere,
    caller: Caller = ANONYMOUS,
    idempotency_key: IdempotencyKey = None,
) -> Command:
    """Inject a fault into one island, or into the synchroniser; the tape has it as ``FaultInjected``.

    A fault that lasts ends by itself.
    """
    return accepted(service.submit_command(job, command_of(fault), caller, idempotency_key), response)


def command_of(body: Fault) -> Inject:
    """Return the command of a body."""
    values = dict(body)
    kind = CLASSES[Kind(values.pop("kind"))]
    return Inject.of(kind(**values))
