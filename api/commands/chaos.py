"""Commands that break things on purpose: strike one island, list the plans of faults, run one in the simulator.

``api.commands.chaos_runs`` has those for plans against live jobs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from api.commands import chaos_runs
from api.commands.chaos_runs import PageOption, PlanArgument
from api.commands.chaos_text import conclude_verdict
from api.commands.common import (
    SEED_MAX,
    HomeOption,
    IslandArgument,
    JobArgument,
    JsonOption,
    UrlOption,
    connect,
    console,
    print_json,
)
from api.commands.islands import conclude
from api.installation.home import DEFAULT_HOME

app = typer.Typer(no_args_is_help=True, help="Break things on purpose, and see whether the run survives.")


@app.command()
def simulate(
    plan: PlanArgument,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A job, or a world that `atoll tape fit` wrote.")],
    seed: Annotated[
        int, typer.Option("--seed", min=0, max=SEED_MAX, help="The world's; the faults are drawn from the plan's own.")
    ] = 0,
    report: PageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a plan against a simulated job: the same faults at the same instants, in virtual time. Needs no service.

    A job's steps take `synthetic.step_s`; for a machine's own speeds fit a world to a tape.
    """
    from api.chaos.plans import load, plan_file
    from api.commands.simulate import Progress
    from api.simulation.worlds import world_of
    from orchestrator.chaos.simulated import run as run_simulated
    from orchestrator.report import chaos as page

    path = plan_file(plan)
    parsed = load(path)
    policy, world = world_of(file)
    with Progress(parsed.name) as progress:
        result = run_simulated(parsed, policy, world, seed, progress.show)
    verdict = result.verdict.plain()
    if report is not None:
        report.write_text(page.render(verdict, result.verdict.report, path.read_text()), encoding="utf-8")
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
    seconds: Annotated[float, typer.Option("--for", min=0.1, max=3600.0, help="Seconds until it goes on.")] = 6.0,
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """SIGSTOP an island for a while: it neither steps nor answers. It goes on by itself."""
    with connect(home, url) as client:
        conclude(client, client.inject(job, "stop", island, seconds), as_json)


@app.command()
def strike(
    job: JobArgument,
    kind: Annotated[
        str, typer.Argument(metavar="KIND", help="A plan's: cut, slow, corrupt, delay, drop, kill_node, …")
    ],
    island: Annotated[str | None, typer.Argument(metavar="ISLAND", help="None for kill_synchroniser.")] = None,
    seconds: Annotated[
        float, typer.Option("--for", min=0.0, max=3600.0, help="How long it lasts; how late a payload comes.")
    ] = 0.0,
    bytes_per_second: Annotated[float, typer.Option("--rate", min=0.0, max=1e15, help="Bytes/s of a slow link.")] = 0.0,
    payloads: Annotated[
        int, typer.Option("--payloads", min=0, max=10_000, help="How many are corrupt, delayed or dropped.")
    ] = 0,
    host: Annotated[
        int | None,
        typer.Option(
            "--host", min=0, max=1023, help="Of kill_host: which of the island's, from 0.", show_default="last"
        ),
    ] = None,
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let any fault of a plan strike now. What lasts ends by itself, or by `atoll chaos continue`."""
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
    """End before its time what chaos did to an island: SIGCONT, and its link is well again."""
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
    chaos_runs.register(app)
    root.add_typer(app, name="chaos", rich_help_panel="Islands")
