"""A Ray worker's process: Ray's own program, without two packages that it imports and nothing here uses.

    python -m orchestrator.runtime.worker PROGRAM OPTION ...

``import ray`` is most of what an island's, or any actor's, start costs, and a quarter of it are ``requests``, which Ray asks
cloud machines with TPUs who they are, and ``jsonschema``, which looks at runtime environments. Here they are imported when
somebody first uses them. Source: ``import ray`` of Ray 2.60, 0.29 s of processor time instead of 0.40.

An actor of a job that was upgraded may run in another release than its node (``of_release``):

    python -m orchestrator.runtime.worker --release BUILD PYTHON -m orchestrator.runtime.worker PROGRAM OPTION ...

becomes that interpreter if the node's own release is older, and if this machine has it. Ray adds what follows PYTHON. What
such an actor starts on another machine begins in the same way, so it runs in the newer of the job's release and that of
its node.

The title of the process, which `ps` shows, ends with the name of its actor (``ray::Island.reports demo-3ef8s:asia:2``).
Ray's own titles have the class alone, which is the same for every job and island.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import runpy
import shlex
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

from orchestrator.runtime import fork_server
from orchestrator.system import python_process, release

MODULE = "orchestrator.runtime.worker"
RAY_PROGRAM = "default_worker.py"
IDLE = "ray::IDLE"
LATE = ("requests", "jsonschema")
RELEASE = "--release"
NODE_PYTHON = "ATOLL_NODE_PYTHON"
"""The variable with the interpreter of a node, in the environment of its processes."""


class LateModule(ModuleType):
    """Stands for a module that is imported when anything in it is used."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def import_late(name: str) -> None:
    """Import the module now, if it exists, so that a later ``import`` of it costs nothing."""
    specification = importlib.util.find_spec(name)
    if specification is not None and name not in sys.modules:
        sys.modules[name] = LateModule(name)
        sys.modules[name].__spec__ = specification


def name_titles() -> None:
    """Add the actor's name to every title that Ray gives this process."""
    ray: Any = importlib.import_module("ray")
    ray_worker: Any = importlib.import_module("ray._private.worker")
    change_title = ray_worker._changeproctitle

    def change_named_title(title: str, next_title: str) -> AbstractContextManager[None]:
        name = ray.get_runtime_context().get_actor_name() if title != IDLE else ""
        suffix = f" {name}" if name else ""
        changed: AbstractContextManager[None] = change_title(title + suffix, next_title + suffix)
        return changed

    ray_worker._changeproctitle = change_named_title


def of_release(build: str, python: str) -> dict[str, Any]:
    """Return Ray's option for an actor, or a task, that runs in the release ``build``, by this interpreter."""
    starts = " ".join(map(shlex.quote, [*python_process.running(MODULE), RELEASE, build, python]))
    return {"runtime_env": {"py_executable": f'"${NODE_PYTHON}" {starts}'}}


def become_release(build: str, python: str, arguments: list[str]) -> None:
    """Replace this process by one of that interpreter, unless this release is as new, or the machine does not have it.

    ``arguments`` are the interpreter's.
    """
    wanted, own = release.Build.parse(build), release.own()
    if wanted is not None and release.is_older(own, wanted) and os.access(python, os.X_OK):
        python_process.become([python, *arguments])


def main() -> None:
    arguments = sys.argv[1:]
    if arguments[0] == RELEASE:
        _, build, python, *arguments = arguments
        become_release(build, python, arguments)
        arguments = arguments[arguments.index(MODULE) + 1 :]
    for name in LATE:
        import_late(name)
    if Path(arguments[0]).name == RAY_PROGRAM:
        wanted = fork_server.as_worker(arguments)
        if wanted is None:
            return
        arguments = wanted
    run(arguments)


def run(arguments: list[str]) -> None:
    """Run Ray's program in this process, with these arguments. The first is the program's path."""
    if Path(arguments[0]).name == RAY_PROGRAM:
        name_titles()
    sys.argv[:] = arguments
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
