"""The tokenizer of a job that is submitted: its file is there, its tokens are the model's, and its digest becomes the job's.

Every island compares the digest with that of its own node's file, and a job that is resumed with that of the checkpoint.
"""

from __future__ import annotations

from typing import Any

from orchestrator import tokenizer_file
from orchestrator.bounds import BYTE_COUNT, BYTES
from orchestrator.config import JobSpec
from orchestrator.errors import ConfigurationError, Conflict, InvalidJobSpec, NotFound, OutsideRoots, Problem
from orchestrator.roots import AllowedRoots

FIELD, DIGEST, SEPARATOR = "data.tokenizer", "data.tokenizer_digest", "data.separator"


def with_tokenizer_digest(spec: JobSpec, roots: AllowedRoots) -> JobSpec:
    """The specification with its tokenizer's digest. Raises InvalidJobSpec; a file outside the roots is others' business."""
    section, vocabulary_size = spec.data, BYTE_COUNT
    changes = {}
    if section.tokenizer != BYTES:
        try:
            file = tokenizer_file.read(roots, section.tokenizer)
        except OutsideRoots:
            return spec
        except ConfigurationError as error:
            message = str(error).removeprefix(f"{FIELD}: ")
            raise InvalidJobSpec(problems=(Problem(FIELD, message, "Correct the path or the file."),)) from error
        changes, vocabulary_size = {"tokenizer_digest": file.digest}, file.vocabulary_size
        separator = file.end_of_text if section.separator is None else section.separator
        if section.tokenizer_digest not in (None, file.digest):
            message = f"is {section.tokenizer_digest}, and the file has {file.digest}."
            raise InvalidJobSpec(problems=(Problem(DIGEST, message, "Leave it out, or use the file that it is of."),))
        if separator is None or separator >= vocabulary_size:
            message = (
                f"is {separator}, and {section.tokenizer} has {vocabulary_size:,} tokens, none known as end of text."
            )
            remedy = "Set it to the token that shall stand between two documents."
            raise InvalidJobSpec(problems=(Problem(SEPARATOR, message, remedy),))
    model_size = spec.vocabulary_size
    if model_size is not None and (message := tokenizer_file.misfit(vocabulary_size, model_size, section.tokenizer)):
        raise InvalidJobSpec(problems=(Problem(FIELD, message, tokenizer_file.MISFIT_REMEDY),))
    return spec.model_copy(update={"data": section.model_copy(update=changes)})


def tokenizer_of(job: str, spec: Any, roots: AllowedRoots) -> tokenizer_file.TokenizerFile:
    """The file of a job's tokenizer, if it is what it was when the job was submitted. ``spec`` is the stored specification.

    Raises NotFound where the job's tokens are bytes; Conflict where the file cannot be read, or is another by now.
    """
    data = spec.get("data") if isinstance(spec, dict) else None
    section = data if isinstance(data, dict) else {}
    path, digest = section.get("tokenizer", BYTES), section.get("tokenizer_digest")
    if path == BYTES or not isinstance(path, str):
        raise NotFound(detail=f"Job {job} has no tokenizer's file: its tokens are bytes.")
    remedy = "Put the file that the job was submitted with back there, or take your own copy of it."
    try:
        file = tokenizer_file.read(roots, path)
    except ConfigurationError as error:
        raise Conflict(detail=str(error), remedy=remedy) from error
    if digest != file.digest:
        detail = f"{FIELD}: {path} has the digest {file.digest}, and job {job} was submitted with {digest}."
        raise Conflict(detail=detail, remedy=remedy)
    return file
