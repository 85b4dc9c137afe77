"""The command `atoll doctor`, which checks this machine. Exit code 1 if something is wrong, 0 with warnings only."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from api.commands.common import HomeOption, JsonOption, RunsOption, console, is_on_command_line, print_json
from api.installation.home import DEFAULT_HOME, DEFAULT_RUNS, Home
from api.installation.up import GROUPS
from orchestrator.errors import ConfigurationError

STYLES = {"ok": "green", "warning": "yellow", "wrong": "bold red"}


def doctor(
    context: typer.Context,
    home: HomeOption = DEFAULT_HOME,
    runs: RunsOption = DEFAULT_RUNS,
    groups: Annotated[
        Path, typer.Option("--groups", help="File of node groups.", show_default="deploy/configs/groups.yaml")
    ] = GROUPS,
    url: Annotated[
        str | None,
        typer.Option("--url", help="Service to compare clocks with. Default: the home's.", show_default=False),
    ] = None,
    lines: Annotated[
        bool, typer.Option("--lines", help="Measure the lines between node groups instead, and advise on settings.")
    ] = False,
    job: Annotated[
        str | None, typer.Option("--job", help="With --lines: advise for this job, or `latest`.", show_default=False)
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="With --lines: advise for this specification.", show_default=False)
    ] = None,
    parameters: Annotated[
        float | None,
        typer.Option("--parameters", min=1, max=1e15, help="With --lines: the model's size.", show_default=False),
    ] = None,
    step_s: Annotated[
        float | None,
        typer.Option(
            "--step-s", min=1e-6, max=1e6, help="With --lines: the duration of an inner step.", show_default=False
        ),
    ] = None,
    ports: Annotated[
        tuple[int, int] | None,
        typer.Option(
            "--ports",
            min=0,
            max=65535,
            help="With --lines: first and last port to measure with. Default: transport.ports of --config.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check this machine: Python, Ray, JAX, ports, disk, clocks, home, memory, cores, leftover processes. Print remedies.

    With --lines: measure the lines between the node groups of the running cluster, with a few MB each way, and say which of
    H, τ, P and codec to change so that every fragment arrives in time. If nothing gets through, say which address and port
    could not be reached from which node.
    """
    if ports is not None and ports[0] > ports[1]:
        raise ConfigurationError(
            detail=f"--ports {ports[0]} {ports[1]} ends before it begins. Give the lower port first."
        )
    if lines or any(option is not None for option in (job, config, parameters, step_s, ports)):
        for name in ("groups", "runs"):
            if is_on_command_line(context, name):
                raise ConfigurationError(detail=f"--{name} has no effect on lines (--lines). Leave one of them out.")
        from api.commands.doctor_lines import Subject, examine_lines

        subject = Subject(job, config, parameters, step_s, ports)
        raise typer.Exit(examine_lines(Home(home), url, subject, as_json=as_json))
    from api.installation.doctor import State, examine

    findings = examine(Home(home), runs, groups, url)
    if as_json:
        print_json([{"check": f.check, "state": f.state, "found": f.detail, "remedy": f.remedy} for f in findings])
    else:
        from rich.text import Text

        from api.terminal.listing import Listing

        table = Listing("", "check", "found", prose=("found",), show_header=False)
        for finding in findings:
            table.add_row(Text(finding.state, style=STYLES[finding.state]), finding.check, Text(finding.detail))
            if finding.remedy:
                table.add_row("", "", Text(f"→ {finding.remedy}", style="cyan"))
        console().print(table)
    if any(finding.state is State.WRONG for finding in findings):
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Service")(doctor)
