"""A Ray worker's process: Ray's own program, without two packages that it imports and nothing here uses.

    python -m orchestrator.runtime.worker PROGRAM OPTION ...

``import ray`` is most of what an island's, or any actor's, start costs, and a quarter of it are ``requests``, which Ray asks
cloud machines with TPUs who they are, and ``jsonschema``, which looks at runtime environments. Here they are imported when
somebody first uses them. Source: ``import ray`` of Ray 2.60, 0.29 s of processor time instead of 0.40.

The title of the process, which `ps` shows, ends with the name of its actor (``ray::Island.reports demo-3ef8s:asia:2``).
Ray's own titles have the class alone, which is the same for every job and island.
"""

from __future__ import annotations

import importlib
import importlib.util
import runpy
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

from orchestrator.runtime import fork_server

MODULE = "orchestrator.runtime.worker"
RAY_PROGRAM = "default_worker.py"
IDLE = "ray::IDLE"
LATE = ("requests", "jsonschema")


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


def main() -> None:
    for name in LATE:
        import_late(name)
    arguments = sys.argv[1:]
    if Path(arguments[0]).name == RAY_PROGRAM:
        wanted = fork_server.as_worker(arguments)
        if wanted is None:
            return
        arguments = wanted
        name_titles()
    sys.argv[:] = arguments
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
