"""The command line ``atoll``.

Registers the commands and reports errors: a message with a remedy on stderr, an exit code, and no traceback. It starts in
well under half a second, because what a command needs is imported when it runs.

    exit code   meaning
    0           done
    1           it failed: the job, the command, the replay, or the machinery
    2           invalid input: a specification, an option, a name that does not exist
    3           the service does not answer
    130         interrupted (Ctrl-C)
"""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # in the imports below, Ctrl-C ends the process without a traceback

import errno
import os
import platform
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from api.commands import (
    access,
    chaos,
    check,
    checkpoints,
    data,
    doctor,
    islands,
    jobs,
    nodes,
    records,
    service,
    simulate,
    store,
    tapes,
)
from api.commands.common import INTERRUPTED, drop, flush_streams, prepare_streams, refusal_of_output, say
from api.installation.home import TOKEN_VARIABLE
from orchestrator.errors import AtollError, ConfigurationError, Conflict, RequestError, ServiceUnreachable, disk_remedy
from orchestrator.system import printable, python_process, release

PROGRAM = "atoll"
HELP_OPTIONS = frozenset({"-h", "--help"})
URL = re.compile(r"[a-z][a-z0-9+.-]*://")
REFUSALS_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class Commands(typer.core.TyperGroup):
    """All commands. Options for paths are looked at before the commands read theirs."""

    def parse_args(self, context: Any, arguments: list[str]) -> list[str]:
        refuse_unfit_paths(self, arguments)
        if HELP_OPTIONS & set(arguments):
            wrap_names_in_help()
        return super().parse_args(context, arguments)

    def invoke(self, context: Any) -> Any:
        try:
            return super().invoke(context)
        except typer.BadParameter as error:
            if problem := unfit_number(error):
                raise ConfigurationError(detail=problem) from error
            raise


def wrap_names_in_help() -> None:
    """Have typer wrap long names of options and default values in its tables, where it would cut them."""
    from rich.text import Text  # late: only help needs it
    from typer import rich_utils

    class WholeText(Text):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{"overflow": "fold", **options})

    class WholeNames(rich_utils.OptionHighlighter):
        def __call__(self, text: Any) -> Any:
            highlighted = super().__call__(text)
            highlighted.overflow = "fold"
            return highlighted

    vars(rich_utils).update(Text=WholeText, highlighter=WholeNames())


def unfit_number(error: typer.BadParameter) -> str | None:
    """Return which option has which unfit number, and the numbers it takes; None for an error of another kind."""
    from pydantic import ValidationError  # late: only an error needs it

    cause, parameter = error.__cause__, error.param
    if not isinstance(cause, ValidationError) or parameter is None:
        return None
    item = cause.errors()[0]
    while isinstance(inner := item.get("ctx", {}).get("error"), ValidationError):  # of one value of several
        item = inner.errors()[0]
    if not item["type"].startswith(("int_", "float_", "finite_", "greater_", "less_")):
        return None
    described = parameter.type_descriptor
    limits, kinds = described.parameter_info, str(described.annotation)
    numbers = "a whole number" if "int" in kinds else "a number"
    if limits.min is not None:
        least, most = (f"{int(end) if end == int(end) else end:,}" for end in (limits.min, limits.max or 0))
        numbers += f" of at least {least}" if limits.max is None else f" from {least} to {most}"
    name = parameter.opts[0] if parameter.opts[0].startswith("-") else parameter.display_name_raw
    return f"{name} {printable.line(str(item['input']))!r} is not {numbers}. Give one."


def refuse_unfit_paths(group: Any, arguments: list[str]) -> None:
    """Raise ConfigurationError for an empty value or a URL in place of a path.

    The one would mean the working folder, the other make a folder with the name of its protocol.
    """
    words = arguments[: arguments.index("--")] if "--" in arguments else arguments
    pairs = [*pairwise(words), *(word.split("=", 1) for word in words if "=" in word)]
    unfit = {option: value for option, value in pairs if not value or URL.match(value)}
    for option in sorted(unfit.keys() & path_options(group)) if unfit else ():
        if value := unfit[option]:
            problem = f"{printable.line(value)!r} is a URL. Give the path of a file or folder on this machine."
        else:
            problem = "is empty, as from an unset variable. Give a path, or leave the option out."
        raise ConfigurationError(detail=f"{option} {problem}")


def path_options(group: Any) -> set[str]:
    """Return the options of the group's commands that take a path."""
    options: set[str] = set()
    for command in group.commands.values():
        if hasattr(command, "commands"):
            options |= path_options(command)
        for parameter in command.params:
            if getattr(parameter, "type_descriptor", None) and parameter.type_descriptor.annotation is Path:
                options.update(parameter.opts)
    return options


app = typer.Typer(
    name=PROGRAM,
    cls=Commands,
    no_args_is_help=True,
    context_settings={"help_option_names": sorted(HELP_OPTIONS, key=len)},
    help="Elastic orchestration of Decoupled DiLoCo training. Exit codes: 0 done, 1 failed, 2 invalid input, "
    "3 the service does not answer. For completion run `atoll --install-completion`, then open a new shell.",
)


def _version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata  # late: it imports much, for `--version` alone

        build = release.own()
        ray = importlib.metadata.version("ray")
        say(f"atoll {build.release} (wire {build.wire}, Ray {ray}, Python {platform.python_version()})")
        raise typer.Exit


@app.callback()
def options(
    token: Annotated[
        str | None,
        typer.Option("--token", metavar="TOKEN", help="Access token. Default: ATOLL_TOKEN, else HOME/token."),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the build and exit.")
    ] = False,
) -> None:
    """Options of every command. All users of this machine can see a token on the command line."""
    if token:
        os.environ[TOKEN_VARIABLE] = token


for module in (
    service,
    jobs,
    check,
    checkpoints,
    records,
    islands,
    nodes,
    simulate,
    tapes,
    store,
    data,
    access,
    chaos,
    doctor,
):
    module.register(app)


def main() -> None:
    """Run a command and exit with its exit code."""
    python_process.take_encoding()
    prepare_streams()
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            app(prog_name=PROGRAM)
        finally:
            flush_streams()
    except AtollError as error:
        say(f"atoll: {error}")
        sys.exit(exit_code(error))
    except KeyboardInterrupt:  # before the command began; a command handles it itself
        say("atoll: interrupted")
        sys.exit(INTERRUPTED)
    except OSError as error:
        if (explained := explain(error)) is None:
            raise
        message, code = explained
        say(f"atoll: {message}")
        sys.exit(code)


def explain(error: OSError) -> tuple[str, int] | None:
    """Return a message and the exit code for an error of this machine; None for a bug in atoll."""
    if refusal := refusal_of_output():
        drop(1)
        return f"cannot write to standard output: {refusal.strerror}. Check where it is redirected to.", 1
    if isinstance(error, FileNotFoundError) and is_working_folder_gone():
        return (
            "the working folder was removed. Change to another folder, or give absolute paths (--home, --runs).",
            2,
        )
    if error.errno in REFUSALS_OF_THE_DISK:
        return f"{error.strerror}: {error.filename or 'a file of the home folder'}. {disk_remedy(error)}.", 1
    return None


def is_working_folder_gone() -> bool:
    """Return whether the working folder was removed, so that relative paths lead nowhere."""
    try:
        os.getcwd()
    except OSError:
        return True
    return False


def exit_code(error: AtollError) -> int:
    """Return the exit code for an error, by whose fault it is."""
    if isinstance(error, ServiceUnreachable):
        return 3
    mistake = isinstance(error, ConfigurationError | RequestError) and not isinstance(error, Conflict)
    return 2 if mistake else 1


if __name__ == "__main__":
    main()
