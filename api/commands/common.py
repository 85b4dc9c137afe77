"""What all commands share: options, completion of names in the shell, the connection to the service, and printing.

It also prepares standard output and error for any terminal, disk or pipe: for characters that an encoding lacks, an output
that takes no more, and a terminal that was closed.

Light on purpose: the client and rich are imported when a command runs, not when the command line is parsed. Completion asks
the service for names; if anything goes wrong it completes nothing, and prints nothing.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from api.installation.home import DEFAULT_HOME, DEFAULT_RUNS
from orchestrator.errors import AtollError, ConfigurationError, disk_remedy
from orchestrator.system import printable, signals, user_packages

if TYPE_CHECKING:
    from api.client import Client
    from api.terminal.listing import Screen


PATIENCE_S = 2.0


def jobs(ctx: typer.Context, incomplete: str) -> list[str]:
    return _beginning(incomplete, ["latest", *_ask(ctx, lambda client: (job.job for job in client.jobs()))])


def islands(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the islands of the job that was typed before."""
    job = ctx.params.get("job") or "latest"
    return _beginning(incomplete, _ask(ctx, lambda client: (island.island for island in client.islands(job))))


def node_groups(ctx: typer.Context, incomplete: str) -> list[str]:
    return _beginning(incomplete, _ask(ctx, lambda client: (group.name for group in client.node_groups())))


def plans(incomplete: str) -> list[str]:
    """Return the shipped plans. The shell itself completes files."""
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


HomeOption = Annotated[Path, typer.Option("--home", help="Folder of the installation.", show_default=str(DEFAULT_HOME))]
RunsOption = Annotated[Path, typer.Option("--runs", help="Folder that jobs write to.", show_default=str(DEFAULT_RUNS))]
UrlOption = Annotated[
    str | None, typer.Option("--url", help="URL of the service. Default: from HOME/service.json.", show_default=False)
]
PackagesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--packages",
        metavar="FOLDER",
        help="Also look in this folder for packages that jobs may name, after the installed ones. Repeatable.",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the API's answer as JSON.")]
CsvOption = Annotated[
    Path | None, typer.Option("--csv", metavar="FILE", help="Write a table as CSV.", show_default=False)
]
ParquetOption = Annotated[
    Path | None, typer.Option("--parquet", metavar="FILE", help="Write a table as Parquet.", show_default=False)
]
INTERRUPTED = 130
SEED_MAX = 2**31 - 1
"""The limit of seeds in specifications."""
NUMBER_MAX = 2**53
"""The limit of record numbers and counts: JSON's numbers are exact up to here."""
OutputOption = Annotated[
    Literal["wide", "json"] | None,
    typer.Option("-o", "--output", help="wide: more columns; json: same as --json.", show_default=False),
]
WatchOption = Annotated[
    bool, typer.Option("-w", "--watch", help="Show changes until Ctrl-C; with --json, one line for each.")
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
    """Return a client of the service at ``url``, or else of the one that runs in ``home`` (``Client.at``)."""
    from api.client import Client

    return Client.at(home, url)


def console(*, stderr: bool = False) -> Screen:
    from api.terminal.listing import Screen

    return Screen(stderr=stderr)


def console_for(output: str | None) -> Screen:
    """Return a console. If ``output`` is ``wide``, its tables may be wider than the terminal."""
    from api.terminal.listing import Screen

    return Screen(wide=output == "wide")


@contextmanager
def until_interrupted() -> Iterator[None]:
    """Turn Ctrl-C in the block into exit code 130, without a message."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


@contextmanager
def scratch(above: Path, prefix: str) -> Iterator[Path]:
    """Yield a temporary folder in ``above``. It is removed however the block ends, also by SIGTERM or SIGHUP."""
    with signals.as_exceptions(), TemporaryDirectory(prefix=prefix, dir=above) as here:
        yield Path(here)


@contextmanager
def draft_of(target: Path, prefix: str) -> Iterator[tuple[Path, Path]]:
    """Yield a temporary folder, and the name in it of what becomes ``target`` unless the block raises.

    Raises ConfigurationError if ``target`` exists, or if its disk or folder cannot be written. Nothing is left behind then.
    """
    if target.exists():
        raise ConfigurationError(detail=f"{target} already exists. Remove it, or give another --out.")
    above = next(path for path in target.absolute().parents if path.exists())
    try:
        with scratch(above, prefix) as here:
            yield here, here / "whole"
            target.parent.mkdir(parents=True, exist_ok=True)
            (here / "whole").rename(target)
    except OSError as error:
        problem = f"{error.strerror or error}. {disk_remedy(error)}, or give another --out."
        raise ConfigurationError(detail=f"{target} cannot be written: {problem}") from error


def say(message: str) -> None:
    """Print progress on stderr, so that stdout holds results only.

    If stderr cannot be written, as on a closed terminal, the command continues without it.
    """
    try:
        echo_lines(message, err=True)
    except OSError:
        drop(2)


def echo(text: str = "") -> None:
    """Print one line on stdout. Commands print only here and on ``console``, which make control characters visible."""
    typer.echo(printable.line(text))


def echo_lines(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print text of several lines."""
    typer.echo(printable.lines(text), err=err, nl=nl)


def echo_json(text: str) -> None:
    """Print JSON text."""
    typer.echo(printable.json_text(text))


def print_json(value: Any) -> None:
    """Print the API's answer as indented JSON."""
    from pydantic import BaseModel

    def plain(item: Any) -> Any:
        return item.model_dump(mode="json") if isinstance(item, BaseModel) else item

    plain_value = [plain(item) for item in value] if isinstance(value, list) else plain(value)
    echo_json(json.dumps(plain_value, indent=2))


# ── options that need others ─────────────────────────────────────────────────────────────────────────────────────────────


def is_on_command_line(context: typer.Context, name: str) -> bool:
    """Return whether this parameter was typed, not taken from the environment or its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def refuse_without(context: typer.Context, needed: str, *names: str, because: str = "") -> None:
    """Raise ConfigurationError if one of these options was typed, which mean nothing without the option ``needed``."""
    for name in names:
        if is_on_command_line(context, name):
            value = context.params.get(name)
            option = f"--{name.replace('_', '-')}{'' if isinstance(value, bool) else f' {value}'}"
            raise ConfigurationError(
                detail=f"{option} has no effect without {needed}{because}. Give {needed} with it, or leave it out."
            )


# ── retention ─────────────────────────────────────────────────────────────────────────────────────────────────────

_UNITS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 1 << 10,
    "Mi": 1 << 20,
    "Gi": 1 << 30,
    "Ti": 1 << 40,
}


def byte_count(text: str | int) -> int:
    """Return the number that a text such as 500G, 1.5TB or 200GiB means. Raises BadParameter."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)\s*([KMGT]i?)?B?", str(text).strip())
    if match is None:
        raise typer.BadParameter(
            f"{text!r} is not an amount of bytes. Write a number with K, M, G, T, Ki, Mi, Gi or Ti."
        )
    return int(float(match[1]) * _UNITS[match[2] or ""])


RetentionDaysOption = Annotated[
    float | None,
    typer.Option(
        "--retention-days",
        metavar="DAYS",
        help="Remove completed and cancelled jobs with their files so many days after their end. Default: keep them.",
    ),
]
RetentionFailedDaysOption = Annotated[
    float | None,
    typer.Option(
        "--retention-failed-days", metavar="DAYS", help="The same for failed jobs, which are never removed for room."
    ),
]
StoreKeyOption = Annotated[
    Path | None,
    typer.Option(
        "--store-key",
        envvar="ATOLL_STORE_KEY",
        metavar="FILE",
        help="A copy of HOME/store.key of the machine that used the store before: the key to what its service keeps there.",
        show_default=False,
    ),
]
RetentionBytesOption = Annotated[
    int | None,
    typer.Option(
        "--retention-bytes",
        metavar="SIZE",
        parser=byte_count,
        help="Remove the oldest completed and cancelled jobs while all ended jobs take more, such as 500G.",
    ),
]


# ── standard output and error ───────────────────────────────────────────────────────────────────────────────────────────

CANNOT_REPLACE = ("strict", "surrogateescape")
"""Python's handlers for characters that an encoding lacks; the second is the default in the locales C, POSIX and C.UTF-8."""


class _Output(io.FileIO):
    """Standard output that remembers why writing failed."""

    refusal: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            type(self).refusal = error
            raise


def prepare_streams() -> None:
    """Replace characters that an encoding lacks, here and in child processes, and watch standard output."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in CANNOT_REPLACE:
            stream.reconfigure(errors=printable.ENCODING_ERRORS)
    encoding, _, errors = os.environ.get("PYTHONIOENCODING", "").partition(":")
    if errors in ("", "strict"):
        encoding = encoding or getattr(sys.stdout, "encoding", None) or "utf-8"  # None: not a real stream
        os.environ["PYTHONIOENCODING"] = f"{encoding}:replace"
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and out.fileno() == 1:
        out.flush()
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(_Output(1, "w", closefd=False)),
            encoding=out.encoding,
            errors=out.errors,
            line_buffering=out.line_buffering,
            write_through=out.write_through,
        )


def flush_streams() -> None:
    """Flush all output. Raises OSError where Python would end with a traceback and exit code 120."""
    if sys.stdout is not None:
        sys.stdout.flush()


def refusal_of_output() -> OSError | None:
    """Return the error with which writing standard output failed, or None."""
    return _Output.refusal


def drop(descriptor: int) -> None:
    """Discard everything written to this standard stream from now on, including what Python writes as it exits."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def run_to_end(command: list[str], text: bytes | None = None, packages: Sequence[str] = ()) -> int:
    """Run a command and return its exit code. Ctrl-C reaches the process too; wait until it has ended.

    ``text`` is its standard input, if any; ``packages`` are folders of code that its job may name.
    """
    environment = user_packages.child_environment(os.environ, packages)
    # A handler that does nothing, which the process does not inherit. A KeyboardInterrupt at the end of ``wait`` would lose
    # the exit code, and a lost one reads as 0.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        stdin = None if text is None else subprocess.PIPE
        process = subprocess.Popen(command, stdin=stdin, env=environment)
        if text is not None and process.stdin is not None:
            with suppress(BrokenPipeError), process.stdin as pipe:
                pipe.write(text)
        code = process.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    if code == -signal.SIGINT:  # while it imported
        return INTERRUPTED
    return code if code >= 0 else 1
