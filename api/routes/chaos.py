"""Chaos: one fault at a time against a job. Plans of faults are ``chaos_runs``.

The service's own death (``kill_api``) cannot be asked for alone; a plan can have it.

Chaos plans: show the shipped ones, start one against a job, see how it stands, end it, and read its verdict.
"""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, ConfigDict, Field

from api.chaos.plans import plan_text, shown, text_of
from api.chaos.runs import ChaosRuns
from api.chaos.schemas import ChaosRun, ChaosRunList, PlanRequest, ShippedPlan, ShownPlans, VerdictDocument
from api.http.guard import DOCUMENT
from api.http.pools import JOBS, runs_in
from api.routes.dependencies import ANONYMOUS, Caller, IdempotencyKey, ServiceHere, accepted
from api.schemas import Command
from orchestrator.chaos.plan import PAYLOADS_MAX
from orchestrator.core.commands import Inject
from orchestrator.core.vocabulary import IslandId
from orchestrator.specification import documents
from orchestrator.specification.bounds import PRINTABLE, BytesPerSecond, HostNumber

runs_router = APIRouter(prefix="/v1", tags=["chaos"], route_class=runs_in(JOBS))
RUNS = "/jobs/{job}/chaos/runs"


async def runs_of(request: Request) -> ChaosRuns:
    runs: ChaosRuns = request.app.state.chaos
    return runs


RunsHere = Annotated[ChaosRuns, Depends(runs_of)]


@runs_router.get("/chaos/plans")
def list_chaos_plans() -> ShownPlans:
    """The plans that come with atoll, each with what it does in words and its text."""
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
    """Run a plan against a job, a shipped one or your own, from when enough islands train; it is judged at the job's end.

    It goes on without whoever asked, also through restarts of the service. Each of its faults is a command of the job.
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
    """All runs of plans against a job, newest first."""
    return ChaosRunList(runs=runs.list(job))


@runs_router.get(RUNS + "/{run}")
def get_chaos_run(job: str, run: str, runs: RunsHere) -> ChaosRun:
    """One run: its state, what became of every fault so far, and what comes next. ``latest`` is the newest."""
    return runs.run(job, run)


@runs_router.post(RUNS + "/{run}/stop", status_code=202)
def stop_chaos_run(job: str, run: str, runs: RunsHere, caller: Caller = ANONYMOUS) -> ChaosRun:
    """End a run: nothing strikes any more, what stands still goes on, the job is left alone, and there is no verdict."""
    return runs.stop(job, run, caller)


@runs_router.get(RUNS + "/{run}/verdict")
def get_chaos_verdict(job: str, run: str, runs: RunsHere) -> VerdictDocument:
    """Which objectives held, by how much, and when they were at their worst; 409 until the job has ended."""
    return VerdictDocument.model_validate(runs.verdict(job, run))


@runs_router.get(RUNS + "/{run}/report", response_class=HTMLResponse)
def get_chaos_report(job: str, run: str, runs: RunsHere) -> HTMLResponse:
    """The verdict as a page, complete in itself, to be shown to others; 409 until the job has ended."""
    return HTMLResponse(runs.report(job, run), headers={"Content-Security-Policy": DOCUMENT})


router = APIRouter(prefix="/v1/jobs/{job}/chaos", tags=["chaos"], route_class=runs_in(JOBS))

STOP_MAX_S = 3600.0
Whom = Annotated[str, Field(min_length=1, max_length=200, pattern=PRINTABLE, description="an island of the job")]
Seconds = Annotated[float, Field(strict=True, ge=0.001, le=STOP_MAX_S, allow_inf_nan=False)]
Payloads = Annotated[int, Field(strict=True, ge=1, le=PAYLOADS_MAX, description="how many of its next payloads")]


class FaultRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    island: Whom


class Kill(FaultRequest):
    """SIGKILL, no warning; the island is placed again by itself."""

    kind: Literal["kill"]


class Stop(FaultRequest):
    """SIGSTOP for ``duration_s``: the island neither steps nor answers meanwhile."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"kind": "stop", "island": "asia", "duration_s": 6.0}]})

    kind: Literal["stop"]
    duration_s: Seconds


class Cut(FaultRequest):
    """The island's link carries nothing for ``duration_s``: no letter, payload or publication. It trains on."""

    kind: Literal["cut"]
    duration_s: Seconds


class Slow(FaultRequest):
    """The island's link carries payloads and publications at this rate for ``duration_s``."""

    kind: Literal["slow"]
    duration_s: Seconds
    bytes_per_second: BytesPerSecond


class Corrupt(FaultRequest):
    """The island's next payloads arrive with flipped bits, and are refused for their checksum."""

    kind: Literal["corrupt"]
    payloads: Payloads


class Delay(FaultRequest):
    """The island's next payloads arrive ``duration_s`` late, each with all that is behind it."""

    kind: Literal["delay"]
    duration_s: Seconds
    payloads: Payloads


class Drop(FaultRequest):
    """The island's next payloads are lost on the way."""

    kind: Literal["drop"]
    payloads: Payloads


class Continue(FaultRequest):
    """SIGCONT before a stop's time is over; a link that is cut, slow or harms payloads is well again."""

    kind: Literal["continue"]


class KillNode(FaultRequest):
    """SIGKILL of the raylet of the island's node: all islands on it die, of any job, and the node does not come back."""

    kind: Literal["kill_node"]


class KillHost(FaultRequest):
    """SIGKILL of the island's process on one of its hosts. Those on its others end with it, and it is placed again."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"kind": "kill_host", "island": "asia", "host": 0}]})

    kind: Literal["kill_host"]
    host: HostNumber | None = Field(None, description="from 0; its last where none is said")


class KillSynchroniser(BaseModel):
    """SIGKILL of the job's synchroniser, once the tape says so. It strikes no island."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["kill_synchroniser"]


Fault = Annotated[
    Kill | Stop | Cut | Slow | Corrupt | Delay | Drop | Continue | KillNode | KillHost | KillSynchroniser,
    Field(discriminator="kind"),
]


@router.post("/faults", status_code=202)
def inject_fault(
    job: str,
    fault: Fault,
    response: Response,
    service: ServiceHere,
    caller: Caller = ANONYMOUS,
    idempotency_key: IdempotencyKey = None,
) -> Command:
    """Strike one island, or the synchroniser; the tape says so (``FaultInjected``). What lasts ends by itself in time."""
    return accepted(service.submit_command(job, command_of(fault), caller, idempotency_key), response)


def command_of(fault: Fault) -> Inject:
    """The command of a fault; a field that its kind lacks is zero."""
    island = None if isinstance(fault, KillSynchroniser) else IslandId(fault.island)
    fields = fault.model_dump()
    dose = (
        fields.get("duration_s", 0.0),
        fields.get("bytes_per_second", 0.0),
        fields.get("payloads", 0),
        fields.get("host"),
    )
    return Inject(fault.kind, island, *dose)
