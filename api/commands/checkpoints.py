"""Commands for a job's checkpoints: list them, fetch one, take one now, go back to one."""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from api.commands.common import (
    NUMBER_MAX,
    HomeOption,
    JobArgument,
    JsonOption,
    UrlOption,
    connect,
    console,
    print_json,
    say,
)
from api.commands.islands import conclude
from api.installation.home import DEFAULT_HOME
from orchestrator.errors import ConfigurationError, NotFound


def checkpoints(
    job: JobArgument = "latest", home: HomeOption = DEFAULT_HOME, url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """List a job's checkpoints, oldest first. `atoll submit FILE --resume JOB` resumes from the newest."""
    with connect(home, url) as client:
        checkpoints = client.checkpoints(job)
    if as_json:
        print_json(checkpoints)
        return
    if not checkpoints:
        say(
            "there are no checkpoints; take one with `atoll checkpoint JOB`, or regularly with `checkpoints.every_merges`"
        )
        return
    from api.terminal.listing import Listing

    table = Listing("checkpoint", "taken", "version", "tokens", "islands", "MB", "folder")
    for one in checkpoints:
        taken = time.strftime("%m-%d %H:%M:%S", time.localtime(one.taken_at))
        islands = f"{len(one.islands)}"
        size = f"{one.bytes / 1e6:,.1f}"
        cells = (str(one.number), taken, str(one.global_version), f"{one.tokens_trained:,}", islands, size, one.url)
        table.add_row(*cells)
    console().print(table)


def fetch(
    job: JobArgument = "latest",
    number: Annotated[
        int | None,
        typer.Option("--checkpoint", min=1, max=NUMBER_MAX, help="Number of the checkpoint. Default: the newest."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder to write.", show_default="JOB-checkpoint-NUMBER")
    ] = None,
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
) -> None:
    """Download a checkpoint and verify every byte. `atoll submit --resume` accepts the folder."""
    from api.checkpoints.archive import unpack

    with connect(home, url) as client:
        name, checkpoints = client.job(job).job, client.checkpoints(job)
        if number is None and not checkpoints:
            raise NotFound(detail=f"{name} has no checkpoints.", remedy="Take one with `atoll checkpoint JOB`.")
        number = number or checkpoints[-1].number
        target = (out or Path(f"{name}-checkpoint-{number}")).absolute()
        if target.exists():
            raise ConfigurationError(detail=f"{target} already exists. Remove it, or give another --out.")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(prefix=".fetch-", dir=target.parent) as here:
                client.download_checkpoint(name, number, Path(here) / "packed.tar")
                unpack(Path(here) / "packed.tar", Path(here) / "whole")
                (Path(here) / "whole").rename(target)
        except OSError as error:
            raise ConfigurationError(detail=f"{target} cannot be written: {error}") from error
    say(f"wrote {target}; if the service and all nodes reach it, resume with `atoll submit FILE --resume {target}`")


def checkpoint(
    job: JobArgument = "latest", home: HomeOption = DEFAULT_HOME, url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """Make a running job take a checkpoint now. Training continues."""
    with connect(home, url) as client:
        conclude(client, client.take_checkpoint(job), as_json)


def rollback(
    job: JobArgument,
    to: Annotated[
        int | None, typer.Option("--to", min=1, max=NUMBER_MAX, help="Number of the checkpoint. Default: the newest.")
    ] = None,
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take a running job back to a checkpoint. Merges since then are undone, and training continues from there."""
    with connect(home, url) as client:
        conclude(client, client.roll_back(job, to), as_json)


def register(app: typer.Typer) -> None:
    app.command()(checkpoints)
    app.command()(fetch)
    app.command()(checkpoint)
    app.command()(rollback)
