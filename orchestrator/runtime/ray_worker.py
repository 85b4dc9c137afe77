"""The first program of each of Ray's worker processes on an embedded cluster, which becomes the worker itself.

    python ray_worker.py --language=PYTHON --serialized-runtime-env-context={...} default_worker.py ...

Ray's own first program imports all of Ray to find out what to become, which is half a second of processor time for each
island, and of each recovery. Almost always it is ``python default_worker.py ...``, in the same environment; where a job of
somebody else's asks for more (a ``runtime_env``), Ray's own program takes over. Refuses to import anything but the standard
library.

Source: Ray 2.60, ``ray/_private/workers/setup_worker.py`` and ``ray/_private/runtime_env/context.py``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def command_of(arguments: Sequence[str]) -> list[str]:
    """The command that a worker process becomes; its first word is the program.

    Raises ModuleNotFoundError where Ray is not installed.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--serialized-runtime-env-context", dest="context")
    parser.add_argument("--language")
    options, worker = parser.parse_known_args(arguments)
    context = json.loads(options.context or "{}")
    python = context.pop("py_executable", None) or sys.executable
    if options.language == "PYTHON" and not any(context.values()):
        return [python, *worker]
    return [sys.executable, rays_own(), *arguments]


def rays_own() -> str:
    """Ray's own first program, found without an import."""
    package = importlib.util.find_spec("ray")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("ray")
    return str(Path(package.submodule_search_locations[0], "_private", "workers", "setup_worker.py"))


if __name__ == "__main__":
    command = command_of(sys.argv[1:])
    os.execv(command[0], command)
