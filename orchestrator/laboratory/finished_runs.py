"""Finished training runs, kept on disk as they end, so that what is interrupted goes on where it was.

One JSON line a run in ``runs.jsonl`` of a folder, under a key that names everything which decides its result. A run under
way when the process ends is lost, and none else. Also here: how long training shows its progress.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Run = TypeVar("Run")
SCHEDULE = "by tokens"
"""What the learning rate goes by: runs kept from before have other names."""


class FinishedRuns(Generic[Run]):
    """The finished runs of one folder: instances of a dataclass ``kind`` that has a ``key``."""

    def __init__(self, folder: Path, kind: type[Run]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "runs.jsonl"
        read = TypeAdapter(kind)
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        self._runs: dict[str, Any] = {run.key: run for run in map(read.validate_json, lines)}  # type: ignore[attr-defined]

    def get(self, key: str) -> Run | None:
        return self._runs.get(key)

    def keep(self, run: Run) -> Run:
        """Write it down; a later run under the same key takes an earlier one's place."""
        self._runs[run.key] = run  # type: ignore[attr-defined]
        with self._file.open("a") as lines:
            lines.write(json.dumps(asdict(run)) + "\n")  # type: ignore[call-overload]
        return run


def key_of(*facts: object) -> str:
    """A short name for everything that decides a run's result."""
    return hashlib.sha256(" ".join(map(str, (SCHEDULE, *facts))).encode()).hexdigest()[:16]


def progress(console: Console) -> Progress:
    """A bar for each run, in tokens, with the time that is left."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console)
