"""What exports keep of the checkpoint that a job continues, taken when the job starts: the checkpoint may be gone later.

A resumed job has it from the run that it goes on from, where that is a run of this service, else from
``model.initial_weights`` as any other. Responsible for RUN_DIR/origin.json; what is in it: ``models.huggingface.origin``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from api.run.files import read_below
from api.run.folder import put
from orchestrator.errors import AtollError, Conflict, DataError, NotFound
from orchestrator.models.huggingface import origin
from orchestrator.models.huggingface.origin import BYTES_MAX, Origin
from orchestrator.system.roots import AllowedRoots
from orchestrator.system.run_folder import CHECKPOINTS, ORIGIN


def keep_origin(run_dir: Path, spec: Mapping[str, Any], roots: AllowedRoots) -> None:
    """Write RUN_DIR/origin.json, if anything is known of a checkpoint that the job continues.

    Raises InfrastructureError.
    """
    continued = _of_resumed(run_dir, spec) or _of_folder(spec, roots)
    if continued is not None:
        put(run_dir, ORIGIN, continued.content())


def origin_of(job: str, run_dir: Path, spec: Mapping[str, Any], roots: AllowedRoots) -> Origin:
    """Of a job of an earlier build, which did not keep it, what its folder has today.

    Raises NotFound where the job continues no checkpoint; Conflict where nothing is known of it any more.
    """
    try:
        return origin.parsed(read_below(run_dir, ORIGIN, BYTES_MAX), str(run_dir / ORIGIN))
    except FileNotFoundError:
        pass
    except DataError as error:
        raise Conflict(
            detail=error.detail, remedy="Remove the file: then the checkpoint is looked at again."
        ) from error
    folder = _initial_weights(spec)
    if folder is None:
        raise NotFound(detail=f"Job {job} began with parameters of its own: it continues no checkpoint.")
    try:
        return origin.taken(folder, roots)
    except (AtollError, OSError) as error:
        detail = f"Nothing was kept of {folder}, which job {job} continued, and it cannot be read now: {error}"
        raise Conflict(detail=detail, remedy="Put the checkpoint back there, and export again.") from error


def _of_resumed(run_dir: Path, spec: Mapping[str, Any]) -> Origin | None:
    resume = spec.get("resume")
    if resume is None:
        return None
    checkpoints = Path(resume["checkpoint"]).parent
    run_before = checkpoints.parent
    if checkpoints.name != CHECKPOINTS or run_before.parent != run_dir.parent:
        return None
    try:
        return origin.parsed(read_below(run_before, ORIGIN, BYTES_MAX), str(run_before / ORIGIN))
    except (OSError, DataError):
        return None


def _of_folder(spec: Mapping[str, Any], roots: AllowedRoots) -> Origin | None:
    folder = _initial_weights(spec)
    if folder is None:
        return None
    try:
        return origin.taken(folder, roots)
    except (AtollError, OSError):
        return None  # of a resumed job it may be gone; else the weights are refused with the reason


def _initial_weights(spec: Mapping[str, Any]) -> str | None:
    model = spec.get("model")
    folder = model.get("initial_weights") if isinstance(model, Mapping) else None
    return folder if isinstance(folder, str) else None
