"""A job's checkpoints, and the one that a specification with ``resume`` refers to.

A checkpoint is named by a job, by its folder, or by a folder of several. Every byte is verified before the job is queued. A
damaged one is skipped in favour of the one before it, with the reason in the specification.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

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
    InfrastructureError,
    InvalidJobSpec,
    OutsideRoots,
    Problem,
    in_words,
)
from orchestrator.specification.bounds import REMARK_CHARACTERS_MAX
from orchestrator.specification.config import JobSpec, parse_job
from orchestrator.specification.sections import REFUSED_MAX, ResumeSection
from orchestrator.system.roots import AllowedRoots

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
