"""The options, the connection to the service, and the printing that all commands share.

Light on purpose: the client and rich are imported when a command runs, not when the command line is read.

Shell completion: names that the service knows, asked for while somebody types.

Responsible for being quick and silent: whatever goes wrong, nothing is completed. The client is imported when a shell asks,
not when a command runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from api.commands import streams
from api.installation.home import DEFAULT_HOME, DEFAULT_RUNS
from orchestrator.errors import AtollError
from orchestrator.system import printable

if TYPE_CHECKING:
    from api.client import Client
    from api.terminal.screen import Screen


PATIENCE_S = 2.0


def jobs(ctx: typer.Context, incomplete: str) -> list[str]:
    return _beginning(incomplete, ["latest", *_ask(ctx, lambda client: (job.job for job in client.jobs()))])


def islands(ctx: typer.Context, incomplete: str) -> list[str]:
    """Those of the job that was typed before."""
    job = ctx.params.get("job") or "latest"
    return _beginning(incomplete, _ask(ctx, lambda client: (island.island for island in client.islands(job))))


def node_groups(ctx: typer.Context, incomplete: str) -> list[str]:
    return _beginning(incomplete, _ask(ctx, lambda client: (group.name for group in client.node_groups())))


def plans(incomplete: str) -> list[str]:
    """The shipped plans; the shell itself knows files."""
    from api.installation.home import PLANS

    return _beginning(incomplete, sorted(path.stem for path in PLANS.glob("*.yaml")))


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete) and name.isprintable()]


def _ask(ctx: typer.Context, question: Callable[[Client], Iterable[str]]) -> list[str]:
    from api.client import Client

    home, url = ctx.params.get("home") or DEFAULT_HOME, ctx.params.get("url")
    try:
        with Client.at(home, url, timeout_s=PATIENCE_S) as client:
            return list(question(client))
    except AtollError:
        return []


HomeOption = Annotated[Path, typer.Option("--home", help="The installation's folder.", show_default=str(DEFAULT_HOME))]
RunsOption = Annotated[Path, typer.Option("--runs", help="Where jobs write.", show_default=str(DEFAULT_RUNS))]
UrlOption = Annotated[
    str | None, typer.Option("--url", help="The service's address. Default: HOME/service.json.", show_default=False)
]
PackagesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--packages",
        metavar="FOLDER",
        help="Packages that jobs may name are found in this folder as well, after all that is installed. Repeatable.",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print what the API answered, as JSON.")]
INTERRUPTED = 130
SEED_MAX = 2**31 - 1
"""As specifications have it."""
NUMBER_MAX = 2**53
"""Of records and what else is counted: whole in JSON."""
OutputOption = Annotated[
    Literal["wide", "json"] | None,
    typer.Option("-o", "--output", help="More columns; or the same as --json.", show_default=False),
]
WatchOption = Annotated[
    bool, typer.Option("-w", "--watch", help="Stay and show what changes, until Ctrl-C; with --json a line for each.")
]
JobArgument = Annotated[
    str,
    typer.Argument(metavar="JOB", help="A job's id, or `latest`.", show_default=False, autocompletion=jobs),
]
IslandArgument = Annotated[
    str,
    typer.Argument(metavar="ISLAND", help="An island of the job.", show_default=False, autocompletion=islands),
]
GroupArgument = Annotated[str, typer.Argument(metavar="GROUP", help="The node group.", autocompletion=node_groups)]


def connect(home: Path, url: str | None) -> Client:
    """A client of the service at ``url``, or else of the one that runs in ``home``. Its token: see ``Client.at``."""
    from api.client import Client

    return Client.at(home, url)


def console(*, stderr: bool = False) -> Screen:
    from api.terminal.screen import Screen

    return Screen(stderr=stderr)


def console_for(output: str | None) -> Screen:
    """A console whose tables give prose more room than the terminal has, if ``output`` is ``wide``."""
    from api.terminal.screen import Screen

    return Screen(wide=output == "wide")


@contextmanager
def until_interrupted() -> Iterator[None]:
    """Ctrl-C is how this ends, and no news. Exit code 130."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def say(message: str) -> None:
    """Progress, for people: on stderr, so that what is printed on stdout stays clean.

    Where nobody can read it, as on a terminal that was closed, the command goes on without.
    """
    try:
        echo_lines(message, err=True)
    except OSError:
        streams.drop(2)


def echo(text: str = "") -> None:
    """One line on stdout, whatever is in it. Nothing of these commands is printed but here and on ``console``."""
    typer.echo(printable.line(text))


def echo_lines(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Text of several lines."""
    typer.echo(printable.lines(text), err=err, nl=nl)


def echo_json(text: str) -> None:
    """JSON, as its writer made it."""
    typer.echo(printable.json_text(text))


def print_json(value: Any) -> None:
    """Print the API's answer as indented JSON."""
    from pydantic import BaseModel

    def plain(item: Any) -> Any:
        return item.model_dump(mode="json") if isinstance(item, BaseModel) else item

    plain_value = [plain(item) for item in value] if isinstance(value, list) else plain(value)
    echo_json(json.dumps(plain_value, indent=2))
