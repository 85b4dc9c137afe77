"""Keeps finished training runs on disk, so that an interrupted comparison continues where it was.

Each run is one JSON line in ``runs.jsonl`` of a folder, under a key that identifies everything which decides its result.
Only a run in progress is lost when the process ends. The progress bar of long training is here too.
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
"""How the schedule advances. It is part of the key, because earlier builds advanced it otherwise."""


class FinishedRuns(Generic[Run]):
    """The finished runs of one folder. ``kind`` is a dataclass with a ``key``."""

    def __init__(self, folder: Path, kind: type[Run]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "runs.jsonl"
        read = TypeAdapter(kind)
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        self._runs: dict[str, Any] = {run.key: run for run in map(read.validate_json, lines)}  # type: ignore[attr-defined]

    def get(self, key: str) -> Run | None:
        return self._runs.get(key)

    def keep(self, run: Run) -> Run:
        """Write the run to disk. It replaces an earlier run with the same key."""
        self._runs[run.key] = run  # type: ignore[attr-defined]
        with self._file.open("a") as lines:
            lines.write(json.dumps(asdict(run)) + "\n")  # type: ignore[call-overload]
        return run


def key_of(*facts: object) -> str:
    """Return a short digest of everything that decides a run's result."""
    return hashlib.sha256(" ".join(map(str, (SCHEDULE, *facts))).encode()).hexdigest()[:16]


def progress(console: Console) -> Progress:
    """Return progress bars, one for each run, in tokens, with the remaining time."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console)
