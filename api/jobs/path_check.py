"""The files and folders that a specification names: every one must lie below a root (``orchestrator.roots``).

Asked three times: when a job is submitted, when it is its turn, and when it is started again by a service that may have been
given other roots. Whatever reads them asks once more, when it does. Links are followed here, and nothing is opened.
"""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.bounds import BYTES
from orchestrator.config import JobSpec
from orchestrator.errors import InvalidJobSpec, OutsideRoots, Problem
from orchestrator.roots import Allowed, AllowedRoots

FOLDER, FILES, CHECKPOINT = "checkpoints.folder", "data.files", "resume.checkpoint"
TOKENIZER = "data.tokenizer"


def problems_outside_roots(spec: JobSpec, roots: AllowedRoots, *, begun: bool = False) -> tuple[Problem, ...]:
    """The paths of the specification that jobs may not touch. One that has ``begun`` reads its resume checkpoint no more."""
    return tuple(_problems(spec, roots, begun))


def refuse_outside(spec: JobSpec, roots: AllowedRoots, *, begun: bool = False) -> None:
    """Raises InvalidJobSpec with every such path."""
    if problems := problems_outside_roots(spec, roots, begun=begun):
        raise InvalidJobSpec(detail="it names files that jobs may not touch (any more)", problems=problems)


def _problems(spec: JobSpec, roots: AllowedRoots, begun: bool) -> Iterator[Problem]:
    named = [(FOLDER, spec.checkpoints.folder)] if spec.checkpoints.folder is not None else []
    if spec.resume is not None and not begun:
        named.append((CHECKPOINT, spec.resume.checkpoint))
    for field, url in named:
        try:
            _followed(roots.checkpoint_folder(url))
        except OutsideRoots as error:
            yield Problem(field, error.detail, error.remedy)
    files = [(f"{FILES}.{number}", path) for number, path in enumerate(spec.data.files)]
    for index, source in enumerate(spec.data.sources):
        files += [(f"data.sources.{index}.files.{number}", path) for number, path in enumerate(source.files)]
    if spec.data.tokenizer != BYTES:
        files.append((TOKENIZER, spec.data.tokenizer))
    for field, path in files:
        try:
            _followed(roots.data_file(path))
        except OutsideRoots as error:
            yield Problem(field, error.detail, error.remedy)


def _followed(there: Allowed) -> None:
    if there.local:
        there.real()
