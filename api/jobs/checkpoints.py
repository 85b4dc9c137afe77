"""What jobs continue from: a job's checkpoints, the one that ``resume`` refers to, and the origin of initial weights.

A checkpoint is named by a job, by its folder, or by a folder of several. Every byte is verified before the job is queued. A
damaged one is skipped in favour of the one before it, with the reason in the specification.

What exports keep of a job's initial checkpoint is copied to RUN_DIR/origin.json before the checkpoint may be removed. A
resumed job takes it from the run that it resumes from, if that is a run of this service; otherwise, as any job, from
``model.initial_weights``. ``models.huggingface.origin`` defines the content.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from api.run.folder import put, read_below
from api.schemas import Checkpoint
from api.storage.store import JobRow
from orchestrator.checkpoints.folder import Folder
from orchestrator.checkpoints.reading import listed
from orchestrator.checkpoints.resumption import find
from orchestrator.checkpoints.writing import checkpoint_folder, root_of
from orchestrator.errors import (
    AtollError,
    ConfigurationError,
    Conflict,
    DataError,
    InfrastructureError,
    InvalidJobSpec,
    NotFound,
    OutsideRoots,
    Problem,
    in_words,
)
from orchestrator.models.huggingface import origin
from orchestrator.models.huggingface.origin import BYTES_MAX, Origin
from orchestrator.specification.bounds import REMARK_CHARACTERS_MAX
from orchestrator.specification.config import JobSpec, parse_job
from orchestrator.specification.sections import REFUSED_MAX, ResumeSection
from orchestrator.specification.training_sections import is_function
from orchestrator.system.roots import AllowedRoots
from orchestrator.system.run_folder import CHECKPOINTS, ORIGIN

FIELD = "resume.checkpoint"
REMEDY = "`atoll checkpoints JOB` lists a job's checkpoints."


def checkpoints_of(row: JobRow, roots: AllowedRoots) -> list[Checkpoint]:
    """Return the job's checkpoints, oldest first.

    Raises Conflict if their folder is not allowed (any more), InfrastructureError if it cannot be read. Raises nothing else,
    even if another build stored the row or it is damaged.
    """
    try:
        root = _root(row, roots)
        manifests = listed(root)
    except ConfigurationError as error:
        detail = f"The checkpoints of job {row.job} are outside the allowed folders: {getattr(error, 'detail', error)}"
        raise Conflict(detail=detail, remedy=getattr(error, "remedy", "")) from error
    except AtollError:
        raise
    except Exception as error:
        detail = f"The checkpoints of job {row.job} cannot be read: {in_words(error)}."
        raise InfrastructureError(detail=detail) from error
    return [
        Checkpoint(
            number=manifest.number,
            url=checkpoint_folder(root, manifest.number).url,
            taken_at=manifest.taken_at,
            after_s=manifest.at,
            global_version=manifest.global_version,
            tokens_trained=manifest.tokens_trained,
            islands=[part.island for part in manifest.parts],
            bytes=manifest.byte_count,
        )
        for manifest in manifests
    ]


def resolved(spec: JobSpec, job_named: Callable[[str], JobRow | None], roots: AllowedRoots) -> JobSpec:
    """Return the specification with the folder of the checkpoint that it resumes from. Raises InvalidJobSpec without one.

    Nothing outside the roots is read, and the answer does not depend on what is there.
    """
    if spec.resume is None:
        return spec
    source = spec.resume.checkpoint
    row = job_named(source)
    if row is None and not source.startswith("/") and "://" not in source:
        raise _problem(f"{source!r} is not a job of this service, a URL, or an absolute path.")
    try:
        of_row = roots.with_run(Path(row.run_dir)) if row else roots
        checkpoint = find(of_row, _url(row) if row else source, spec.model_dump(mode="json"))
    except OutsideRoots as error:
        raise _problem(error.detail, error.remedy) from error
    except (AtollError, OSError, ValueError) as error:
        raise _problem(in_words(error)) from error
    refused = tuple(reason[:REMARK_CHARACTERS_MAX] for reason in checkpoint.refused[:REFUSED_MAX])
    return spec.model_copy(update={"resume": ResumeSection(checkpoint=checkpoint.url, refused=refused)})


def _root(row: JobRow, roots: AllowedRoots) -> Folder:
    """Return the root of the row's checkpoints. The run folder is always allowed, because the service chose it."""
    return Folder.within(roots.with_run(Path(row.run_dir)), _url(row))


def _url(row: JobRow) -> str:
    return root_of(parse_job(row.spec).checkpoints.folder, row.job, Path(row.run_dir))


def _problem(message: str, remedy: str = REMEDY) -> InvalidJobSpec:
    return InvalidJobSpec(problems=(Problem(FIELD, message, remedy),))


# ── the origin of initial weights ─────────────────────────────────────────────────────────────────────────────────


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
