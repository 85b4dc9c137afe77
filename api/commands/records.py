"""Commands about what happened in a job: its events as they come, its merges, and why one came out as it did.

The command that shows the logs of a job's processes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from api.commands.common import (
    INTERRUPTED,
    NUMBER_MAX,
    HomeOption,
    JobArgument,
    JsonOption,
    UrlOption,
    connect,
    console,
    echo,
    echo_json,
    echo_lines,
    print_json,
    say,
    until_interrupted,
)
from api.installation.home import DEFAULT_HOME
from orchestrator.errors import ConfigurationError, ServiceUnreachable

if TYPE_CHECKING:
    from api.client import Client
    from api.schemas import TapeRecord


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


PATIENCE_S = 60.0
"""The time that the service may be away before following it gives up."""


def events(
    job: JobArgument = "latest",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more until the job has ended.")] = False,
    after: Annotated[
        int, typer.Option("--after", min=0, max=NUMBER_MAX, help="Begin after the record of this number.")
    ] = 0,
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tell what happened in a job, a line for each record of its tape. Ctrl-C says how to go on from there."""
    from api.terminal.record_text import tell

    with connect(home, url) as client:
        job = client.job(job).job  # `latest` may mean another one by the time it is said again
        try:
            for record in (
                follow_events(client, job, after) if follow else client.events(job, after=after, follow=False)
            ):
                echo_json(record.model_dump_json()) if as_json else echo(tell(record))
                after = record.n
        except KeyboardInterrupt:
            say(f"the job goes on; come back with `atoll events {job} --follow --after {after}`")
            raise typer.Exit(INTERRUPTED) from None


def follow_events(client: Client, job: str, after: int) -> Iterator[TapeRecord]:
    """The job's records until it has ended, also across a restart of the service."""
    answered_at = time.monotonic()
    while True:
        try:
            for record in client.events(job, after=after):
                after, answered_at = record.n, time.monotonic()
                yield record
            return
        except ServiceUnreachable:
            if time.monotonic() - answered_at > PATIENCE_S:
                raise
            time.sleep(0.5)


def merges(
    job: JobArgument = "latest",
    fragment: Annotated[
        int | None, typer.Option("--fragment", min=0, max=NUMBER_MAX, help="Only those of this fragment.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="How many.")] = 20,
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """List a job's merges, newest first, and why each closed when it did."""
    with connect(home, url) as client:
        merges = client.merges(job, fragment=fragment, limit=limit).merges
    if as_json:
        print_json(merges)
        return
    from api.merges.view import merge_table

    console().print(merge_table(merges))


def explain(
    job: JobArgument,
    merge: Annotated[str, typer.Argument(metavar="FRAGMENT:VERSION", help="A merge, as `atoll merges` lists it.")],
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tell why a merge came out as it did: who was in, how long it waited, why it closed, who was refused and why."""
    fragment, colon, version = merge.partition(":")
    if not (colon and fragment.isdecimal() and version.isdecimal()):
        raise ConfigurationError(detail=f"{merge!r} names no merge. Write FRAGMENT:VERSION, such as 0:12.")
    with connect(home, url) as client:
        explanation = client.merge(job, int(fragment), int(version))
    if as_json:
        print_json(explanation)
        return
    from api.merges.view import explained

    console().print(explained(explanation))


def register(app: typer.Typer) -> None:
    for command in (logs, events, merges, explain):
        app.command(rich_help_panel="Jobs")(command)
