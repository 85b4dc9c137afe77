"""Commands for jobs: submit, jobs, prioritise, status, watch, cancel, delete, retention, report."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from api.commands.common import (
    INTERRUPTED,
    CsvOption,
    HomeOption,
    JobArgument,
    JsonOption,
    OutputOption,
    ParquetOption,
    RetentionBytesOption,
    RetentionDaysOption,
    RetentionFailedDaysOption,
    UrlOption,
    WatchOption,
    connect,
    console,
    console_for,
    echo,
    echo_json,
    print_json,
    say,
    until_interrupted,
)
from api.commands.islands import conclude
from api.installation.home import DEFAULT_HOME
from orchestrator.errors import ConfigurationError, InfrastructureError, NotFound, RequestError, ServiceUnreachable

if TYPE_CHECKING:
    from collections.abc import Callable

    from api.client import Client
    from api.schemas import Job, JobSummary
    from api.terminal.listing import Listing

JobStateName = Literal["queued", "starting", "running", "finishing", "completed", "cancelled", "failed"]
LATEST = "latest"
LOOK_EVERY_S = 0.3
SpecFile = Annotated[Path, typer.Argument(metavar="FILE", help="A job specification, YAML or JSON.")]


def submit(
    file: SpecFile,
    watch_it: Annotated[bool, typer.Option("--watch", help="Watch the job until it ends.")] = False,
    priority: Annotated[
        int, typer.Option("--priority", min=-100, max=100, help="-100 to 100; jobs of higher priority start first.")
    ] = 0,
    resume: Annotated[
        str | None,
        typer.Option("--resume", metavar="CHECKPOINT", help="Resume from a checkpoint: a job, or a folder or URL."),
    ] = None,
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Submit a job. If the specification has problems, all are reported at once and nothing is started.

    While there is no room the job is queued: by priority, then by order of submission. No job overtakes another.
    """
    from api.terminal.watch import warning_lines
    from orchestrator.specification.config import parse_job, read_job_document

    document = read_job_document(file)
    try:
        client = connect(home, url)
        if resume is not None:
            document["resume"] = {"checkpoint": _checkpoint_named(resume, client)}
        job = client.submit(document, priority=priority)
    except ServiceUnreachable:
        parse_job(document)  # report the file's own problems even when no service answers
        raise
    with client:
        if as_json:
            print_json(job)
        else:
            say(
                f"submitted {job.job}: {job.island_count} islands, {job.token_budget:,} tokens, results in {job.run_dir}"
            )
            for line in (*resumption_lines(job), *warning_lines(job)):
                say(line)
            if job.queue_position:
                from api.terminal.watch import queue_place

                say(f"{job.job} is {queue_place(job)}")
        if watch_it:
            watch_to_end(client, job.job)
        elif not as_json:
            say(f"watch it with `atoll watch {job.job}`")


def _checkpoint_named(resume: str, client: Client) -> str:
    """Return the value of ``resume.checkpoint``. The name of a job takes precedence over a folder of the same name."""
    if not resume:  # as from an unset variable
        raise ConfigurationError(detail="--resume is empty. Name a job, a checkpoint's folder, or a URL.")
    is_path = "/" in resume or resume in (".", "..")
    if not is_path and (resume == LATEST or not Path(resume).exists() or _is_job(resume, client)):
        return resume
    return str(Path(resume).resolve()) if Path(resume).exists() else resume


def _is_job(name: str, client: Client) -> bool:
    try:
        return client.job(name).job == name
    except (NotFound, RequestError):
        return False


def resumption_lines(job: Job) -> list[str]:
    """Return lines that say which checkpoint the job resumes from, and which ones it skips."""
    if job.resumed_from is None:
        return []
    return [*(f"skipped: {reason}" for reason in job.resume_refused), f"resumes from {job.resumed_from}"]


def jobs(
    jobs: Annotated[
        list[str] | None, typer.Argument(metavar="[JOB]...", help="With --table: the jobs to compare.")
    ] = None,
    state: Annotated[JobStateName | None, typer.Option("--state", help="Only jobs in this state.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="Only jobs with this name.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="Show at most this many.")] = 100,
    output: OutputOption = None,
    watch: WatchOption = False,
    table: Annotated[bool, typer.Option("--table", help="Compare them: settings that differ, beside results.")] = False,
    csv: CsvOption = None,
    parquet: ParquetOption = None,
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """List jobs, newest first. With --table, --csv or --parquet: their settings that differ, beside their results."""
    if table or csv is not None or parquet is not None:
        if watch:
            raise ConfigurationError(detail="--watch has no effect on a table of settings. Leave one of them out.")
        with connect(home, url) as client:
            names = jobs or [job.job for job in client.jobs(state=state, name=name, limit=limit)]
            _compare(client, names, csv, parquet, output, as_json)
        return
    if jobs:
        raise ConfigurationError(
            detail=f"{jobs[0]} has no effect on the list of jobs. Give --table to compare jobs, or `atoll status` for one."
        )
    with connect(home, url) as client:

        def ask() -> list[JobSummary]:
            return client.jobs(state=state, name=name, limit=limit)

        if watch:
            _watch_list(ask, output, as_json)
            return
        listed = ask()
    if as_json or output == "json":
        print_json({"jobs": [job.model_dump(mode="json") for job in listed]})  # as the API answers
    elif listed:
        console_for(output).print(_table(listed, output == "wide"))
        for line in (*_silent(listed), *_waiting(listed)):
            say(line)
    elif state or name:
        say("no job matches")
    else:
        say("there are no jobs; try `atoll submit deploy/configs/demo.yaml`")


def _compare(
    client: Client, names: list[str], csv: Path | None, parquet: Path | None, output: str | None, as_json: bool
) -> None:
    from api.run.tables import compared, write_all

    listed = [client.job(name) for name in names]
    if not listed:
        say("no job matches")
        return
    specifications = [client.specification(job.job).specification for job in listed]
    columns, rows = compared([job.model_dump(mode="json") for job in listed], specifications)
    for line in write_all(csv, parquet, columns, lambda: rows):
        say(line)
    if as_json or output == "json":
        print_json(rows)
    elif csv is None and parquet is None:
        from api.terminal.listing import Listing

        table = Listing(*columns)
        for row in rows:
            table.add_row(*(_cell(row.get(column)) for column in columns))
        console_for(output).print(table)


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.6g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)


def _watch_list(ask: Callable[[], list[JobSummary]], output: str | None, as_json: bool) -> None:
    from rich.console import Group

    from api.terminal.listing import Poller, emit, show

    def draw(jobs: list[JobSummary]) -> Group:
        return Group(_table(jobs, output == "wide"), *_silent(jobs), *_waiting(jobs))

    with until_interrupted():
        if as_json or output == "json":
            emit(Poller(ask), lambda jobs: jobs, echo_json, name="jobs")
        else:
            show(Poller(ask), draw, console_for(output))


def _table(jobs: list[JobSummary], wide: bool) -> Listing:
    from api.terminal.listing import Listing

    table = Listing(*COLUMNS, *(WIDE if wide else ()), prose=("results in", "why"))
    for job in jobs:
        share = f"{job.tokens_trained:,} ({100 * job.tokens_trained / job.token_budget:.0f} %)"
        if job.silent:
            share = f"≥ {share}" if job.last_known else UNKNOWN
        loss = "–" if job.loss is None else f"{job.loss:.3f}"
        goodput = "–" if job.goodput_ratio is None else f"{100 * job.goodput_ratio:.1f} %"
        submitted = time.strftime("%m-%d %H:%M", time.localtime(job.submitted_at))
        islands = f"{UNKNOWN if job.islands_training is None else job.islands_training}/{job.island_count}"
        state = f"{job.state} #{job.queue_position}" if job.queue_position else str(job.state)
        state = f"{state}, silent" if job.silent else state
        table.add_row(job.job, state, islands, share, loss, goodput, submitted, *(_wide_cells(job) if wide else ()))
    return table


def _silent(jobs: list[JobSummary]) -> list[str]:
    """Return a line for each reason why jobs do not answer. What is shown of them is as last seen."""
    by_reason: dict[str, list[str]] = {}
    for job in jobs:
        if job.silent:
            by_reason.setdefault(job.reason.replace(job.job, "it"), []).append(job.job)
    return [
        f"{_named(names)} {'do' if len(names) > 1 else 'does'} not answer: {why}" for why, names in by_reason.items()
    ]


def _waiting(jobs: list[JobSummary]) -> list[str]:
    """Return a line for each reason why queued jobs wait, in the order in which they will start."""
    queued = sorted((job for job in jobs if job.queue_position), key=lambda job: job.queue_position or 0)
    by_reason: dict[str, list[str]] = {}
    for job in queued:
        by_reason.setdefault(job.reason, []).append(job.job)
    return [f"{_named(names)} {'wait' if len(names) > 1 else 'waits'}: {why}" for why, names in by_reason.items()]


def _named(names: list[str]) -> str:
    """Return a few names in full, or the first of many and how many more there are."""
    if len(names) <= NAMED_MAX:
        return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    return f"{', '.join(names[:NAMED_MAX])} and {len(names) - NAMED_MAX} more"


NAMED_MAX = 3
UNKNOWN = "?"
COLUMNS = ("job", "state", "islands", "tokens", "loss", "goodput", "submitted")
WIDE = ("by", "ran for", "version", "results in", "why")


def _wide_cells(job: JobSummary) -> tuple[str, ...]:
    ended_at = job.ended_at or time.time()
    ran = "–" if job.started_at is None else f"{max(0.0, ended_at - job.started_at):,.0f} s"
    return job.caller, ran, f"{job.global_version:,}", job.run_dir, job.reason


def prioritise(
    job: JobArgument,
    priority: Annotated[int, typer.Argument(metavar="N", min=-100, max=100, help="-100 to 100.", show_default=False)],
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change the priority of a queued job. Jobs of higher priority start first."""
    with connect(home, url) as client:
        moved = client.prioritise(job, priority)
    if as_json:
        print_json(moved)
    else:
        from api.terminal.watch import queue_place

        say(f"{moved.job} is {queue_place(moved) if moved.queue_position else moved.state}")


def status(
    job: JobArgument, home: HomeOption = DEFAULT_HOME, url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """Show the current status of a job."""
    with connect(home, url) as client:
        details = client.job(job)
        if as_json:
            print_json(details)
            return
        from api.terminal.watch import newest_advice, render

        note = newest_advice(client, details)
    console().print(render(details, note))


def watch(
    job: JobArgument, home: HomeOption = DEFAULT_HOME, url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """Watch a job until it ends. Ctrl-C leaves it running. Exit code 1 if it failed or was cancelled.

    With --json: one line a second, each with the whole status.
    """
    with connect(home, url) as client:
        watch_to_end(client, job, as_json)


def cancel(
    job: JobArgument, home: HomeOption = DEFAULT_HOME, url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """Stop a job without waiting for the work in flight. It still writes its report."""
    with connect(home, url) as client:
        conclude(client, client.cancel(job), as_json)


def finish(
    job: JobArgument, home: HomeOption = DEFAULT_HOME, url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """End a job early, without losing work: islands give their last work, and it completes once that is merged."""
    with connect(home, url) as client:
        conclude(client, client.finish(job), as_json)


SETTINGS = ("lr", "quorum", "grace", "interval", "cost")


def set_settings(
    job: JobArgument,
    settings: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME=VALUE ...",
            help="lr=3e-4, or lr=0.5x for half of the specification's; quorum=2; grace=4 (inner steps); interval=48; "
            "cost=800, the limit of what the job may cost.",
            show_default=False,
        ),
    ],
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change settings of a running job: its learning rate, quorum, grace window, steps between offers, and limit of cost."""
    wanted = dict(map(_setting, settings))
    with connect(home, url) as client:
        conclude(client, client.change(job, **wanted), as_json)


def _setting(text: str) -> tuple[str, float]:
    """Return name and value of a setting. Raises RequestError."""
    name, separator, value = text.partition("=")
    if name not in SETTINGS or not separator:
        detail = f"{text!r} is no setting of a running job; there are {', '.join(SETTINGS)}."
        raise RequestError(detail=detail, remedy="Write NAME=VALUE, such as lr=0.5x or quorum=2.")
    is_ratio = name == "lr" and value.endswith("x")
    try:
        if name in ("quorum", "interval"):
            return name, int(value)
        return ("lr_ratio" if is_ratio else name), float(value.removesuffix("x") if is_ratio else value)
    except ValueError:
        kind = "a whole number" if name in ("quorum", "interval") else "a number"
        detail = f"{name} is {value!r}, which is not {kind}."
        raise RequestError(detail=detail, remedy=f"Give {kind}, such as {name}=2.") from None


def restart(
    job: JobArgument, home: HomeOption = DEFAULT_HOME, url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """Restart the synchroniser of a running job, even one that hangs. It continues from tape and journal.

    Islands train meanwhile, and no merged work is lost. The job's epoch rises.
    """
    with connect(home, url) as client:
        answer = client.restart(job)
    if as_json:
        print_json(answer.model_dump(mode="json"))
    else:
        say(f"{answer.job}: {answer.detail}")


def upgrade(
    job: JobArgument, home: HomeOption = DEFAULT_HOME, url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """Run a job's synchroniser in the release of the service. It restarts once a checkpoint is complete.

    Islands train on meanwhile, in the release of their nodes. If the new release cannot start it, the job continues in the
    old one, and the exit code is 1. Ctrl-C leaves the upgrade running.
    """
    tell = (lambda text: None) if as_json else say
    with connect(home, url) as client, until_interrupted():
        before = client.job(job)
        tell(f"{before.job}: trying {before.upgrade or 'the release of the service'} on its machines")
        command = client.upgrade(before.job)
        tell(f"{before.job}: taking a checkpoint")
        while command.state in ("pending", "undelivered"):
            time.sleep(LOOK_EVERY_S)
            command = client.command(command.job, command.command)
        if command.state == "accepted":
            tell(f"{command.job}: {command.detail}")
        after = _restarted(client, before) if command.state == "accepted" else before
    is_upgraded = command.state == "accepted" and after.build != before.build
    detail = (
        command.detail if is_upgraded or command.state != "accepted" else f"it did not start; see `atoll events {job}`"
    )
    if as_json:
        print_json(
            {
                "job": after.job,
                "command": command.command,
                "before": before.build,
                "build": after.build,
                "epoch": after.epoch,
                "upgraded": is_upgraded,
                "detail": detail,
            }
        )
    elif is_upgraded:
        say(f"{after.job} runs as {after.build} in epoch {after.epoch}; until now it ran as {before.build}")
    else:
        say(f"{after.job} continues as {after.build}: {detail}")
    if not is_upgraded:
        raise typer.Exit(1)


def _restarted(client: Client, before: Job) -> Job:
    """Return the job once its next synchroniser answers, or once it has ended."""
    while True:
        with suppress(InfrastructureError):
            now = client.job(before.job)
            if now.state != "running" or now.epoch > before.epoch:
                return now
        time.sleep(LOOK_EVERY_S)


def delete(
    job: JobArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
) -> None:
    """Remove a job that has ended, with its files: tape, report, merged parameters."""
    with connect(home, url) as client:
        folder = client.job(job).run_dir
        if not yes:
            typer.confirm(f"Permanently remove {job} and {folder}?", abort=True)
        client.delete(job)
    say(f"removed {job} and {folder}")


def retention(
    days: RetentionDaysOption = None,
    failed_days: RetentionFailedDaysOption = None,
    size: RetentionBytesOption = None,
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what the service removes of ended jobs, and what it would remove now. Removes nothing.

    With --retention-days and its like: what it would remove with these settings, which `atoll up` takes.
    """
    with connect(home, url) as client:
        plan = client.retention(days=days, failed_days=failed_days, bytes=size)
    if as_json:
        print_json(plan)
        return
    limits = [
        *([f"completed and cancelled jobs {plan.days:g} days after their end"] if plan.days is not None else []),
        *([f"failed jobs {plan.failed_days:g} days after their end"] if plan.failed_days is not None else []),
        *([f"the oldest beyond {plan.bytes:,} bytes"] if plan.bytes is not None else []),
    ]
    echo(f"removed are {', '.join(limits)}" if limits else "no retention is set: ended jobs are kept")
    echo(f"{plan.ended_count} ended jobs take {plan.ended_bytes:,} bytes")
    for job in plan.kept_for_others:
        echo(f"kept     {job}: a job that has not ended uses its files")
    for removal in plan.removals:
        echo(f"remove   {removal.job}: {removal.bytes:,} bytes; {removal.reason}")


def report(
    job: JobArgument = "latest",
    csv: CsvOption = None,
    parquet: ParquetOption = None,
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the results of an ended job, and the path of its report."""
    from api.terminal.watch import lines_that_matter

    with connect(home, url) as client:
        figures = client.report(job)
        if csv is not None or parquet is not None:
            from api.run import tables

            for line in tables.write_all(csv, parquet, tables.REPORT_COLUMNS, lambda: tables.report_rows(figures)):
                say(line)
        if as_json:
            print_json(figures)
            return
        details = client.job(job)
    end = [f"end       {details.state}: {details.reason}"] if details.state != "completed" and details.reason else []
    for text in (*end, *lines_that_matter(figures), f"report    {details.run_dir}/report.html"):
        echo(text)


def watch_to_end(client: Client, job: str, as_json: bool = False) -> None:
    """Watch until the job has ended. Exit 1 if it did not complete, 130 after Ctrl-C, which leaves it running."""
    from api.terminal.watch import follow
    from api.terminal.watch import watch as watch_live

    job = client.job(job).job  # `latest` may become another job meanwhile
    try:
        if as_json:
            ended = follow(client, job, lambda current: echo_json(current.model_dump_json()))
        else:
            ended = watch_live(client, job, console())
    except KeyboardInterrupt:
        say(f"the job keeps running; watch it again with `atoll watch {job}`, or end it with `atoll cancel {job}`")
        raise typer.Exit(INTERRUPTED) from None
    tell_end(ended)
    if ended.state != "completed":
        raise typer.Exit(1)


def tell_end(job: Job) -> None:
    say(f"{job.job} {job.state}{f': {job.reason}' if job.reason else ''}")
    if job.report_ready:
        say(f"see `atoll report {job.job}`, or open {job.run_dir}/report.html")


def register(app: typer.Typer) -> None:
    for command in (submit, jobs, status, watch, finish, cancel, restart, upgrade, delete, retention, report):
        app.command(rich_help_panel="Jobs")(command)
    app.command("set", rich_help_panel="Jobs")(set_settings)
    negative = {"ignore_unknown_options": True}  # a negative number is an argument, not an option
    app.command(rich_help_panel="Jobs", context_settings=negative)(prioritise)
