"""A job's checkpoints, and the one that a specification with ``resume`` refers to.

A checkpoint is asked for by a job's name, by its folder, or by a folder of several. It is verified here, every byte, before
the job is queued: one that is damaged is passed over for the one before it, with the reason in the specification.
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
REMEDY = "`atoll checkpoints JOB` lists those of a job."


def checkpoints_of(row: JobRow, roots: AllowedRoots) -> list[Checkpoint]:
    """Oldest first. Raises Conflict where jobs may not look (any more), InfrastructureError when they cannot be looked at.

    And nothing that is no error of ours: a row may have been stored by another build, or be damaged.
    """
    try:
        root = _root(row, roots)
        manifests = listed(root)
    except ConfigurationError as error:
        detail = f"The checkpoints of job {row.job} are where jobs may not look: {getattr(error, 'detail', error)}"
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
    """The specification, with the folder of the checkpoint it goes on from. Raises InvalidJobSpec when there is none.

    Of what lies below no root nothing is looked at, and the answer is the same whatever that is.
    """
    if spec.resume is None:
        return spec
    source = spec.resume.checkpoint
    row = job_named(source)
    if row is None and not source.startswith("/") and "://" not in source:
        raise _problem(f"{source!r} is no job of this service, no URL, and no absolute path.")
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
    """The run folder's own are always allowed: the service chose where that is."""
    return Folder.within(roots.with_run(Path(row.run_dir)), _url(row))


def _url(row: JobRow) -> str:
    return root_of(parse_job(row.spec).checkpoints.folder, row.job, Path(row.run_dir))


def _problem(message: str, remedy: str = REMEDY) -> InvalidJobSpec:
    return InvalidJobSpec(problems=(Problem(FIELD, message, remedy),))
