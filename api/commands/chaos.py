"""The commands of `atoll chaos`: inject one fault, list the plans, run one against a live or a simulated job, and judge it.

The service runs plans against live jobs; these commands start, watch and end them. The exit code is the verdict: 0 if the
objectives hold, 1 if they do not, 2 if the plan cannot be used.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from api.commands import common
from api.commands.common import (
    INTERRUPTED,
    SEED_MAX,
    HomeOption,
    IslandArgument,
    JobArgument,
    JsonOption,
    UrlOption,
    connect,
    console,
    echo,
    echo_json,
    print_json,
    say,
)
from api.commands.islands import conclude
from api.installation.home import DEFAULT_HOME
from orchestrator.errors import Conflict, InfrastructureError

if TYPE_CHECKING:
    from api.chaos.schemas import ChaosRun, VerdictDocument
    from api.client import Client
    from api.schemas import Job


POLL_EVERY_S = 0.5
VERDICT_TIMEOUT_S = 90.0
"""After the job's end. The service gives up on a report before that."""

PlanArgument = Annotated[
    str,
    typer.Argument(metavar="PLAN", help="A file, or a shipped plan's name: `attrition`.", autocompletion=common.plans),
]
PageOption = Annotated[
    Path | None, typer.Option("--report", metavar="OUT.html", help="File for the verdict's page.", show_default=False)
]
ReferenceOption = Annotated[
    str | None,
    typer.Option(
        "--reference",
        metavar="JOB|FILE",
        help="For loss_gap: a job without faults, or its report.json.",
        show_default=False,
    ),
]
RunOption = Annotated[str, typer.Option("--run", metavar="RUN", help="The run. Default: the job's newest.")]


def run(
    job: JobArgument,
    plan: PlanArgument,
    report: PageOption = None,
    reference: ReferenceOption = None,
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a plan against a live job, watch it to its end, and judge it. Exit code 0 passed, 1 failed, 2 a bad plan.

    Ctrl-C ends the plan, lets stopped islands continue, and leaves the job running; then there is no verdict.
    """

    from api.terminal.watch import watch

    with connect(home, url) as client:
        job = client.job(job).job  # `latest` may mean another one by the time it is said again
        key = secrets.token_hex(16)
        try:
            started = _started(client, job, plan, reference, key)
            ended = watch(client, job, console(stderr=True), ChaosObserver(client, started))
        except KeyboardInterrupt:
            started = _started(
                client, job, plan, reference, key
            )  # it may have begun without its answer having been read
            say(_ended(client.stop_chaos(job, started.run)))
            raise typer.Exit(INTERRUPTED) from None
        verdict = _awaited_verdict(client, started)
        page = report or _folder(ended) / f"chaos-{started.plan}.html"
        page.write_text(client.chaos_report(started.job, started.run), encoding="utf-8")
    conclude_verdict(_plain(verdict), page, as_json)


def start(
    job: JobArgument,
    plan: PlanArgument,
    reference: ReferenceOption = None,
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Start a plan against a live job and leave it to the service. Exit code 2: a bad plan; 1: another one runs."""
    with connect(home, url) as client:
        started = _started(client, job, plan, reference)
    if as_json:
        print_json(started)
    else:
        say(f"see `atoll chaos status {started.job}`; end it with `atoll chaos end {started.job}`")


def status(
    job: JobArgument = "latest",
    run: RunOption = "latest",
    watch: Annotated[bool, typer.Option("--watch", help="Show what happens until the run ends.")] = False,
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a run of a plan: its state, what became of each fault so far, and what comes next."""
    with connect(home, url) as client:
        chaos_run = client.chaos_run(job, run)
        if watch:
            chaos_run = _followed(client, chaos_run, as_json)
        elif as_json:
            print_json(chaos_run)
        else:
            for line in (headline(chaos_run), *lines(chaos_run)):
                echo(line)
    if watch and chaos_run.state in ("failed", "aborted"):
        raise typer.Exit(1)


def end(
    job: JobArgument,
    run: RunOption = "latest",
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """End a plan: no further fault is injected, stopped islands continue, and the job runs on. There is no verdict."""
    with connect(home, url) as client:
        stopped = client.stop_chaos(job, run)
    if as_json:
        print_json(stopped)
    else:
        say(_ended(stopped))


def verdict(
    job: JobArgument = "latest",
    run: RunOption = "latest",
    report: PageOption = None,
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Judge a run of a plan by the job's report. Exit code 0 passed, 1 failed, or no verdict yet."""
    with connect(home, url) as client:
        document = client.chaos_verdict(job, run)
        if report is not None:
            report.write_text(client.chaos_report(job, run), encoding="utf-8")
    conclude_verdict(_plain(document), report, as_json)


def runs(
    job: JobArgument = "latest", home: HomeOption = DEFAULT_HOME, url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """List the runs of plans against a job, newest first."""
    with connect(home, url) as client:
        summaries = client.chaos_runs(job)
    if as_json:
        print_json(summaries)
        return
    if not summaries:
        say("no plan has run against this job")
        return
    from api.terminal.listing import Listing

    table = Listing("run", "plan", "state", "injected", "skipped", "by", "asked", "why", prose=("why",))
    for one in summaries:
        requested_at = time.strftime("%m-%d %H:%M", time.localtime(one.requested_at))
        table.add_row(
            one.run,
            one.plan,
            one.state,
            str(one.struck_count),
            str(one.spared_count),
            one.caller,
            requested_at,
            one.reason,
        )
    console().print(table)


# ── helpers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _started(client: Client, job: str, plan: str, reference: str | None, key: str | None = None) -> ChaosRun:
    """The run that this key began; it is begun once."""
    from api.chaos.plans import load, plan_file
    from orchestrator.specification.documents import read_document

    file = plan_file(plan)
    seed = load(file).seed
    reference_report = read_document(Path(reference)) if reference and Path(reference).is_file() else reference
    started = client.start_chaos(job, file.read_text(encoding="utf-8"), reference_report, key=key)
    say(f"{started.plan} against {started.job}: {started.fault_count} faults planned, seed {seed}; it is {started.run}")
    return started


def _awaited_verdict(client: Client, run: ChaosRun) -> VerdictDocument:
    """The verdict, which comes soon after the job's end. Raises Conflict if there will be none."""
    deadline = time.monotonic() + VERDICT_TIMEOUT_S
    while True:
        try:
            return client.chaos_verdict(run.job, run.run)
        except Conflict:
            if client.chaos_run(run.job, run.run).ended_at is not None or time.monotonic() > deadline:
                return client.chaos_verdict(run.job, run.run)
            time.sleep(POLL_EVERY_S)


def _followed(client: Client, run: ChaosRun, as_json: bool) -> ChaosRun:
    """Tell what is new until nothing is left to do; with ``as_json`` one state a line. Ctrl-C leaves all as it is."""
    news = [headline(run), *lines(run)]
    while True:
        if as_json:
            echo_json(run.model_dump_json())
        else:
            for line in news:
                echo(line)
        if run.ended_at is not None:
            break
        time.sleep(POLL_EVERY_S)
        before, run = run, client.chaos_run(run.job, run.run)
        news = ChaosObserver.news(before, run)
    if not as_json:
        echo(headline(run))
    return run


def _ended(run: ChaosRun) -> str:
    return f"the plan is {run.reason}; no further faults are injected: `atoll watch {run.job}`"


def _folder(job: Job) -> Path:
    """The folder of the job's own report, if that is on this machine."""
    folder = Path(job.run_dir)
    return folder if folder.is_dir() else Path()


def _plain(verdict: VerdictDocument) -> dict[str, Any]:
    return verdict.model_dump(mode="json", by_alias=True)


class ChaosObserver:
    """Reads the run whenever the job is polled (``watch.Observer``), and returns what is new as a note."""

    def __init__(self, client: Client, begun: ChaosRun) -> None:
        self._client = client
        self._shown = begun.model_copy(update={"decisions": [], "state": "waiting"})  # it may have news already

    def __call__(self, _job: Job) -> str | None:
        before = self._shown
        try:
            self._shown = self._client.chaos_run(before.job, before.run)
        except InfrastructureError:
            return None  # the job is asked next, and says so
        return "; ".join(self.news(before, self._shown)) or None

    @staticmethod
    def news(before: ChaosRun, now: ChaosRun) -> list[str]:
        """Lines for what is in ``now`` and was not in ``before``."""
        news = lines(now)[len(before.decisions) : len(now.decisions)]
        if now.state != before.state and now.state in ("aborted", "stopped"):
            news.append(f"{now.state}: {now.reason}")
        return news


def conclude_verdict(verdict: Mapping[str, Any], page: Path | None, as_json: bool) -> None:
    """Print the verdict. Exit code 1 if it is a fail."""
    if as_json:
        print_json(verdict)
    else:
        for one in verdict["objectives"]:
            echo(f"{'held  ' if one['passed'] else 'FAILED'}  {one['objective']}  ({one['detail']})")
        for note in verdict["notes"]:
            echo(f"note    {note}")
        echo("passed" if verdict["passed"] else "failed")
    if page is not None:
        say(f"the verdict's page: {page}")
    if not verdict["passed"]:
        raise typer.Exit(1)


def headline(run: ChaosRun) -> str:
    reason = f" ({run.reason})" if run.reason else ""
    if run.next is None:
        coming = ""
    elif run.next.after_s is None:
        coming = "; it begins when enough islands are training"
    else:
        coming = f"; next {run.next.told} at {run.next.after_s:.1f} s"
    done = f"{run.struck_count} of {run.fault_count} faults injected, {run.spared_count} skipped"
    return f"{run.plan} against {run.job} is {run.state}{reason}: {done}{coming}"


def lines(run: ChaosRun) -> list[str]:
    """One line for the outcome of each fault."""
    return [
        f"{one.after_s:.1f} s: {one.told}" + (f" skipped, {one.spared}" if one.spared else "") for one in run.decisions
    ]


app = typer.Typer(no_args_is_help=True, help="Inject faults on purpose, and check whether the job survives them.")


@app.command()
def simulate(
    plan: PlanArgument,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A job, or a world that `atoll tape fit` wrote.")],
    seed: Annotated[
        int,
        typer.Option(
            "--seed", min=0, max=SEED_MAX, help="Seed of the world; the plan's own seed determines the faults."
        ),
    ] = 0,
    report: PageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a plan against a simulated job: the same faults at the same instants, in virtual time. Needs no service.

    A job's steps take `synthetic.step_s`; for a machine's own speeds fit a world to a tape.
    """
    from api.chaos.plans import load, plan_file, world_of
    from api.commands.simulate import Progress
    from orchestrator.chaos.simulated import run as run_simulated
    from orchestrator.report import html

    path = plan_file(plan)
    parsed = load(path)
    policy, world = world_of(file)
    with Progress(parsed.name) as progress:
        result = run_simulated(parsed, policy, world, seed, progress.show)
    verdict = result.verdict.plain()
    if report is not None:
        report.write_text(html.render_verdict(verdict, result.verdict.report, path.read_text()), encoding="utf-8")
    conclude_verdict(verdict, report, as_json)


@app.command()
def kill(
    job: JobArgument,
    island: IslandArgument,
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """SIGKILL an island now. As `atoll kill`, but on the tape as chaos."""
    with connect(home, url) as client:
        conclude(client, client.inject(job, "kill", island), as_json)


@app.command()
def stop(
    job: JobArgument,
    island: IslandArgument,
    seconds: Annotated[float, typer.Option("--for", min=0.1, max=3600.0, help="Seconds until it continues.")] = 6.0,
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """SIGSTOP an island for a while: it neither steps nor answers, and then continues by itself."""
    with connect(home, url) as client:
        conclude(client, client.inject(job, "stop", island, seconds), as_json)


@app.command()
def inject(
    job: JobArgument,
    kind: Annotated[
        str, typer.Argument(metavar="KIND", help="Kind of fault: cut, slow, corrupt, delay, drop, kill_node, …")
    ],
    island: Annotated[
        str | None, typer.Argument(metavar="ISLAND", help="The island; leave it out for kill_synchroniser.")
    ] = None,
    seconds: Annotated[
        float,
        typer.Option("--for", min=0.0, max=3600.0, help="Duration of the fault, or delay of a payload, in seconds."),
    ] = 0.0,
    bytes_per_second: Annotated[
        float, typer.Option("--rate", min=0.0, max=1e15, help="Rate of a slow link in bytes/s.")
    ] = 0.0,
    payloads: Annotated[
        int, typer.Option("--payloads", min=0, max=10_000, help="Number of payloads to corrupt, delay or drop.")
    ] = 0,
    host: Annotated[
        int | None,
        typer.Option(
            "--host", min=0, max=1023, help="For kill_host: number of the island's host, from 0.", show_default="last"
        ),
    ] = None,
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Inject any fault of a plan now. A fault that lasts ends by itself, or by `atoll chaos continue`."""
    with connect(home, url) as client:
        command = client.inject(
            job, kind, island, seconds, bytes_per_second=bytes_per_second, payloads=payloads, host=host
        )
        conclude(client, command, as_json)


@app.command("continue")
def go_on(
    job: JobArgument,
    island: IslandArgument,
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """End all faults of an island now: send SIGCONT, and restore its link."""
    with connect(home, url) as client:
        conclude(client, client.inject(job, "continue", island), as_json)


@app.command("list")
def list_plans(as_json: JsonOption = False) -> None:
    """List the plans that come with atoll."""
    from api.chaos.plans import described, shipped

    plans = shipped()
    if as_json:
        print_json([{"path": str(path), **plan.model_dump(mode="json")} for path, plan in plans])
        return
    from api.terminal.listing import Listing

    table = Listing("plan", "faults", "keeps", "objectives", prose=("faults", "objectives"))
    for _, plan in plans:
        faults = "\n".join(described(fault) for fault in plan.faults) or "none"
        objectives = ", ".join(objective.text for objective in plan.objectives)
        table.add_row(plan.name, faults, str(plan.blast_radius.keep), objectives)
    console().print(table)


def register(root: typer.Typer) -> None:
    for command in (run, start, status, end, verdict, runs):
        app.command()(command)
    root.add_typer(app, name="chaos", rich_help_panel="Islands")
