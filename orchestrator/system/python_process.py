"""The command line and environment of every Python that atoll starts. Nothing else in the product names an interpreter.

A process started here takes no module from the working folder (``-P``), from PYTHONPATH, or from the user's site-packages
(``-s``), so a file ``queue.py`` or a folder ``api`` there neither breaks it nor runs. The two variables hold the same for
what that process starts in turn: Ray's workers and agents, and the pools of libraries.

Leaves to others: which names of the caller's environment a child needs at all (``environment``), and where the packages of
users are (``user_packages``). Source: docs.python.org/3/using/cmdline.html.

The environment of child processes: only names that are known to be needed, never the whole of the caller's.

Whoever runs ``atoll up`` has tokens, passwords and cloud credentials in their shell, and an island runs code that a job
names. So a name goes on only if it is here, or was given on purpose (``atoll up --pass-environment NAME``), as the
credentials must be of a store that islands write checkpoints to. A name that speaks of a secret goes on by being given only,
whatever its prefix.

Not here, on purpose: ``LD_PRELOAD`` (code in every process), ``PYTHONPATH`` and its like (``python_process``), ``RAY_*`` and
``ATOLL_*`` (what a process needs of them is set for it), proxies (their addresses hold passwords, and nothing of ours
fetches through one). Refuses to know who starts what.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress

from orchestrator.errors import ConfigurationError

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

COMMAND = (
    "import sys; sys.excepthook = lambda kind, *rest: kind is KeyboardInterrupt or sys.__excepthook__(kind, *rest); "
    "import runpy; del sys.argv[0]; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)
"""Runs the module that its first argument names. Ctrl-C that the module does not handle ends it by SIGINT, in silence."""

ready_event: int | None = None
"""The event (``os.eventfd``) that tells the fork server of this process that it is ready. None if it is not a fork."""


def say_ready() -> None:
    """Have the fork server of this process, if there is one, look now at which libraries its forks have loaded."""
    if ready_event is not None:
        os.eventfd_write(ready_event, 1)


def set_variables(variables: Mapping[str, str]) -> None:
    """Set these variables in this process, of which JAX reads one when it is imported, and it may have been."""
    os.environ.update(variables)
    if (jax := sys.modules.get("jax")) is not None and "JAX_PLATFORMS" in variables:
        jax.config.update("jax_platforms", variables["JAX_PLATFORMS"])


def interpreter() -> str:
    """Return the path of this process's interpreter, with which another process can run this release."""
    return sys.executable


def module(name: str, *arguments: str) -> list[str]:
    """The command line that runs a module, as ``python -m`` does."""
    return [sys.executable, *running(name), *arguments]


def running(name: str) -> list[str]:
    """The options of an interpreter that runs a module, for a command line that somebody else begins, as Ray does."""
    return [*FLAGS, "-m", name]


def code(text: str, *arguments: str) -> list[str]:
    """The command line that runs a text, as ``python -c`` does."""
    return [sys.executable, *FLAGS, "-c", text, *arguments]


def command(name: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module for a person, who may press Ctrl-C while the module imports others."""
    return code(COMMAND, name, *arguments)


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


NAMES = frozenset(
    [
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "XDG_CACHE_HOME", "HOSTNAME"),
        *("VIRTUAL_ENV", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED"),
        *("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
        *("HF_HOME", "HF_HUB_OFFLINE", "TF_CPP_MIN_LOG_LEVEL", "NO_COLOR", "COLUMNS"),
    ]
)
PREFIXES = (
    *("LC_", "CUDA_", "CUDNN_", "NVIDIA_", "NCCL_", "ROCM_", "HIP_", "HSA_", "TPU_", "LIBTPU_", "XLA_", "JAX_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "MALLOC_"),
)
"""Settings of accelerators, their runtimes, and libraries with threads."""
SECRET = re.compile(r"(^|_)(\w*KEYS?|\w*TOKENS?|SECRETS?|PASS|PASSWD|PASSWORDS?|CREDENTIALS?|AUTH)(_|$)", re.IGNORECASE)
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def built(caller: Mapping[str, str], passed: Iterable[str] = ()) -> dict[str, str]:
    """Return the part of ``caller``'s environment that a child gets; ``passed`` are the explicitly passed names."""
    passed_on = frozenset(passed)
    needed = {name: value for name, value in caller.items() if name in passed_on or _needed(name)}
    return cleaned(needed)


def refuse_unset(caller: Mapping[str, str], passed: Iterable[str]) -> None:
    """Raise ConfigurationError for a name that cannot be passed on, so that a typo is reported before an island starts."""
    for name in passed:
        if not NAME.fullmatch(name):
            detail = f"--pass-environment {name.partition('=')[0]!r} is not the name of a variable."
            raise ConfigurationError(detail=f"{detail} Set it in the environment, and give its name without a value.")
        if not is_harmless(name):
            detail = f"--pass-environment {name}: it would change where atoll's processes import modules from."
            raise ConfigurationError(detail=f"{detail} Install your packages, or name their folder with --packages.")
        if name not in caller:
            detail = f"--pass-environment {name}: the variable is not set. Set it, or leave the option out."
            raise ConfigurationError(detail=detail)


def _needed(name: str) -> bool:
    return name in NAMES or (name.startswith(PREFIXES) and not SECRET.search(name))
