"""Commands for a job's islands (list, kill, drain, place again, profile, scale) and for node groups."""

from __future__ import annotations

import secrets
import shlex
import shutil
import time
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
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
    draft_of,
    echo_json,
    print_json,
    say,
    until_interrupted,
)
from api.installation.home import DEFAULT_HOME
from orchestrator.errors import AtollError, Conflict, DataError, InfrastructureError, NotFound
from orchestrator.system.roots import name_parts

if TYPE_CHECKING:
    from api.client import Client
    from api.schemas import Command, Job, NodeGroupChange, Profile
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
        if single := len(group.cordoned_nodes):
            takes += f", but on {single} of its nodes"
        table.add_row(group.name, group.region, nodes, cpus, str(group.accelerators), takes, *builds)
    console().print(table)
    if cordoned := [one for group in groups for one in group.cordoned_nodes]:
        from api.terminal.watch import cordon_words

        nodes_table = Listing("cordoned node", "node group", "why", prose=("why",))
        for one in cordoned:
            nodes_table.add_row(one.node, one.node_group, cordon_words(one))
        console().print(nodes_table)


NodeOption = Annotated[
    str | None,
    typer.Option(
        "--node",
        metavar="NODE",
        help="Only this node of the group, by its machine's name (`atoll islands -o wide`).",
        show_default=False,
    ),
]


def cordon(
    group: GroupArgument,
    node: NodeOption = None,
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Place nothing new on a node group, or on one of its nodes. Islands that train there continue."""
    with connect(home, url) as client:
        _conclude(client.cordon(group, node), node, as_json)


def uncordon(
    group: GroupArgument,
    node: NodeOption = None,
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Place islands on a node group again, starting with those that wait for it, or on one of its nodes."""
    with connect(home, url) as client:
        _conclude(client.uncordon(group, node), node, as_json)


def _conclude(change: NodeGroupChange, node: str | None, as_json: bool) -> None:
    if as_json:
        print_json(change)
        return
    group = change.node_group
    if node is not None:
        cordoned = any(one.node == node for one in group.cordoned_nodes)
        say(f"{node} of {group.name} {'is cordoned: nothing new is placed there' if cordoned else 'accepts islands'}")
        return
    state = f"cordoned by {group.cordoned_by}: nothing new is placed there" if group.cordoned else "accepts islands"
    jobs = ", ".join(command.job for command in change.commands) or "none"
    say(f"{group.name} {'is ' if group.cordoned else ''}{state}; jobs informed: {jobs}")


DECISION_TIMEOUT_S = 20.0
PROFILE_POLL_S = 0.3
STEP_PATIENCE_S, SILENCE_S = 600.0, 60.0
TRACE_BYTES_MAX = 4 << 30
"""The files of a trace, unpacked: twice what an island keeps."""


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


def profile(
    job: JobArgument,
    island: IslandArgument,
    steps: Annotated[
        int, typer.Option("--steps", min=1, help="Inner steps to record. The service says how many may be.")
    ] = 5,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder to write.", show_default="JOB-ISLAND-profile")
    ] = None,
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Record a trace of an island's next inner steps while it trains, and fetch it.

    TensorBoard (with XProf) opens the folder, and Perfetto the file *.trace.json.gz in it. The island stands still while its
    profiler starts and writes; the command says for how long. Other islands train on. Ctrl-C cancels the recording.
    """
    name = secrets.token_hex(8)
    with connect(home, url) as client:
        job = client.job(job).job
        target = (out or Path(f"{job}-{island}-profile")).absolute()
        with until_interrupted(), draft_of(target, ".profile-") as (here, whole):
            with _cancelled_unless_complete(client, job, island, name):
                recorded = _recorded(client, client.record_profile(job, island, name, steps))
                client.download_trace(job, island, name, here / "trace.zip")
            files = _unpack(here / "trace.zip", whole)
    if as_json:
        print_json(recorded)
    taken = f"{recorded.steps_taken} step{'s' * (recorded.steps_taken != 1)}"
    few = "" if recorded.steps_taken == steps else f" (not {steps}: it stopped training, or two minutes were over)"
    say(
        f"wrote {target} with {taken}{few}, {recorded.seconds:.3g} s of {island}, which stood still "
        f"for {recorded.stalled_s:.2g} s"
    )
    board = f"with `tensorboard --logdir {shlex.quote(str(target))}`, or " if any(target.rglob("*.xplane.pb")) else ""
    say(f"open it {board}at ui.perfetto.dev: {', '.join(files)}")


@contextmanager
def _cancelled_unless_complete(client: Client, job: str, island: str, name: str) -> Iterator[None]:
    """Cancel the recording if the block does not get to its end: nobody else knows its name, and others wait for its end."""
    try:
        yield
    except BaseException as error:
        with suppress(AtollError):
            client.cancel_profile(job, island, name)
            if not isinstance(error, AtollError):
                say(f"cancelled the recording; {island} trains on")
        raise


def _recorded(client: Client, state: Profile) -> Profile:
    """Wait until the trace is complete. Raises Conflict if there is none, or the island takes no more steps.

    The island records on while the service restarts, so this raises its error only after ``SILENCE_S``.
    """
    moved_at = answered_at = time.monotonic()
    steps_taken = -1
    while state.byte_count is None and not state.problem:
        if state.steps_taken != steps_taken:
            moved_at, steps_taken = time.monotonic(), state.steps_taken
        if time.monotonic() - moved_at > STEP_PATIENCE_S:
            raise Conflict(
                detail=f"Island {state.island} has taken no step for {STEP_PATIENCE_S:.0f} s, after {steps_taken} of "
                f"{state.steps}.",
                remedy=f"`atoll islands {state.job}` says what it does; its log is `atoll logs {state.job} {state.island}`.",
            )
        time.sleep(PROFILE_POLL_S)
        try:
            state, answered_at = client.profile(state.job, state.island, state.profile), time.monotonic()
        except NotFound as error:  # the process that recorded it has ended
            raise Conflict(detail=error.detail, remedy=error.remedy) from error
        except InfrastructureError:
            if time.monotonic() - answered_at > SILENCE_S:
                raise
    if state.problem:
        raise Conflict(detail=f"There is no trace of island {state.island}: {state.problem}")
    return state


def _unpack(packed: Path, target: Path) -> list[str]:
    """Unpack the zip into the new folder ``target``, and return the names of what Perfetto opens. Raises DataError."""
    try:
        with zipfile.ZipFile(packed) as archive:
            members = archive.infolist()
            if sum(member.file_size for member in members) > TRACE_BYTES_MAX:
                raise DataError(detail=f"The trace has more than {TRACE_BYTES_MAX:,} bytes.")
            for member in members:
                path = target.joinpath(*name_parts(member.filename))
                path.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as source, path.open("xb") as copy:
                    shutil.copyfileobj(source, copy)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DataError(detail=f"The trace is damaged, record another: {error}") from error
    return sorted(str(path.relative_to(target)) for path in target.rglob("*.trace.json.gz"))


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
    for command in (islands, kill, drain, readd, profile, scale, node_groups, cordon, uncordon):
        app.command(rich_help_panel="Islands")(command)
