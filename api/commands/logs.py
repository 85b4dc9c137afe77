"""The command that shows the logs of a job's processes."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from api.commands.common import (
    HomeOption,
    JobArgument,
    JsonOption,
    UrlOption,
    connect,
    console,
    echo_lines,
    print_json,
    say,
    until_interrupted,
)
from api.installation.home import DEFAULT_HOME


def logs(
    job: JobArgument,
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="[ISLAND]", help="Or synchroniser, controller, evaluator. Without: which logs there are."
        ),
    ] = None,
    tail: Annotated[int, typer.Option("--tail", "-n", min=1, max=10_000, help="So many of the last lines.")] = 200,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more until the job has ended.")] = False,
    incarnation: Annotated[
        int | None,
        typer.Option("--incarnation", min=1, max=10**9, help="Which life of the island. Default: the newest."),
    ] = None,
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what an island said: its log, prints and tracebacks, to its last line however it ended."""
    with connect(home, url) as client:
        if source is not None:
            with until_interrupted():
                for text in client.log(job, source, incarnation=incarnation, tail=tail, follow=follow):
                    echo_log(text)
            return
        logs = client.logs(job)
    if as_json:
        print_json(logs)
        return
    if not logs:
        say("there is no log here: nothing of the job has begun, or its nodes keep their logs on other disks")
        return
    from api.terminal.listing import Listing

    table = Listing("log of", "incarnation", "bytes", "last line")
    for log in logs:
        written = time.strftime("%m-%d %H:%M:%S", time.localtime(log.written_at))
        table.add_row(log.source, str(log.incarnation), f"{log.bytes:,}", written)
    console().print(table)


def echo_log(text: str) -> None:
    """On a terminal as it may be shown; to a file or a pipe as it was written, colours and all."""
    if sys.stdout.isatty():
        echo_lines(text, nl=False)
    else:
        sys.stdout.write(text)
        sys.stdout.flush()


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Jobs")(logs)
