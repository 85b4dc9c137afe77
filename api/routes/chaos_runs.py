"""Chaos plans: show the shipped ones, start one against a job, see how it stands, end it, and read its verdict."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import HTMLResponse

from api.chaos.plans import plan_text, shown, text_of
from api.chaos.runs import ChaosRuns
from api.chaos.schemas import ChaosRun, ChaosRunList, PlanRequest, ShippedPlan, ShownPlans, VerdictDocument
from api.http.headers import DOCUMENT
from api.http.pools import JOBS
from api.http.routing import runs_in
from api.routes.dependencies import ANONYMOUS, Caller, IdempotencyKey
from orchestrator import documents

router = APIRouter(prefix="/v1", tags=["chaos"], route_class=runs_in(JOBS))
RUNS = "/jobs/{job}/chaos/runs"


async def runs_of(request: Request) -> ChaosRuns:
    runs: ChaosRuns = request.app.state.chaos
    return runs


RunsHere = Annotated[ChaosRuns, Depends(runs_of)]


@router.get("/chaos/plans")
def list_chaos_plans() -> ShownPlans:
    """The plans that come with atoll, each with what it does in words and its text."""
    return ShownPlans(plans=shown())


@router.post(RUNS, status_code=202)
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


@router.get(RUNS)
def list_chaos_runs(job: str, runs: RunsHere) -> ChaosRunList:
    """All runs of plans against a job, newest first."""
    return ChaosRunList(runs=runs.list(job))


@router.get(RUNS + "/{run}")
def get_chaos_run(job: str, run: str, runs: RunsHere) -> ChaosRun:
    """One run: its state, what became of every fault so far, and what comes next. ``latest`` is the newest."""
    return runs.run(job, run)


@router.post(RUNS + "/{run}/stop", status_code=202)
def stop_chaos_run(job: str, run: str, runs: RunsHere, caller: Caller = ANONYMOUS) -> ChaosRun:
    """End a run: nothing strikes any more, what stands still goes on, the job is left alone, and there is no verdict."""
    return runs.stop(job, run, caller)


@router.get(RUNS + "/{run}/verdict")
def get_chaos_verdict(job: str, run: str, runs: RunsHere) -> VerdictDocument:
    """Which objectives held, by how much, and when they were at their worst; 409 until the job has ended."""
    return VerdictDocument.model_validate(runs.verdict(job, run))


@router.get(RUNS + "/{run}/report", response_class=HTMLResponse)
def get_chaos_report(job: str, run: str, runs: RunsHere) -> HTMLResponse:
    """The verdict as a page, complete in itself, to be shown to others; 409 until the job has ended."""
    return HTMLResponse(runs.report(job, run), headers={"Content-Security-Policy": DOCUMENT})
