"""The options, the connection to the service, and the printing that all commands share.

Light on purpose: the client and rich are imported when a command runs, not when the command line is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from api.commands import completion, streams
from api.installation.home import DEFAULT_HOME, DEFAULT_RUNS
from orchestrator import printable

if TYPE_CHECKING:
    from api.client import Client
    from api.terminal.screen import Screen

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
    typer.Argument(metavar="JOB", help="A job's id, or `latest`.", show_default=False, autocompletion=completion.jobs),
]
IslandArgument = Annotated[
    str,
    typer.Argument(
        metavar="ISLAND", help="An island of the job.", show_default=False, autocompletion=completion.islands
    ),
]
GroupArgument = Annotated[
    str, typer.Argument(metavar="GROUP", help="The node group.", autocompletion=completion.node_groups)
]


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
