"""Commands for a job's islands (list, kill, drain, place again, scale) and for node groups (list, cordon, uncordon)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from api.commands.common import (
    GroupArgument,
    HomeOption,
    IslandArgument,
    JobArgument,
    JsonOption,
    OutputOption,
    UrlOption,
    WatchOption,
    connect,
    console,
    console_for,
    echo_json,
    print_json,
    say,
    until_interrupted,
)
from api.installation.home import DEFAULT_HOME

if TYPE_CHECKING:
    from api.client import Client
    from api.schemas import Command, Job, NodeGroupChange
    from api.terminal.listing import Listing


def node_groups(home: HomeOption = DEFAULT_HOME, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """List the fleet's node groups."""
    with connect(home, url) as client:
        groups = client.node_groups()
    if as_json:
        print_json(groups)
        return
    from api.terminal.listing import Listing

    mixed = len({build for group in groups for build in group.builds}) > 1
    table = Listing(
        "node group", "region", "nodes", "CPUs free", "accelerators", "accepts islands", *["builds"] * mixed
    )
    for group in groups:
        takes = f"no: cordoned by {group.cordoned_by}" if group.cordoned else "yes"
        cpus = f"{group.cpus_free:g} of {group.cpus:g}"
        builds = [", ".join(group.builds)] * mixed
        nodes = f"{group.nodes} ({group.nodes_down} down)" if group.nodes_down else str(group.nodes)
        table.add_row(group.name, group.region, nodes, cpus, str(group.accelerators), takes, *builds)
    console().print(table)


def cordon(
    group: GroupArgument, home: HomeOption = DEFAULT_HOME, url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """Place nothing new on a node group. Islands that train there continue."""
    with connect(home, url) as client:
        _conclude(client.cordon(group), as_json)


def uncordon(
    group: GroupArgument, home: HomeOption = DEFAULT_HOME, url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """Place islands on a node group again, starting with those that wait for it."""
    with connect(home, url) as client:
        _conclude(client.uncordon(group), as_json)


def _conclude(change: NodeGroupChange, as_json: bool) -> None:
    if as_json:
        print_json(change)
        return
    group = change.node_group
    state = f"cordoned by {group.cordoned_by}: nothing new is placed there" if group.cordoned else "accepts islands"
    jobs = ", ".join(command.job for command in change.commands) or "none"
    say(f"{group.name} {'is ' if group.cordoned else ''}{state}; jobs informed: {jobs}")


DECISION_TIMEOUT_S = 20.0


def islands(
    job: JobArgument = "latest",
    output: OutputOption = None,
    watch: WatchOption = False,
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """List a job's islands. With --watch, until the job ends."""
    with connect(home, url) as client:
        if watch:
            _watch(client, job, output, as_json)
        elif as_json or output == "json":
            print_json(client.islands(job))
        else:
            console_for(output).print(_table(client.job(job), output))


def _watch(client: Client, job: str, output: str | None, as_json: bool) -> None:
    from api.terminal.listing import Poller, emit, show
    from api.terminal.watch import asking

    poller = Poller(asking(client, job))
    with until_interrupted():
        if as_json or output == "json":
            emit(poller, lambda job: job.islands, echo_json, lambda job: job.state.final)
        else:
            show(poller, lambda job: _table(job, output), console_for(output), lambda job: job.state.final)


def _table(job: Job, output: str | None) -> Listing:
    from api.terminal.watch import island_table, wide_island_table

    return wide_island_table(job) if output == "wide" else island_table(job)


def kill(
    job: JobArgument,
    island: IslandArgument,
    stay_down: Annotated[bool, typer.Option("--stay-down", help="Do not place it again until `atoll readd`.")] = False,
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Kill an island's process with SIGKILL. The island is placed again automatically."""
    with connect(home, url) as client:
        conclude(client, client.kill(job, island, restart=not stay_down), as_json)


def drain(
    job: JobArgument,
    island: IslandArgument,
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take an island out of the job without losing its work. It stays away until `atoll readd`."""
    with connect(home, url) as client:
        conclude(client, client.drain(job, island), as_json)


def readd(
    job: JobArgument,
    island: IslandArgument,
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Place an island again now. It catches up before it contributes."""
    with connect(home, url) as client:
        conclude(client, client.readd(job, island), as_json)


def scale(
    job: JobArgument,
    node_group: GroupArgument,
    count: Annotated[int, typer.Argument(min=0, max=10_000, help="Number of islands of the job on that node group.")],
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change the number of islands on a node group. Islands that leave are drained, the last first."""
    with connect(home, url) as client:
        conclude(client, client.scale(job, node_group, count), as_json)


def conclude(client: Client, command: Command, as_json: bool) -> None:
    """Wait until the job has decided on a command, and print the outcome. Exit code 1 if it was refused."""
    decided = decision(client, command)
    if as_json:
        print_json(decided)
    else:
        island = f" {decided.island}" if decided.island else ""
        say(
            f"{decided.kind}{island} of {decided.job}: {decided.state}{f'; {decided.detail}' if decided.detail else ''}"
        )
    if decided.state != "accepted":
        raise typer.Exit(1)


def decision(client: Client, command: Command) -> Command:
    """Return the command once the job has decided on it, or undecided if that takes too long."""
    deadline = time.monotonic() + DECISION_TIMEOUT_S
    while command.state in ("pending", "undelivered") and time.monotonic() < deadline:
        time.sleep(0.1)
        command = client.command(command.job, command.command)
    return command


def register(app: typer.Typer) -> None:
    for command in (islands, kill, drain, readd, scale, node_groups, cordon, uncordon):
        app.command(rich_help_panel="Islands")(command)
