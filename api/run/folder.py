"""A run's folder, ``RUNS/JOB``: what the service puts there before a job, and what it finds there after.

Responsible for ``spec.yaml``, the link ``latest``, and for what else is there by its name. The tape, the report and the
final state (``api.run.status``) are written by the job itself.
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
from orchestrator.actors.records import StatusRecord
from orchestrator.errors import InfrastructureError
from orchestrator.system.run_folder import REPORT, REPORT_PAGE, SPECIFICATION, TAPE


@dataclass(frozen=True, slots=True)
class Run:
    """A job's folder, by the job's real id. ``settled`` once the store knows how the job ended."""

    job: str
    folder: Path
    settled: bool

    @property
    def tape(self) -> Path:
        return self.folder / TAPE

    def ended(self) -> bool:
        """Whether nothing will be written here any more, as far as store and disk know."""
        return self.settled or read_status(self.folder) is not None


def prepare_run_dir(run_dir: Path, spec: Mapping[str, Any]) -> None:
    """The run's folder with its specification exists, and ``latest`` beside it points to it."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / SPECIFICATION).write_text(yaml.safe_dump(dict(spec), sort_keys=False))
        fresh = run_dir.parent / f".latest.{run_dir.name}"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(run_dir.name)
        os.replace(fresh, run_dir.parent / "latest")
    except OSError as error:
        detail = f"The run's folder {run_dir} cannot be written: {error.strerror}."
        raise InfrastructureError(detail=detail, remedy="Give the service another --runs folder, or room.") from error


def put(run_dir: Path, name: str, content: bytes) -> None:
    """The run's folder has the file, whole, in the place of whatever had its name. Raises InfrastructureError."""
    draft = run_dir / f".{name}.draft"
    try:
        draft.unlink(missing_ok=True)
        with draft.open("xb") as file:
            file.write(content)
        draft.replace(run_dir / name)
    except OSError as error:
        detail = f"{run_dir / name} cannot be written: {error.strerror}."
        raise InfrastructureError(detail=detail, remedy="Give the service another --runs folder, or room.") from error


def read_status(run_dir: Path) -> StatusRecord | None:
    """The final state that the ended job left, or None if there is none that is whole."""
    return examine(run_dir).record


def damage_of_status(run_dir: Path) -> str:
    """The damage of an ended job's final state, with what to do about it; empty if there is none."""
    damage = examine(run_dir).damage
    return f"Its final state is damaged: {damage} Put the file back from a copy, or remove the job." if damage else ""


def has_report(run_dir: Path) -> bool:
    """Whether the ended job left its figures and its page."""
    return all(is_there(run_dir, name) for name in (REPORT, REPORT_PAGE))
