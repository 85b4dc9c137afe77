"""The programs of a cluster whose workers note which of the product's functions run. Only ``way`` starts them.

    python -m tests.bench.way_hooks ARGUMENT ...      as orchestrator.runtime.ray_command, with workers as below
    python -m tests.bench.way_hooks PROGRAM.py ...    as orchestrator.runtime.worker, with hooks

A worker has a profile hook in every thread that Python starts, and in whichever thread of Ray's calls an actor's method.
It notes functions only while the file ``COUNTING`` is in the folder that the variable ``FOLDER`` names. When that file goes,
it writes what it noted to ``KIND-PID.json`` there, where KIND is the actor's class.

A function counts when it is called, calls, or returns. So a loop that was entered before the counting began counts as well,
and a thread that waits all the time does not. A module's or a class's own body is no function; a comprehension belongs to
the function around it.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from orchestrator.runtime import ray_command, worker

FOLDER = "ATOLL_BENCH_WAY"
COUNTING = "counting"
MODULE = "tests.bench.way_hooks"
ROOT = Path(__file__).parents[2]
PRODUCT = ("orchestrator", "learners", "api")
POLL_S = 0.05
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


class Notes:
    """The code that runs while ``counting`` is set. One for each process."""

    def __init__(self) -> None:
        self.counting = False
        self.actor = ""
        self._codes: set[CodeType] = set()

    def hook(self, frame: FrameType, event: str, argument: object) -> None:
        if self.counting:
            self._codes.add(frame.f_code)
            if frame.f_back is not None:
                self._codes.add(frame.f_back.f_code)

    def functions(self) -> dict[str, list[str]]:
        """Return the functions that ran, by file of the product."""
        by_file: dict[str, set[str]] = {}
        for code in self._codes.copy():
            path = Path(code.co_filename)
            if code.co_flags & inspect.CO_OPTIMIZED and path.is_relative_to(ROOT):
                name = path.relative_to(ROOT)
                if name.parts[0] in PRODUCT and not code.co_qualname.endswith(COMPREHENSIONS):
                    by_file.setdefault(str(name), set()).add(f"{code.co_qualname}:{code.co_firstlineno}")
        return {name: sorted(by_file[name]) for name in sorted(by_file)}

    def watch(self, folder: Path) -> None:
        """Count while the file ``COUNTING`` is there, then write the notes."""
        while not (folder / COUNTING).exists():
            time.sleep(POLL_S)
        self.counting = True
        while (folder / COUNTING).exists():
            time.sleep(POLL_S)
        self.counting = False
        if self.actor:
            kept = folder / f"{self.actor}-{os.getpid()}.json"
            kept.with_suffix(".new").write_text(json.dumps(self.functions()))
            kept.with_suffix(".new").rename(kept)


def worker_main() -> None:
    for name in worker.LATE:
        worker.import_late(name)
    notes = Notes()
    threading.Thread(target=notes.watch, args=(Path(os.environ[FOLDER]),), daemon=True).start()
    manager: Any = importlib.import_module("ray._private.function_manager").FunctionActorManager
    executor_of = manager._make_actor_method_executor

    def hooked(self: Any, name: str, method: Any) -> Callable[..., Any]:
        executor = executor_of(self, name, method)

        def execute(actor: Any, *arguments: Any, **named: Any) -> Any:
            notes.actor = type(actor).__name__
            sys.setprofile(notes.hook)
            return executor(actor, *arguments, **named)

        execute.name, execute.method = executor.name, executor.method  # type: ignore[attr-defined]
        return execute

    manager._make_actor_method_executor = hooked
    threading.setprofile(notes.hook)
    worker.run(sys.argv[1:])  # not a fork, which would have no thread that watches


def main() -> None:
    if sys.argv[1:] and sys.argv[1].endswith(".py"):
        worker_main()
    else:
        worker.MODULE = MODULE
        ray_command.main()


if __name__ == "__main__":
    main()
