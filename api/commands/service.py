"""Commands for the installation: up, down, demo."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from api.commands.common import (
    HomeOption,
    PackagesOption,
    RetentionBytesOption,
    RetentionDaysOption,
    RetentionFailedDaysOption,
    RunsOption,
    console,
    say,
)
from api.installation.binding import Binding, refuse_password_in_view
from api.installation.home import DATABASE_VARIABLE, DEFAULT_HOME, DEFAULT_RUNS, Home
from api.installation.up import GROUPS, RAY_CONTROL, Installation
from api.installation.up import down as take_down
from api.installation.up import up as bring_up
from api.schemas import Retention
from orchestrator.system.ports import LOOPBACK

DEMO_HOME = DEFAULT_HOME / "demo"
OWNER_ALONE = 0o077
"""The umask: only the owner can read what these commands write into home and runs."""


def up(
    context: typer.Context,
    home: HomeOption = DEFAULT_HOME,
    runs: RunsOption = DEFAULT_RUNS,
    groups: Annotated[
        Path, typer.Option("--groups", help="File of node groups.", show_default="deploy/configs/groups.yaml")
    ] = GROUPS,
    port: Annotated[
        int | None,
        typer.Option("--port", min=1, max=65535, help="Port to listen on. Default: 8470, or the next free one."),
    ] = None,
    control: Annotated[
        str, typer.Option("--control", metavar="MODULE:FACTORY", help="What runs the jobs. Default: Ray.")
    ] = RAY_CONTROL,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; beyond loopback only with a certificate.")
    ] = LOOPBACK,
    certificate: Annotated[
        Path | None, typer.Option("--certificate", help="Serve HTTPS with this certificate (PEM).")
    ] = None,
    key: Annotated[Path | None, typer.Option("--key", help="The certificate's key (PEM).")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Allow --host without a certificate.")] = False,
    allow: Annotated[
        list[str] | None,
        typer.Option("--allow", metavar="PACKAGE", help="Allow jobs to name code of this package. Repeatable."),
    ] = None,
    packages: PackagesOption = None,
    checkpoints: Annotated[
        list[str] | None,
        typer.Option(
            "--checkpoints",
            metavar="ROOT",
            help="Allow jobs to read and write checkpoints below this folder or URL (s3://BUCKET/PREFIX). Repeatable. "
            "Default: the working folder, without hidden files. HOME/checkpoints and RUNS are always allowed, the rest of "
            "HOME never.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="ROOT",
            help="Allow jobs to read text files below this folder. Repeatable. Default: the working folder, without "
            "hidden files. HOME/data is always allowed, the rest of HOME never.",
            show_default=False,
        ),
    ] = None,
    jobs_max: Annotated[
        int | None,
        typer.Option(
            "--jobs-max", min=1, max=10_000, help="Most jobs that run at a time; others are queued. Default: 16."
        ),
    ] = None,
    restart_silent_after: Annotated[
        float | None,
        typer.Option(
            "--restart-silent-after",
            min=0,
            max=100_000,
            metavar="MINUTES",
            help="Restart the synchroniser of a job that has not answered for this long; 0: never. Default: 5.",
        ),
    ] = None,
    retention_days: RetentionDaysOption = None,
    retention_failed_days: RetentionFailedDaysOption = None,
    retention_bytes: RetentionBytesOption = None,
    partition_tolerance: Annotated[
        float | None,
        typer.Option(
            "--partition-tolerance",
            min=3,
            max=1e6,
            metavar="SECONDS",
            help="How long islands survive while their region is cut off. Default: 600. Set when the cluster starts.",
        ),
    ] = None,
    database: Annotated[
        str | None,
        typer.Option(
            "--database",
            envvar=DATABASE_VARIABLE,
            help="Database, as SQLAlchemy URL.",
            show_default="SQLite in the home",
        ),
    ] = None,
    new_store: Annotated[
        bool, typer.Option("--new-store", help="Start with an empty database if the home's is lost or damaged.")
    ] = False,
    pass_environment: Annotated[
        list[str] | None,
        typer.Option(
            "--pass-environment",
            metavar="NAME",
            help="Pass this variable to service and islands, such as a store's credentials. Repeatable.",
        ),
    ] = None,
) -> None:
    """Start the service and an embedded cluster if they are not running yet. HOME/token then holds an admin token."""
    os.umask(OWNER_ALONE)
    source = context.get_parameter_source("database")
    if source is not None and source.name == "COMMANDLINE":
        refuse_password_in_view(database)
    binding = Binding(host, certificate, key, insecure)
    wanted = Installation(
        Home(home),
        runs,
        groups,
        port,
        control,
        binding,
        tuple(allow or ()),
        tuple(packages or ()),
        database,
        tuple(checkpoints or ()),
        tuple(data or ()),
        jobs_max,
        new_store,
        partition_tolerance,
        Retention(retention_days, retention_failed_days, retention_bytes),
        tuple(pass_environment or ()),
        restart_silent_after,
    )
    wanted.retention.refuse_senseless()
    bring_up(wanted, say)


def down(home: HomeOption = DEFAULT_HOME) -> None:
    """Stop the service and its embedded cluster, and with it every running job."""
    os.umask(OWNER_ALONE)
    take_down(Home(home), say)


def demo(
    home: HomeOption = DEMO_HOME,
    runs: RunsOption = DEFAULT_RUNS,
    file: Annotated[
        Path | None, typer.Option("--spec", help="Another job specification.", show_default="deploy/configs/demo.yaml")
    ] = None,
    groups: Annotated[
        Path, typer.Option("--groups", help="File of node groups.", show_default="deploy/configs/groups.yaml")
    ] = GROUPS,
    island: Annotated[str, typer.Option("--kill", help="The island to kill after a third of the tokens.")] = "asia",
) -> None:
    """Run a demonstration: start, train on four islands, kill one, watch it come back, report, and stop everything."""
    from api.installation.demo import run_demo

    os.umask(OWNER_ALONE)
    raise typer.Exit(run_demo(Installation(Home(home), runs, groups), file, island, console(), say))


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Service")(up)
    app.command(rich_help_panel="Service")(down)
    app.command(rich_help_panel="Service")(demo)
