"""Translate rows of the store and statuses of jobs into the API's answers. Pure: no clock, no disk, no port.

A job's state is the core's phase while it is alive, its outcome once it has ended, and its row's state while nothing else
is known. Fields that a status and an answer share are copied by the classes that define them (``orchestrator.status``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from api.schemas import (
    Command,
    CommandState,
    Fragment,
    Island,
    Job,
    JobState,
    JobSummary,
    LossPoint,
    ProblemItem,
    SettingsChange,
)
from api.storage.store import CommandRow, JobRow
from orchestrator.core import commands
from orchestrator.core.vocabulary import IslandState
from orchestrator.errors import Conflict, DataError, InfrastructureError, NotFound, first_line
from orchestrator.simulation.advice import advice
from orchestrator.specification.config import JobSpec
from orchestrator.specification.sections import IslandsSection
from orchestrator.specification.training_sections import BUILT_IN_TRAINER, TORCH_TRAINER
from orchestrator.status import (
    CoreStatus,
    FragmentNorms,
    FragmentStatus,
    IslandFacts,
    IslandStatus,
    JobFacts,
    JobStatus,
    Line,
)
from orchestrator.system import release
from orchestrator.system.plain import brief, finite
from orchestrator.tape import codec as command_codec

GONE = "none of its processes is running; the service will restart it from its run folder"

UNREADABLE_REMEDY = "Submit it again, and remove this one."
FROM_STEPS = ("loss", "learning_rate", "gradient_norm", "mfu_ratio")
"""Figures of an island's last step, which need not be finite."""
LAST_KNOWN = {"epoch": 1, "global_version": 0, "tokens_trained": 0}
"""The figures that the store keeps of a job that trains, and the least value of each."""

ADJUSTABLE_TRAINERS = (BUILT_IN_TRAINER, TORCH_TRAINER)
"""The trainers that step at a ratio of the schedule's learning rate."""
SCHEDULE = ("fragments", "interval_steps", "overlap_steps", "router_interval_steps")
WAITS = "its job has not accepted it yet; the service keeps trying to deliver it"


class SenselessAnswer(InfrastructureError):
    """The answer of a live job is no valid status."""


def status_in(job: str, answer: object) -> JobStatus:
    """Return the status that a live job answered with. Raises SenselessAnswer if it is invalid.

    The job may be of another build, so tuples and enumerations are taken where this build sends lists and words.
    """
    try:
        return JobStatus.model_validate(answer)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"])) or "it"
        detail = f"The status of job {job} is invalid ({brief(place)}: {first['msg']})."
        raise SenselessAnswer(detail=detail, remedy="Look at its log (`atoll logs`).") from error


def job_of(
    row: JobRow,
    status: JobStatus | None,
    island_plans: list[Island],
    token_budget: int,
    extents: Mapping[str, Mapping[str, Any]] | None = None,
    warnings: Sequence[ProblemItem] = (),
    *,
    report: bool,
) -> Job:
    """Return the whole answer about one job. Without a status, its islands are those of the specification, not placed yet.

    The progress of a job that failed, or of which nothing runs, is at least what its row remembers.
    """
    curve = [LossPoint(tokens=int(t), loss=finite(v), after_s=at) for t, v, at in (status.loss_curve if status else ())]
    own = _by_status(status) if status else _by_row(row, island_plans, token_budget)
    state: JobState = own["state"]
    remembered = last_known(row) if status is None or state is JobState.FAILED else {}
    progress = {name: max(own[name], remembered.get(name, 0)) for name in LAST_KNOWN}
    islands = [island.model_copy(update=(extents or {}).get(island.island)) for island in own["islands"]]
    losses = [island.loss for island in islands if island.loss is not None and island.state == "training"]
    resume = (row.spec.get("resume") if isinstance(row.spec, dict) else None) or {}
    facts = {
        **own,
        **progress,
        "last_known": progress != {name: own[name] for name in LAST_KNOWN} or bool(status and status.last_known),
        "islands": islands,
        "island_count": sum(not (island.standby or island.spare) for island in islands),
        "islands_training": sum(island.state == "training" for island in islands),
        "loss": curve[-1].loss if curve else remembered.get("loss"),
        "loss_train": math.fsum(losses) / len(losses) if losses else None,
        "goodput_ratio": own["goodput"].get("goodput_ratio") or remembered.get("goodput_ratio"),
    }
    return Job(
        **facts,
        job=row.job,
        name=row.name,
        caller=row.caller,
        submitted_at=row.submitted_at,
        run_dir=row.run_dir,
        priority=row.priority,
        loss_curve=curve,
        report_ready=report,
        resumed_from=resume.get("checkpoint"),
        resume_refused=resume.get("refused", []),
        warnings=list(warnings),
        wire={way: codec for way, codec in _mapping(_knobs(row).get("wire")).items() if isinstance(codec, str)},
        upgrade=_newer(own["build"]) if state is JobState.RUNNING and "build" in own else "",
        schedule={name: value for name in SCHEDULE if type(value := _knobs(row).get(name)) is int},
    )


def _newer(build: str) -> str:
    """Return this service's release if it is newer than that of the job; empty otherwise."""
    job, own = release.Build.parse(build), release.own()
    return str(own) if job is not None and release.is_older(job, own) else ""


def _by_status(status: JobStatus) -> dict[str, Any]:
    """Return what the job says of itself, by the fields of ``Job``."""
    view = status.view
    state = state_of(view)
    spares = spares_of(view.islands)
    norms = {own.fragment: own for own in status.fragment_norms}
    return {
        **view.shared(JobFacts),
        "state": state,
        "reason": view.reason,
        "started_at": status.started_at,
        "ended_at": status.started_at + status.at if status.started_at and state.final else None,
        "after_s": status.at,
        "islands": [island_of(own, status.lines.islands.get(own.island), own.island in spares) for own in view.islands],
        "fragments": [fragment_of(own, norms.get(own.fragment)) for own in view.fragments],
        "goodput": finite(status.goodput),
        "statistics": finite(status.statistics),
        "helpers": status.helpers,
        "shards": [] if state.final else status.shards,
        "eta_s": status.eta_s,
        "merged_at": merged_at_of(status),
        "troubles": [] if state.final else list(troubles_of(status)),
    }


def merged_at_of(status: JobStatus) -> float | None:
    """Return the time of the newest merge that contained an island's work, in Unix seconds."""
    merges = [island.last_merge_at for island in status.view.islands if island.last_merge_at is not None]
    return status.started_at + max(merges) if merges else None


def troubles_of(status: JobStatus) -> Iterator[str]:
    """Yield what is wrong with a job that has not ended, the worst first."""
    view = status.view
    if view.pause_reason:
        yield f"no fragment can merge: {view.pause_reason}"
    for state in (IslandState.FAILED, IslandState.LOST, IslandState.SUSPECT):
        if names := [island.island for island in view.islands if island.state == state]:
            yield f"{_some(names)} {'is' if len(names) == 1 else 'are'} {state.value}"
    if names := [island.island for island in view.islands if island.flag]:
        yield f"the work of {_some(names)} is not used"
    if names := [island for island, line in status.lines.islands.items() if line.trouble]:
        yield f"payloads of {_some(names)} do not get through"
    if view.checkpoint.trouble:
        yield f"checkpoints fail: {view.checkpoint.trouble}"
    yield from (f"{helper.name}: {helper.reason}" for helper in status.helpers if helper.reason)
    yield from (f"shard {one.shard} on node {one.node}: {one.reason}" for one in status.shards if one.reason)


def _some(names: Sequence[str]) -> str:
    """Return the name, or the first one and how many more there are."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _by_row(row: JobRow, island_plans: list[Island], token_budget: int) -> dict[str, Any]:
    """Return what is known of a job that says nothing of itself, by the fields of ``Job``."""
    return {
        **LAST_KNOWN,
        "token_budget": token_budget,
        "pause_reason": None,
        "state": JobState(row.state),
        "reason": gone_for(row) if row.state == JobState.RUNNING else row.reason,
        "started_at": None,
        "ended_at": None,
        "after_s": None,
        "islands": island_plans,
        "fragments": [],
        "goodput": {},
        "statistics": {},
    }


def _knobs(row: JobRow) -> dict[str, Any]:
    """``synchroniser`` of the row's specification, as far as that can be read."""
    return _mapping(_mapping(row.spec).get("synchroniser"))


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def readable(row: JobRow) -> JobRow:
    """Return the row with every column of its type. A damaged column becomes the text that can be read of it, or empty."""
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
    """Return the job's progress that its row remembers, without the figures that are damaged."""
    stored = row.last_known if isinstance(row.last_known, dict) else {}
    numbers = {name: value for name in LAST_KNOWN if type(value := stored.get(name)) is int and value >= 0}
    figures = {name: value for name in ("loss", "goodput_ratio") if type(value := stored.get(name)) is float}
    return numbers | {name: value for name, value in figures.items() if math.isfinite(value)}


def last_known_of(status: JobStatus) -> dict[str, Any]:
    """Return the job's progress to store in its row."""
    progress: dict[str, Any] = {name: getattr(status.view, name) for name in LAST_KNOWN}
    loss = status.loss_curve[-1][1] if status.loss_curve else None
    figures: dict[str, Any] = finite({"loss": loss, "goodput_ratio": status.goodput["goodput_ratio"]})
    return progress | figures | ({"build": status.view.build} if status.view.build else {})


def gone_for(row: JobRow) -> str:
    """Return the reason shown for a job that should run, and of which no process is left."""
    return f"{GONE} ({row.reason})" if row.reason else GONE


def unreadable(row: JobRow, error: Exception) -> Job:
    """Return the answer about a job whose row is damaged: only what is certain. The job can be removed."""
    state = JobState(row.state) if row.state in JobState.__members__.values() else JobState.FAILED
    row = readable(row)
    why = f"Its row in the store is damaged ({type(error).__name__}: {first_line(error)[:200]}). {UNREADABLE_REMEDY}"
    nothing: dict[str, Any] = dict.fromkeys(
        ("started_at", "ended_at", "after_s", "islands_training", "pause_reason", "loss", "loss_train", "goodput_ratio")
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


def state_of(view: CoreStatus) -> JobState:
    """Return the core's phase and outcome as one word."""
    if view.phase == "finished":
        return JobState(view.outcome or "failed")
    return JobState.FINISHING if view.phase == "finishing" else JobState.RUNNING


def still_writing(status: JobStatus) -> JobStatus:
    """Return the status of a job that has decided how it ends, and has not written all of its files yet."""
    view = status.view
    reason = f"it is ending as {view.outcome} ({view.reason}); its parameters and its report are being written"
    return status.with_view(phase="finishing", reason=reason)


def spares_of(islands: Sequence[IslandStatus]) -> set[str]:
    """Return the scale-up slots that were never filled. A job that has placed no island yet has none."""
    if not any(island.incarnation for island in islands):
        return set()
    idle = (island for island in islands if island.state == IslandState.STOPPED and not island.incarnation)
    return {island.island for island in idle if not island.standby}


def island_of(own: IslandStatus, line: Line | None = None, spare: bool = False) -> Island:
    """Return the island as the API shows it."""
    pace = 1.0 / own.step_seconds if own.step_seconds and own.state == "training" else None
    return Island(
        **own.shared(IslandFacts) | {name: finite(getattr(own, name)) for name in FROM_STEPS},
        steps_per_second=pace,
        tokens_per_second=own.tokens_per_second,
        last_merge_after_s=own.last_merge_at,
        spare=spare,
        line=line,
    )


def island_in(job: Job, island: str) -> Island:
    """Return the island of this name. Raises NotFound, with the job's islands."""
    for candidate in job.islands:
        if candidate.island == island:
            return candidate
    names = ", ".join(candidate.island for candidate in job.islands)
    raise NotFound(detail=f"Job {job.job} has no island {island!r}.", remedy=f"Its islands are {names}.")


def fragment_of(own: FragmentStatus, norms: FragmentNorms | None = None) -> Fragment:
    """Return the fragment as the API shows it."""
    return Fragment(
        **own.shared(FragmentStatus),
        update_norm=finite(norms.update_norm) if norms else None,
        residue_norm=finite(norms.residue_norm) if norms else None,
    )


def request_in(row: CommandRow) -> commands.Command | None:
    """Return the command in the row, or None if this build cannot read it."""
    try:
        return command_codec.decode_command(row.request)
    except DataError:
        return None


def settings_command(wanted: SettingsChange, spec: Mapping[str, Any]) -> commands.Set:
    """Return the command that changes these settings of a job. Raises Conflict if its learning rate cannot be set."""
    ratio = wanted.lr_ratio
    if wanted.lr is not None or ratio is not None:
        trainer, inner = spec.get("trainer"), (spec.get("training") or {}).get("inner_optimizer") or {}
        factory = trainer.get("factory", BUILT_IN_TRAINER) if isinstance(trainer, dict) else trainer
        if factory not in (None, *ADJUSTABLE_TRAINERS):
            raise Conflict(
                detail=f"lr cannot be changed: the steps of the job's trainer, {factory}, have a rate of their own.",
                remedy="Leave lr out, or submit the job again from its newest checkpoint with another trainer.",
            )
        if wanted.lr is not None and ratio is not None:
            detail = f"lr is {wanted.lr:g} and lr_ratio is {ratio:g}, but only one of them can be set."
            raise Conflict(detail=detail, remedy="Leave one of them out.")
        if wanted.lr is not None and inner.get("factory"):
            detail = f"lr is {wanted.lr:g}, but the optimizer of {inner['factory']} has a learning rate of its own."
            raise Conflict(detail=detail, remedy="Give a ratio of it, such as lr=0.5x.")
        ratio = wanted.lr / inner["lr"] if wanted.lr is not None else ratio
    if wanted.cost is not None and any(entry.get("price") is None for entry in spec.get("islands") or ()):
        raise Conflict(
            detail=f"cost is {wanted.cost:g}, but not every node group of the job has a price.",
            remedy="Submit the job again from its newest checkpoint to a service with --prices FILE.",
        )
    return commands.Set(ratio, wanted.quorum, wanted.grace, wanted.interval, wanted.cost)


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
    """Return the kind of a command that this build cannot read, or an empty text."""
    return str(document.get("kind", "")) if isinstance(document, dict) else ""


def _count_in(request: commands.Command | None) -> int | None:
    match request:
        case commands.Scale(_, count):
            return count
        case commands.Rollback(checkpoint):
            return checkpoint
    return None


def plans_of(row: JobRow) -> tuple[list[Island], int, dict[str, dict[str, Any]], list[ProblemItem]]:
    """Return the specified islands (not placed yet), the token budget, each island's hosts and mesh, and warnings.

    All are empty if this build cannot read the row's specification.
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
            reason=before or "none of the job's processes is running",
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
