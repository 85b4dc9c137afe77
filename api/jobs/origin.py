"""What exports keep of a job's initial checkpoint, copied to RUN_DIR/origin.json before the checkpoint may be removed.

A resumed job takes it from the run that it resumes from, if that is a run of this service; otherwise, as any job, from
``model.initial_weights``. ``models.huggingface.origin`` defines the content.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from api.run.folder import put, read_below
from orchestrator.errors import AtollError, Conflict, DataError, NotFound
from orchestrator.models.huggingface import origin
from orchestrator.models.huggingface.origin import BYTES_MAX, Origin
from orchestrator.specification.training_sections import is_function
from orchestrator.system.roots import AllowedRoots
from orchestrator.system.run_folder import CHECKPOINTS, ORIGIN


def keep_origin(run_dir: Path, spec: Mapping[str, Any], roots: AllowedRoots) -> None:
    """Write RUN_DIR/origin.json, if the job has a known initial checkpoint. Raises InfrastructureError."""
    continued = _of_resumed(run_dir, spec) or _of_folder(spec, roots)
    if continued is not None:
        put(run_dir, ORIGIN, continued.content())


def origin_of(job: str, run_dir: Path, spec: Mapping[str, Any], roots: AllowedRoots) -> Origin:
    """Return what was kept of the job's initial checkpoint; for a job of an earlier build, what its folder has today.

    Raises NotFound if the job began without a checkpoint, Conflict if nothing is known of it any more.
    """
    try:
        return origin.parsed(read_below(run_dir, ORIGIN, BYTES_MAX), str(run_dir / ORIGIN))
    except FileNotFoundError:
        pass
    except DataError as error:
        raise Conflict(detail=error.detail, remedy="Remove the file. Then the checkpoint is read again.") from error
    folder = _initial_weights(spec)
    if folder is None:
        raise NotFound(detail=f"Job {job} did not start from a checkpoint.")
    try:
        return origin.taken(folder, roots)
    except (AtollError, OSError) as error:
        detail = (
            f"Nothing was kept of {folder}, the initial checkpoint of job {job}, and it cannot be read now: {error}"
        )
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
        return None  # a resumed job may have lost it; otherwise the weights are refused with the reason


def _initial_weights(spec: Mapping[str, Any]) -> str | None:
    """Return the folder of ``model.initial_weights``, or of a torch trainer's model."""
    model, trainer = spec.get("model"), spec.get("trainer")
    folder = model.get("initial_weights") if isinstance(model, Mapping) else None
    if folder is None and isinstance(trainer, Mapping):
        named = trainer.get("model")
        folder = named if isinstance(named, str) and not is_function(named) else None
    return folder if isinstance(folder, str) else None
