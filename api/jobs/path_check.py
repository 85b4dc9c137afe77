"""The files and folders that a specification names: every one must lie below a root (``orchestrator.roots``).

Asked three times: when a job is submitted, when it is its turn, and when it is started again by a service that may have been
given other roots. Whatever reads them asks once more, when it does. Links are followed here, and nothing is opened
but what others trained (``weights_problems``), of which no numbers are read.
"""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.bounds import BYTES
from orchestrator.config import JobSpec
from orchestrator.errors import InvalidJobSpec, OutsideRoots, Problem
from orchestrator.models.decoder import DecoderSection
from orchestrator.roots import Allowed, AllowedRoots

FOLDER, FILES, CHECKPOINT = "checkpoints.folder", "data.files", "resume.checkpoint"
TOKENIZER, INDEX, WEIGHTS = "data.tokenizer", "data.index", "model.initial_weights"


def problems_outside_roots(spec: JobSpec, roots: AllowedRoots, *, begun: bool = False) -> tuple[Problem, ...]:
    """The paths of the specification that jobs may not touch. One that has ``begun`` reads its resume checkpoint no more."""
    return tuple(_problems(spec, roots, begun))


def weights_problems(spec: JobSpec, roots: AllowedRoots) -> tuple[Problem, ...]:
    """What keeps the job from beginning with ``model.initial_weights``: where they are, and what model they are of."""
    folder, network = spec.model.initial_weights, spec.model.network
    if folder is None or not isinstance(network, DecoderSection) or spec.resume is not None:
        return ()
    # brings NumPy, which the service needs for nothing else
    from orchestrator.models.huggingface.weights import problem_of

    unfit = problem_of(network, folder, roots)
    return () if unfit is None else (Problem(WEIGHTS, unfit.detail, unfit.remedy),)


def refuse_outside(spec: JobSpec, roots: AllowedRoots, *, begun: bool = False) -> None:
    """Raises InvalidJobSpec with every such path."""
    problems = problems_outside_roots(spec, roots, begun=begun)
    if problems := problems if begun else (*problems, *weights_problems(spec, roots)):
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
        for field, paths in (("files", source.files), ("held_out", source.held_out)):
            files += [(f"data.sources.{index}.{field}.{number}", path) for number, path in enumerate(paths)]
    if spec.data.tokenizer != BYTES:
        files.append((TOKENIZER, spec.data.tokenizer))
    if spec.data.index is not None:
        files.append((INDEX, spec.data.index))
    for field, path in files:
        try:
            _followed(roots.data_file(path))
        except OutsideRoots as error:
            yield Problem(field, error.detail, error.remedy)


def _followed(there: Allowed) -> None:
    if there.local:
        there.real()
