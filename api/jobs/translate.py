"""The translation from what the store and the control port hold to the API's answers. Pure: no clock, no disk, no port.

Responsible for the meaning of a job's state: alive as the core's phase says, final as its outcome says, and what its row
says while nothing else is known of it. It refuses to compute statistics; they are passed on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from api.schemas import (
    Command,
    CommandState,
    Fragment,
    Helper,
    Island,
    Job,
    JobState,
    JobSummary,
    Line,
    LossPoint,
    ProblemItem,
)
from api.storage.store import CommandRow, JobRow
from orchestrator.actors.records import LineRecord, NormsRecord, StatusRecord
from orchestrator.core import commands
from orchestrator.core.vocabulary import IslandState
from orchestrator.errors import DataError, NotFound, first_line
from orchestrator.simulation.advice import advice
from orchestrator.specification.config import JobSpec
from orchestrator.specification.sections import IslandsSection
from orchestrator.system.plain import finite
from orchestrator.tape import codec as command_codec

GONE = "nothing of it runs any more; it is about to be started again, and goes on from its run folder"

UNREADABLE_REMEDY = "Submit it again, and remove this one."
LAST_KNOWN = {"epoch": 1, "global_version": 0, "tokens_trained": 0}
"""The figures that the store keeps of a job that trains, and the least value of each."""

SCHEDULE = ("fragments", "interval_steps", "overlap_steps")
WAITS = "its job has not taken it yet; it is handed over until it has"


def job_of(
    row: JobRow,
    record: StatusRecord | None,
    island_plans: list[Island],
    token_budget: int,
    extents: Mapping[str, Mapping[str, Any]] | None = None,
    warnings: Sequence[ProblemItem] = (),
    *,
    report: bool,
) -> Job:
    """The whole answer about one job. Without a record, its islands are those of the specification, not placed yet.

    Of one that failed, or of which nothing runs, it is told how far it was when it was last seen, if it says less itself.
    """
    view: Mapping[str, Any] = record["view"] if record else {}
    lines = record.get("lines", {}).get("islands", {}) if record else {}
    norms = {own["fragment"]: own for own in record.get("fragment_norms", [])} if record else {}
    views = view.get("islands", ())
    spares = spares_of(views)
    islands = [island_of(own, lines.get(own["island"]), own["island"] in spares) for own in views] or island_plans
    islands = [island.model_copy(update=(extents or {}).get(island.island)) for island in islands]
    curve = [
        LossPoint(tokens=int(t), loss=finite(v), after_s=at) for t, v, at in (record["loss_curve"] if record else ())
    ]
    losses = [i.loss for i in islands if i.loss is not None and i.state == "training"]
    goodput = finite(record["goodput"]) if record else {}
    gone = record is None and row.state == JobState.RUNNING
    state = state_of(view) if record else JobState(row.state)
    started_at = record["started_at"] if record else None
    resume = (row.spec.get("resume") if isinstance(row.spec, dict) else None) or {}
    reported = {name: view.get(name, least) for name, least in LAST_KNOWN.items()}
    before = last_known(row) if record is None or state is JobState.FAILED else {}
    progress = {name: max(value, before.get(name, 0)) for name, value in reported.items()}
    loss = curve[-1].loss if curve else before.get("loss")
    return Job(
        job=row.job,
        name=row.name,
        state=state,
        reason=str(view.get("reason") or "") if record else gone_for(row) if gone else row.reason,
        caller=row.caller,
        submitted_at=row.submitted_at,
        started_at=started_at,
        ended_at=started_at + record["at"] if record and started_at and state.final else None,
        island_count=sum(not (island.standby or island.spare) for island in islands),
        islands_training=sum(island.state == "training" for island in islands),
        token_budget=view.get("token_budget", token_budget),
        tokens_trained=progress["tokens_trained"],
        global_version=progress["global_version"],
        loss=loss,
        goodput_ratio=goodput.get("goodput_ratio") or before.get("goodput_ratio"),
        run_dir=row.run_dir,
        priority=row.priority,
        after_s=record["at"] if record else None,
        pause_reason=view.get("pause_reason"),
        epoch=progress["epoch"],
        last_known=progress != reported or bool(record and record.get("last_known")),
        loss_train=math.fsum(losses) / len(losses) if losses else None,
        islands=islands,
        fragments=[fragment_of(own, norms.get(own["fragment"])) for own in view.get("fragments", ())],
        loss_curve=curve,
        goodput=goodput,
        statistics=finite(record["statistics"]) if record else {},
        report_ready=report,
        resumed_from=resume.get("checkpoint"),
        resume_refused=resume.get("refused", []),
        warnings=list(warnings),
        wire={way: codec for way, codec in _mapping(_knobs(row).get("wire")).items() if isinstance(codec, str)},
        helpers=[Helper.model_validate(own) for own in record.get("helpers", ())] if record else [],
        schedule={name: value for name in SCHEDULE if type(value := _knobs(row).get(name)) is int},
    )


def _knobs(row: JobRow) -> dict[str, Any]:
    """``synchroniser`` of the row's specification, as far as that can be read."""
    return _mapping(_mapping(row.spec).get("synchroniser"))


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def readable(row: JobRow) -> JobRow:
    """The row with every column of its kind: what is damaged in it is as text what can be read, and else nothing."""
    submitted_at = row.submitted_at if type(row.submitted_at) in (float, int) else 0.0
    return JobRow(
        number=row.number,
        job=_text(row.job),
        name=_text(row.name),
        spec=row.spec if isinstance(row.spec, dict) else {},
        run_dir=_text(row.run_dir),
        caller=_text(row.caller),
        submitted_at=submitted_at if math.isfinite(submitted_at) else 0.0,
        state=_text(row.state),
        priority=row.priority if type(row.priority) is int else 0,
        reason=_text(row.reason),
        summary=row.summary,
        last_known=row.last_known if isinstance(row.last_known, dict) else None,
    )


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else "" if value is None else str(value)


def last_known(row: JobRow) -> dict[str, Any]:
    """The job's progress by its row, as far as that can be read."""
    stored = row.last_known if isinstance(row.last_known, dict) else {}
    numbers = {name: value for name in LAST_KNOWN if type(value := stored.get(name)) is int and value >= 0}
    figures = {name: value for name in ("loss", "goodput_ratio") if type(value := stored.get(name)) is float}
    return numbers | {name: value for name, value in figures.items() if math.isfinite(value)}


def last_known_of(record: StatusRecord) -> dict[str, Any]:
    """The job's progress to store in its row. Raises whatever a malformed record causes."""
    view, curve = record["view"], record["loss_curve"]
    progress = {name: int(view[name]) for name in LAST_KNOWN}
    figures: dict[str, Any] = finite(
        {"loss": curve[-1][1] if curve else None, "goodput_ratio": record["goodput"]["goodput_ratio"]}
    )
    return progress | figures


def gone_for(row: JobRow) -> str:
    """The reason shown for a job of which nothing runs, though it should."""
    return f"{GONE} ({row.reason})" if row.reason else GONE


def unreadable(row: JobRow, error: Exception) -> Job:
    """The answer about a job whose row is damaged: nothing but what certainly can be said. It can be removed."""
    state = JobState(row.state) if row.state in JobState.__members__.values() else JobState.FAILED
    row = readable(row)
    why = (
        f"What the store has of it is damaged ({type(error).__name__}: {first_line(error)[:200]}). {UNREADABLE_REMEDY}"
    )
    nothing: dict[str, Any] = dict.fromkeys(
        ("started_at", "ended_at", "after_s", "pause_reason", "loss", "loss_train", "goodput_ratio")
    )
    return Job(
        job=row.job,
        name=row.name,
        state=state,
        reason=f"{row.reason} {why}" if row.reason else why,
        caller=row.caller,
        submitted_at=row.submitted_at,
        run_dir=row.run_dir,
        token_budget=0,
        island_count=0,
        islands_training=0,
        islands=[],
        fragments=[],
        loss_curve=[],
        goodput={},
        statistics={},
        report_ready=False,
        **{name: last_known(row).get(name, least) for name, least in LAST_KNOWN.items()},
        last_known=True,
        **nothing,
    )


def summary_of(job: Job) -> JobSummary:
    return JobSummary.model_validate(job.model_dump(include=set(JobSummary.model_fields)))


def state_of(view: Mapping[str, Any]) -> JobState:
    """The core's phase and outcome as one word."""
    if view["phase"] == "finished":
        return JobState(view["outcome"] or "failed")
    return JobState.FINISHING if view["phase"] == "finishing" else JobState.RUNNING


def has_decided(record: StatusRecord) -> bool:
    """Whether the job decides nothing more. Its parameters and its report may still have to be written."""
    view = _mapping(_mapping(record).get("view"))
    return view.get("phase") == "finished" or view.get("outcome") is not None


def still_writing(record: StatusRecord) -> StatusRecord:
    """The record of a job that has decided how it ends, and has not written all of its files yet."""
    view = record["view"]
    reason = f"it ends as {view['outcome']} ({view['reason']}); its parameters and its report are being written"
    return {**record, "view": {**view, "phase": "finishing", "reason": reason}}


def spares_of(views: Sequence[Mapping[str, Any]]) -> set[str]:
    """The islands that nobody has ever wanted: scale-up slots. Of a job that never placed one, none is told from others."""
    if not any(view["incarnation"] for view in views):
        return set()
    idle = (view for view in views if str(view["state"]) == IslandState.STOPPED and not view["incarnation"])
    return {view["island"] for view in idle if not view.get("standby", False)}


def island_of(view: Mapping[str, Any], line: LineRecord | None = None, spare: bool = False) -> Island:
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
        spare=spare,
        overdue_s=view.get("overdue_s", 0.0),
        line=None if line is None else Line.model_validate(line),
    )


def island_in(job: Job, island: str) -> Island:
    """The island of this name. Raises NotFound with those that there are."""
    for candidate in job.islands:
        if candidate.island == island:
            return candidate
    names = ", ".join(candidate.island for candidate in job.islands)
    raise NotFound(detail=f"Job {job.job} has no island {island!r}.", remedy=f"Its islands are {names}.")


def fragment_of(view: Mapping[str, Any], norms: NormsRecord | None = None) -> Fragment:
    return Fragment(
        fragment=view["fragment"],
        version=view["version"],
        phase=str(view["phase"]),
        offered=list(view["offered"]),
        step=view["step"],
        update_norm=finite(norms["update_norm"]) if norms else None,
        residue_norm=finite(norms["residue_norm"]) if norms else None,
    )


def request_in(row: CommandRow) -> commands.Command | None:
    """The command in the row; None where this build cannot read it."""
    try:
        return command_codec.decode_command(row.request)
    except DataError:
        return None


def command_of(row: CommandRow) -> Command:
    request = request_in(row)
    if row.accepted is not None:
        state = CommandState.ACCEPTED if row.accepted else CommandState.REFUSED
    else:
        state = CommandState.PENDING if row.delivered else CommandState.UNDELIVERED
    return Command(
        command=row.command,
        job=row.job,
        kind=commands.kind_of(request) if request else _kind_in(row.request),
        island=commands.island_of(request) if request else None,
        caller=row.caller,
        requested_at=row.requested_at,
        state=state,
        detail=row.detail or (WAITS if state is CommandState.UNDELIVERED else ""),
        node_group=request.node_group if isinstance(request, commands.NodeGroupCommand) else None,
        count=_count_in(request),
    )


def _kind_in(document: object) -> str:
    """The kind of a command that this build cannot read, as far as it says one."""
    return str(document.get("kind", "")) if isinstance(document, dict) else ""


def _count_in(request: commands.Command | None) -> int | None:
    match request:
        case commands.Scale(_, count):
            return count
        case commands.Rollback(checkpoint):
            return checkpoint
    return None


def plans_of(row: JobRow) -> tuple[list[Island], int, dict[str, dict[str, Any]], list[ProblemItem]]:
    """The islands the specification asks for, as yet unplaced, the token budget, by island its hosts and mesh, and warnings.

    None and nothing where the row has no specification that this build reads.
    """
    try:
        spec = JobSpec.model_validate(row.spec)
        plans = spec.policy().islands
    except ValueError:
        return [], 0, {}, []
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
        for plan in plans
    ]
    sections = {**spec.island_sections(slots=True), **spec.standby_sections()}
    extents: dict[str, dict[str, Any]] = {name: _extent(section) for name, section in sections.items()}
    warnings = [ProblemItem(path=one.path, message=one.message, remedy=one.remedy) for one in advice(spec)]
    return islands, spec.token_budget, extents, warnings


def _extent(section: IslandsSection) -> dict[str, Any]:
    axes = {name: length for name, length in section.mesh.model_dump().items() if length and length > 1}
    return {"hosts": section.hosts, "mesh": axes}
