"""The tokenizer of a job that is submitted: its file is there and its tokens are the model's.

The specification gets its digest, and the tokens that stand around a document.

Every island compares the digest with that of its own node's file, and a job that is resumed with that of the checkpoint.
"""

from __future__ import annotations

from typing import Any

from orchestrator import tokenizer_file
from orchestrator.bounds import BYTE_COUNT, BYTES
from orchestrator.config import JobSpec
from orchestrator.errors import ConfigurationError, Conflict, InvalidJobSpec, NotFound, OutsideRoots, Problem
from orchestrator.roots import AllowedRoots

FIELD, DIGEST = "data.tokenizer", "data.tokenizer_digest"


def with_tokenizer(spec: JobSpec, roots: AllowedRoots) -> JobSpec:
    """The specification with its tokenizer's digest, and with the tokens around a document that are left to the tokenizer.

    They are chosen once, here: files beside the tokenizer's have a say in it, and nodes may lack those. Raises
    InvalidJobSpec; a file outside the roots is others' business.
    """
    section, vocabulary_size = spec.data, BYTE_COUNT
    changes: dict[str, Any] = {}
    if section.tokenizer == BYTES:
        if section.begin_token == tokenizer_file.AS_TOKENIZER:
            changes = {"begin_token": tokenizer_file.NO_TOKEN}
    else:
        try:
            file = tokenizer_file.read(roots, section.tokenizer)
        except OutsideRoots:
            return spec
        except ConfigurationError as error:
            message = str(error).removeprefix(f"{FIELD}: ")
            raise InvalidJobSpec(problems=(Problem(FIELD, message, "Correct the path or the file."),)) from error
        if section.tokenizer_digest not in (None, file.digest):
            message = f"is {section.tokenizer_digest}, and the file has {file.digest}."
            raise InvalidJobSpec(problems=(Problem(DIGEST, message, "Leave it out, or use the file that it is of."),))
        around = tokenizer_file.around(file, section.separator, section.begin_token, section.tokenizer)
        if isinstance(around, Problem):
            raise InvalidJobSpec(problems=(around,))
        begin_token = tokenizer_file.NO_TOKEN if around.begin_token is None else around.begin_token
        changes = {"tokenizer_digest": file.digest, "separator": around.separator, "begin_token": begin_token}
        vocabulary_size = file.vocabulary_size
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
