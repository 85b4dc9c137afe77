"""Commands for what happened in a job: its logs, events, merges with their explanations, diagnosis, advice and cost.

`atoll track` sends the same to experiment trackers.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
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
from orchestrator.errors import ConfigurationError, InfrastructureError, NotFound, ServiceUnreachable

if TYPE_CHECKING:
    from api.client import Client
    from api.schemas import TapeRecord


def logs(
    job: JobArgument,
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="[ISLAND]", help="An island, or synchroniser, controller, evaluator. Without it, list the logs."
        ),
    ] = None,
    tail: Annotated[int, typer.Option("--tail", "-n", min=1, max=10_000, help="Number of last lines to show.")] = 200,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more until the job has ended.")] = False,
    incarnation: Annotated[
        int | None,
        typer.Option("--incarnation", min=1, max=10**9, help="Incarnation of the island. Default: the newest."),
    ] = None,
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the log of an island or another process of a job: log lines, prints and tracebacks."""
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
        say("there are no logs here: the job has not started, or its nodes keep their logs on other disks")
        return
    from api.terminal.listing import Listing

    table = Listing("log of", "incarnation", "bytes", "last line")
    for log in logs:
        written = time.strftime("%m-%d %H:%M:%S", time.localtime(log.written_at))
        table.add_row(log.source, str(log.incarnation), f"{log.bytes:,}", written)
    console().print(table)


def echo_log(text: str) -> None:
    """Print log text: without control characters on a terminal, unchanged to a file or pipe."""
    if sys.stdout.isatty():
        echo_lines(text, nl=False)
    else:
        sys.stdout.write(text)
        sys.stdout.flush()


PATIENCE_S = 60.0
"""How long the service may be away before following fails."""


def events(
    job: JobArgument = "latest",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more until the job has ended.")] = False,
    after: Annotated[
        int, typer.Option("--after", min=0, max=NUMBER_MAX, help="Start after the record with this number.")
    ] = 0,
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what happened in a job, a line for each record of its tape. Ctrl-C prints the command that continues."""
    from api.terminal.record_text import tell

    with connect(home, url) as client:
        job = client.job(job).job  # `latest` may become another job meanwhile
        try:
            for record in (
                follow_events(client, job, after) if follow else client.events(job, after=after, follow=False)
            ):
                echo_json(record.model_dump_json()) if as_json else echo(tell(record))
                after = record.n
        except KeyboardInterrupt:
            say(f"the job keeps running; continue with `atoll events {job} --follow --after {after}`")
            raise typer.Exit(INTERRUPTED) from None


def follow_events(client: Client, job: str, after: int) -> Iterator[TapeRecord]:
    """Yield the job's records until it has ended, even if the service restarts meanwhile."""
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
        int | None, typer.Option("--fragment", min=0, max=NUMBER_MAX, help="Only merges of this fragment.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="Show at most this many.")] = 20,
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
    from api.terminal.record_text import merge_table

    console().print(merge_table(merges))


def explain(
    job: JobArgument,
    merge: Annotated[str, typer.Argument(metavar="FRAGMENT:VERSION", help="A merge, as `atoll merges` lists it.")],
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Explain a merge: its contributors, how long it waited and why it closed, and which contributions were refused."""
    fragment, colon, version = merge.partition(":")
    if not (colon and fragment.isdecimal() and version.isdecimal()):
        raise ConfigurationError(detail=f"{merge!r} does not name a merge. Write FRAGMENT:VERSION, such as 0:12.")
    with connect(home, url) as client:
        explanation = client.merge(job, int(fragment), int(version))
    if as_json:
        print_json(explanation)
        return
    from api.terminal.record_text import explained

    console().print(explained(explanation))


def diagnose(
    job: JobArgument = "latest", home: HomeOption = DEFAULT_HOME, url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """Name the one cause of a job's slowness or death, with the tape's records that show it, and how islands compare."""
    with connect(home, url) as client:
        diagnosis = client.diagnosis(job)
    if as_json:
        print_json(diagnosis)
        return
    from api.terminal.record_text import diagnosed

    console().print(diagnosed(diagnosis))


def advise(
    job: JobArgument = "latest", home: HomeOption = DEFAULT_HOME, url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """Show what the job's autopilot advises on H, quorum, grace and standbys, with the reason and the simulated effect."""
    with connect(home, url) as client:
        advice = client.advice(job)
        state = client.job(advice.job).state
    if as_json:
        print_json(advice)
        return
    from api.terminal.record_text import advised

    console().print(advised(advice, state))


def cost(
    job: JobArgument = "latest", home: HomeOption = DEFAULT_HOME, url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """Show what a job has cost, what a million merged tokens cost, what badput cost, and a forecast to its budget.

    The service needs the prices of node groups: `--prices FILE` of `atoll up` and `atoll serve`.
    """
    with connect(home, url) as client:
        details = client.job(job)
    figures = details.goodput.get("cost")
    if figures is None:
        raise NotFound(
            detail=f"Job {details.job} has no cost: none of its node groups had a price when it was submitted.",
            remedy="Start the service with --prices FILE, or give islands[].price, and submit it again.",
        )
    if as_json:
        echo_json(json.dumps({"job": details.job, "state": details.state.value, **figures}))
        return
    from api.terminal.watch import cost_lines

    for line in (f"{details.job} ({details.state.value})", *cost_lines(figures)):
        echo(line)


TRACK_EVERY_S = 2.0


def track(
    jobs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[JOB]...", help="Jobs to follow until they have ended. Without one: all, until Ctrl-C."
        ),
    ] = None,
    trackers: Annotated[
        Path | None, typer.Option("--trackers", metavar="FILE", help="The trackers, YAML or JSON.", show_default=False)
    ] = None,
    tensorboard: Annotated[
        Path | None,
        typer.Option("--tensorboard", metavar="FOLDER", help="Write TensorBoard's event files.", show_default=False),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Send what there is, and do not wait for more.")] = False,
    state: Annotated[
        Path | None,
        typer.Option("--state", metavar="FOLDER", help="Where to note what was sent. Default: HOME/trackers."),
    ] = None,
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
) -> None:
    """Send jobs to experiment trackers, traces and webhooks: TensorBoard, MLflow, W&B, OpenTelemetry, Slack.

    A tracker gets everything once and in order, also if this command is killed and started again, or if the tracker was
    down. Jobs do not notice.
    """
    from api.tracker_feed import TensorBoard, follow_all, followers_of, read_trackers

    if (trackers is None) == (tensorboard is None):
        raise ConfigurationError(
            detail="Nothing says where to send jobs. Give --trackers FILE or --tensorboard FOLDER."
        )
    if trackers is not None:
        wanted = read_trackers(trackers)
    else:
        assert tensorboard is not None
        wanted = (TensorBoard(kind="tensorboard", folder=tensorboard),)
    with connect(home, url) as client:
        names = [client.job(job).job for job in jobs] if jobs else None
    folder = state if state is not None else Path(home) / "trackers"
    followers = followers_of(wanted, lambda: connect(home, url), folder, say, names)
    with until_interrupted():
        problems = follow_all(followers, TRACK_EVERY_S, once=once)
    if problems:
        raise InfrastructureError(detail="\n".join(problems))


def register(app: typer.Typer) -> None:
    for command in (logs, events, merges, explain, diagnose, advise, cost, track):
        app.command(rich_help_panel="Jobs")(command)
