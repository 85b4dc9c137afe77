"""Commands that break things on purpose: run a plan of faults live or simulated, strike one island, list the plans.

A plan's verdict is the exit code: 0 its objectives hold, 1 they do not, 2 the plan cannot be used.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from api.commands.common import (
    HomeOption,
    IslandArgument,
    JobArgument,
    JsonOption,
    UrlOption,
    connect,
    console,
    print_json,
    say,
)
from api.commands.islands import conclude
from api.home import DEFAULT_HOME, Home

if TYPE_CHECKING:
    from orchestrator.chaos.verdict import Verdict

INTERRUPTED = 130

app = typer.Typer(no_args_is_help=True, help="Break things on purpose, and see whether the run survives.")
PlanArgument = Annotated[str, typer.Argument(metavar="PLAN", help="A file, or a shipped plan's name: `attrition`.")]
PageOption = Annotated[
    Path | None, typer.Option("--report", metavar="OUT.html", help="Where the verdict's page goes.", show_default=False)
]


@app.command()
def run(
    job: JobArgument,
    plan: PlanArgument,
    report: PageOption = None,
    reference: Annotated[
        str | None,
        typer.Option("--reference", metavar="JOB|FILE", help="For loss_gap: an undisturbed job, or its report.json."),
    ] = None,
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a plan against a live job, watch it to its end, and judge it. Exit code 0 passed, 1 failed, 2 a bad plan.

    Ctrl-C ends the plan, lets stopped islands go on, and leaves the job running; then there is no verdict.
    """
    from rich.console import Console

    from api.chaos import Conductor, faults_for, load, plan_file, reference_of, write_page
    from api.demo import wait_for_report
    from api.watch import watch
    from orchestrator.chaos.verdict import judge

    file = plan_file(plan)
    parsed = load(file)
    with connect(home, url) as client:
        found = client.job(job)
        faults = faults_for(parsed, found)
        undisturbed = reference_of(client, parsed, reference)
        say(f"{parsed.name} against {found.job}: {len(faults)} faults planned, seed {parsed.seed}")
        conductor = Conductor(client, found.job, parsed, faults, Home(home) if url is None else None)
        try:
            ended = watch(client, found.job, Console(stderr=True), conductor)
        except KeyboardInterrupt:
            islands = conductor.interrupt()
            told = f"; {', '.join(islands)} may go on" if islands else ""
            say(f"the plan is ended{told}; the job goes on: `atoll watch {found.job}`")
            raise typer.Exit(INTERRUPTED) from None
        verdict = judge(conductor.settle(), wait_for_report(client, ended), undisturbed)
    folder = Path(ended.run_dir) if Path(ended.run_dir).is_dir() else Path()
    page = report or folder / f"chaos-{parsed.name}.html"
    write_page(page, verdict, file)
    _conclude(verdict, page, as_json)


@app.command()
def simulate(
    plan: PlanArgument,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A job, or a world that `atoll tape fit` wrote.")],
    seed: Annotated[int, typer.Option("--seed", help="The world's; the faults are drawn from the plan's own.")] = 0,
    report: PageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a plan against a simulated job: the same faults at the same instants, in virtual time. Needs no service.

    A job's steps take `synthetic.step_s`; for a machine's own speeds fit a world to a tape.
    """
    from api.chaos import load, plan_file, write_page
    from api.commands.simulate import Progress
    from api.worlds import world_of
    from orchestrator.chaos.simulated import run as run_simulated

    path = plan_file(plan)
    parsed = load(path)
    policy, world = world_of(file)
    with Progress(parsed.name) as progress:
        found = run_simulated(parsed, policy, world, seed, progress.show)
    if report is not None:
        write_page(report, found.verdict, path)
    _conclude(found.verdict, report, as_json)


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
        conclude(client, client.strike(job, "kill", island), as_json)


@app.command()
def stop(
    job: JobArgument,
    island: IslandArgument,
    seconds: Annotated[float, typer.Option("--for", min=0.1, max=3600.0, help="Seconds until it goes on.")] = 6.0,
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """SIGSTOP an island for a while: it neither steps nor answers. It goes on by itself."""
    with connect(home, url) as client:
        conclude(client, client.strike(job, "stop", island, seconds), as_json)


@app.command()
def strike(
    job: JobArgument,
    kind: Annotated[
        str, typer.Argument(metavar="KIND", help="A plan's: cut, slow, corrupt, delay, drop, kill_node, …")
    ],
    island: Annotated[str | None, typer.Argument(metavar="ISLAND", help="None for kill_synchroniser.")] = None,
    seconds: Annotated[
        float, typer.Option("--for", min=0.0, help="How long it lasts; how late a payload comes.")
    ] = 0.0,
    bytes_per_second: Annotated[float, typer.Option("--rate", min=0.0, help="Bytes/s of a slow link.")] = 0.0,
    payloads: Annotated[int, typer.Option("--payloads", min=0, help="How many are corrupt, delayed or dropped.")] = 0,
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let any fault of a plan strike now. What lasts ends by itself, or by `atoll chaos continue`."""
    with connect(home, url) as client:
        more = {"bytes_per_second": bytes_per_second, "payloads": payloads}
        conclude(client, client.strike(job, kind, island, seconds, **more), as_json)


@app.command("continue")
def go_on(
    job: JobArgument,
    island: IslandArgument,
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """End before its time what chaos did to an island: SIGCONT, and its link is well again."""
    with connect(home, url) as client:
        conclude(client, client.strike(job, "continue", island), as_json)


@app.command("list")
def list_plans(as_json: JsonOption = False) -> None:
    """List the plans that come with atoll."""
    from api.chaos import shipped

    plans = shipped()
    if as_json:
        print_json([{"path": str(path), **plan.model_dump(mode="json")} for path, plan in plans])
        return
    from rich.table import Table

    table = Table("plan", "faults", "keeps", "objectives", box=None, header_style="dim")
    for _, plan in plans:
        faults = "; ".join(fault.told() for fault in plan.faults) or "none"
        objectives = ", ".join(objective.text for objective in plan.objectives)
        table.add_row(plan.name, faults, str(plan.blast_radius.keep), objectives)
    console().print(table)


def _conclude(verdict: Verdict, page: Path | None, as_json: bool) -> None:
    """Print the verdict. Exit code 1 if it is a fail."""
    if as_json:
        print_json(verdict.plain())
    else:
        for one in verdict.judged:
            typer.echo(f"{'held  ' if one.passed else 'FAILED'}  {one.objective}  ({one.detail})")
        for note in verdict.notes:
            typer.echo(f"note    {note}")
        typer.echo("passed" if verdict.passed else "failed")
    if page is not None:
        say(f"the verdict's page: {page}")
    if not verdict.passed:
        raise typer.Exit(1)


def register(root: typer.Typer) -> None:
    root.add_typer(app, name="chaos", rich_help_panel="Islands")
