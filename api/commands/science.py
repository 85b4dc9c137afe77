"""`atoll compare`: trains a job's method and its baselines in one process. Needs no service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from api.commands.common import JsonOption, PackagesOption
from api.commands.tapes import run_to_end
from orchestrator.system import python_process


def compare(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A comparison: a job, and the values to try.")],
    baselines: Annotated[
        list[str] | None,
        typer.Option(
            "--baseline",
            help="data-parallel, diloco or equal-speeds. Repeatable.",
            show_default="data-parallel",
        ),
    ] = None,
    packages: PackagesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train a job's method and its baselines on the same tokens, each at its best learning rate, and print a table."""
    # A process of its own: it imports JAX, which the command line must not.
    command = python_process.module("orchestrator.laboratory.compare", str(file))
    for baseline in baselines or ["data-parallel"]:
        command += ["--baseline", baseline]
    raise typer.Exit(run_to_end([*command, "--json"] if as_json else command, packages=packages or ()))


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Science")(compare)
