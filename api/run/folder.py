"""A run's folder, ``RUNS/JOB``: the files that the service writes before a job starts, and those that it reads.

The service writes ``spec.yaml``, the link ``latest`` and copies for exports. The job itself writes the tape, the report and
the final state (``api.run.status``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from api.run.files import is_there
from api.run.status import examine
from orchestrator.errors import InfrastructureError
from orchestrator.status import JobStatus
from orchestrator.system.run_folder import REPORT, REPORT_PAGE, SPECIFICATION, TAPE


@dataclass(frozen=True, slots=True)
class Run:
    """A job's folder, by the job's own id (never ``latest``). ``settled``: the store knows how the job ended."""

    job: str
    folder: Path
    settled: bool

    @property
    def tape(self) -> Path:
        return self.folder / TAPE

    def ended(self) -> bool:
        """Return whether the job has ended, by store and disk, so that nothing more is written here."""
        return self.settled or read_status(self.folder) is not None


def prepare_run_dir(run_dir: Path, spec: Mapping[str, Any]) -> None:
    """Create the run's folder with its specification, and let ``latest`` beside it point to it."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / SPECIFICATION).write_text(yaml.safe_dump(dict(spec), sort_keys=False))
        fresh = run_dir.parent / f".latest.{run_dir.name}"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(run_dir.name)
        os.replace(fresh, run_dir.parent / "latest")
    except OSError as error:
        detail = f"The run's folder {run_dir} cannot be written: {error.strerror}."
        raise InfrastructureError(
            detail=detail, remedy="Free some space, or give the service another --runs folder."
        ) from error


def put(run_dir: Path, name: str, content: bytes) -> None:
    """Write a file into the run's folder atomically, replacing any of that name. Raises InfrastructureError."""
    draft = run_dir / f".{name}.draft"
    try:
        draft.unlink(missing_ok=True)
        with draft.open("xb") as file:
            file.write(content)
        draft.replace(run_dir / name)
    except OSError as error:
        detail = f"{run_dir / name} cannot be written: {error.strerror}."
        raise InfrastructureError(
            detail=detail, remedy="Free some space, or give the service another --runs folder."
        ) from error


def read_status(run_dir: Path) -> JobStatus | None:
    """Return the final state that the ended job left, or None if there is none or it is damaged."""
    return examine(run_dir).status


def damage_of_status(run_dir: Path) -> str:
    """Return what is damaged in an ended job's final state, with the remedy; empty if nothing is."""
    damage = examine(run_dir).damage
    return f"Its final state is damaged: {damage} Restore the file from a backup, or remove the job." if damage else ""


def has_report(run_dir: Path) -> bool:
    """Return whether the ended job left its report, as data and as a page."""
    return all(is_there(run_dir, name) for name in (REPORT, REPORT_PAGE))
