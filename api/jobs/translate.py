"""From what the store and the control port hold to what the API answers with. Pure: no clock, no disk, no port.

Responsible for the meaning of a job's state: alive as the core's phase says, final as its outcome says, and what its row
says while nothing else is known of it. It refuses to compute statistics; they are passed on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from api.jobs.control import StatusRecord
from api.schemas import Command, CommandState, Fragment, Island, Job, JobState, JobSummary, LossPoint
from api.storage.store import CommandRow, JobRow
from orchestrator.config import JobSpec
from orchestrator.errors import NotFound
from orchestrator.plain import finite

GONE = "nothing of it runs any more; it is about to be started again, and goes on from its run folder"

WAITS = "its job has not taken it yet; it is handed over until it has"


def job_of(
    row: JobRow, record: StatusRecord | None, island_plans: list[Island], token_budget: int, report: bool
) -> Job:
    """The whole answer about one job. Without a record, its islands are those of the specification, not placed yet."""
    view: Mapping[str, Any] = record["view"] if record else {}
    islands = [island_of(island) for island in view.get("islands", ())] or island_plans
    curve = [
        LossPoint(tokens=int(t), loss=finite(v), after_s=at) for t, v, at in (record["loss_curve"] if record else ())
    ]
    losses = [i.loss for i in islands if i.loss is not None and i.state == "training"]
    goodput = finite(record["goodput"]) if record else {}
    gone = record is None and row.state == JobState.RUNNING
    state = state_of(view) if record else JobState(row.state)
    started_at = record["started_at"] if record else None
    resume = row.spec.get("resume") or {}
    return Job(
        job=row.job,
        name=row.name,
        state=state,
        reason=str(view.get("reason") or "") if record else GONE if gone else row.reason,
        caller=row.caller,
        submitted_at=row.submitted_at,
        started_at=started_at,
        ended_at=started_at + record["at"] if record and started_at and state.final else None,
        island_count=sum(not island.standby for island in islands),
        islands_training=sum(island.state == "training" for island in islands),
        token_budget=view.get("token_budget", token_budget),
        tokens_trained=view.get("tokens_trained", 0),
        global_version=view.get("global_version", 0),
        loss=curve[-1].loss if curve else None,
        goodput_ratio=goodput.get("goodput_ratio"),
        run_dir=row.run_dir,
        priority=row.priority,
        after_s=record["at"] if record else None,
        pause_reason=view.get("pause_reason"),
        epoch=view.get("epoch", 1),
        loss_train=math.fsum(losses) / len(losses) if losses else None,
        islands=islands,
        fragments=[fragment_of(fragment) for fragment in view.get("fragments", ())],
        loss_curve=curve,
        goodput=goodput,
        statistics=finite(record["statistics"]) if record else {},
        report_ready=report,
        resumed_from=resume.get("checkpoint"),
        resume_refused=resume.get("refused", []),
    )


def summary_of(job: Job) -> JobSummary:
    return JobSummary.model_validate(job.model_dump(include=set(JobSummary.model_fields)))


def state_of(view: Mapping[str, Any]) -> JobState:
    """The core's phase and outcome as one word."""
    if view["phase"] == "finished":
        return JobState(view["outcome"] or "failed")
    return JobState.FINISHING if view["phase"] == "finishing" else JobState.RUNNING


def island_of(view: Mapping[str, Any]) -> Island:
    step_seconds = view.get("step_seconds")
    return Island(
        island=view["island"],
        node_group=view["node_group"],
        region=view["region"],
        accelerator_count=view["accelerator_count"],
        state=str(view["state"]),
        reason=view["reason"],
        incarnation=view["incarnation"],
        node=view["node"],
        pid=view["pid"],
        step=view["step"],
        steps_total=view["steps_total"],
        tokens_total=view["tokens_total"],
        steps_per_second=1.0 / step_seconds if step_seconds and str(view["state"]) == "training" else None,
        loss=finite(view["loss"]),
        last_merge_after_s=view["last_merge_at"],
        restarts=view["restarts"],
        flag=view.get("flag", ""),
        quarantines=view.get("quarantines", 0),
        standby=view.get("standby", False),
    )


def island_in(job: Job, island: str) -> Island:
    """The island of this name. Raises NotFound with those that there are."""
    for found in job.islands:
        if found.island == island:
            return found
    names = ", ".join(found.island for found in job.islands)
    raise NotFound(detail=f"Job {job.job} has no island {island!r}.", remedy=f"Its islands are {names}.")


def fragment_of(view: Mapping[str, Any]) -> Fragment:
    return Fragment(
        fragment=view["fragment"],
        version=view["version"],
        phase=str(view["phase"]),
        offered=list(view["offered"]),
        step=view["step"],
    )


def command_of(row: CommandRow) -> Command:
    if row.accepted is not None:
        state = CommandState.ACCEPTED if row.accepted else CommandState.REFUSED
    else:
        state = CommandState.PENDING if row.delivered else CommandState.UNDELIVERED
    return Command(
        command=row.command,
        job=row.job,
        kind=row.kind,
        island=row.island,
        caller=row.caller,
        requested_at=row.requested_at,
        state=state,
        detail=row.detail or (WAITS if state is CommandState.UNDELIVERED else ""),
        node_group=row.node_group,
        count=row.count,
    )


def plans_of(row: JobRow) -> tuple[list[Island], int]:
    """The islands the specification asks for, as yet unplaced, and the token budget."""
    spec = JobSpec.model_validate(row.spec)
    before = {"queued": "the job is queued", "starting": "the job is being started"}.get(row.state)
    islands = [
        Island(
            island=plan.island,
            node_group=plan.node_group,
            region=plan.region,
            accelerator_count=plan.accelerator_count,
            state="placing" if before else "lost",
            reason=before or "nothing of the job runs",
        )
        for plan in spec.policy().islands
    ]
    return islands, spec.token_budget
