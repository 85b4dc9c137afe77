"""The command line and environment of every Python that atoll starts. Nothing else in the product names an interpreter.

A process started here takes no module from the working folder (``-P``), from PYTHONPATH, or from the user's site-packages
(``-s``), so a file ``queue.py`` or a folder ``api`` there neither breaks it nor runs. The two variables hold the same for
what that process starts in turn: Ray's workers and agents, and the pools of libraries.

Leaves to others: which names of the caller's environment a child needs at all (``environment``), and where the packages of
users are (``user_packages``). Source: docs.python.org/3/using/cmdline.html.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping
from contextlib import suppress

FLAGS = ("-P", "-s")
VARIABLES: Mapping[str, str] = {"PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1"}
"""What ``FLAGS`` says, for the processes that a child starts without them."""
HARMLESS = frozenset(
    [
        *("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "PYTHONUTF8", "PYTHONIOENCODING"),
        *("PYTHONCOERCECLOCALE", "PYTHONFAULTHANDLER", "PYTHONDEVMODE", "PYTHONMALLOC", "PYTHONTRACEMALLOC"),
    ]
)
"""The variables of Python that may be handed on. Any other may name code, or where code is: PYTHONPATH, PYTHONHOME,
PYTHONUSERBASE, PYTHONSTARTUP, PYTHONPYCACHEPREFIX, PYTHONWARNINGS (which imports a category), those of later versions."""


def module(name: str, *arguments: str) -> list[str]:
    """The command line that runs a module, as ``python -m`` does."""
    return [sys.executable, *running(name), *arguments]


def running(name: str) -> list[str]:
    """The options of an interpreter that runs a module, for a command line that somebody else begins, as Ray does."""
    return [*FLAGS, "-m", name]


def code(text: str, *arguments: str) -> list[str]:
    """The command line that runs a text, as ``python -c`` does."""
    return [sys.executable, *FLAGS, "-c", text, *arguments]


def file(path: str, *arguments: str) -> list[str]:
    """The command line that runs a file, whose folder gives it no module either; its output is not buffered."""
    return [sys.executable, *FLAGS, "-u", path, *arguments]


def cleaned(variables: Mapping[str, str]) -> dict[str, str]:
    """``variables`` without those that name code to Python, and with those that keep folders from giving it any."""
    harmless = {name: value for name, value in variables.items() if is_harmless(name)}
    return {**harmless, **VARIABLES}


def is_harmless(name: str) -> bool:
    return not name.startswith(("PYTHON", "__PYVENV")) or name in HARMLESS


def clean() -> None:
    """Make this process's own variables such as ``cleaned`` leaves, for children that somebody else's code starts."""
    variables = cleaned(os.environ)
    os.environ.clear()
    os.environ.update(variables)


def take_encoding() -> None:
    """Give the standard streams the encoding of PYTHONIOENCODING, which an isolated Python has not read."""
    encoding, _, errors = os.environ.get("PYTHONIOENCODING", "").partition(":")
    if sys.flags.ignore_environment and encoding:
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                with suppress(LookupError):  # an encoding that there is not; it stays what it was
                    stream.reconfigure(
                        encoding=encoding, errors=errors if errors and stream is not sys.stderr else stream.errors
                    )


def become(command: list[str]) -> None:
    """Replace this process by a Python with this command line. Does not return."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, cleaned(os.environ))
