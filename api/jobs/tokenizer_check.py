"""The tokenizer of a job that is submitted: its file is there and its tokens are the model's.

The specification gets its digest, and the tokens that stand around a document.

Every island compares the digest with that of its own node's file, and a job that is resumed with that of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

from api.run.files import open_below
from api.run.folder import put
from orchestrator import tokenizer_file
from orchestrator.bounds import BYTE_COUNT, BYTES
from orchestrator.config import JobSpec
from orchestrator.errors import (
    ConfigurationError,
    Conflict,
    InvalidJobSpec,
    NotFound,
    OutsideRoots,
    Problem,
    first_line,
)
from orchestrator.roots import AllowedRoots, open_data
from orchestrator.run_folder import TOKENIZER

FIELD, DIGEST = "data.tokenizer", "data.tokenizer_digest"
PIECE_BYTES = 256 << 10


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


def keep_tokenizer(run_dir: Path, spec: Mapping[str, Any], roots: AllowedRoots) -> None:
    """Copy the job's tokenizer into its run's folder, for exports when the file is gone. Raises InfrastructureError."""
    path, digest = _path_and_digest(spec)
    if path == BYTES:
        return
    try:
        with open_data(roots, path) as file:
            content = file.read(tokenizer_file.FILE_BYTES_MAX)
    except (OSError, ConfigurationError):
        return  # islands say so, who need it
    if blake2b(content, digest_size=16).hexdigest() == digest:
        put(run_dir, TOKENIZER, content)


def tokenizer_of(job: str, run_dir: Path, spec: Any, roots: AllowedRoots) -> tuple[IO[bytes], int]:
    """The file of a job's tokenizer as it was when the job was submitted, open, and its size. The caller closes it.

    Its digest is taken piece by piece: no request holds it in memory. ``spec`` is the stored specification. Raises NotFound
    where the job's tokens are bytes; Conflict where the file is another by now, or gone, and the run's folder has no copy.
    """
    path, digest = _path_and_digest(spec)
    if path == BYTES:
        raise NotFound(detail=f"Job {job} has no tokenizer's file: its tokens are bytes.")
    reason = ""
    copy, original = partial(open_below, run_dir, TOKENIZER), partial(open_data, roots, path)
    openings: tuple[Callable[[], IO[bytes]], ...] = (copy, original)  # earlier builds kept no copy
    for opening in openings:
        try:
            file = opening()
        except (OSError, ConfigurationError) as error:
            reason = f"{FIELD}: {path} cannot be read here ({first_line(error)})."
            continue
        size, digest_there = _measured(file)
        if digest_there == digest:
            file.seek(0)
            return file, size
        file.close()
        reason = f"{FIELD}: {path} has the digest {digest_there}, and job {job} was submitted with {digest}."
    remedy = "Put the file that the job was submitted with back there, or take your own copy of it."
    raise Conflict(detail=reason, remedy=remedy)


def _measured(file: IO[bytes]) -> tuple[int, str]:
    """The file's size and digest; what is longer than a tokenizer may be is read no further."""
    size, digest = 0, blake2b(digest_size=16)
    while size <= tokenizer_file.FILE_BYTES_MAX and (piece := file.read(PIECE_BYTES)):
        size += len(piece)
        digest.update(piece)
    return size, digest.hexdigest()


def _path_and_digest(spec: Any) -> tuple[str, str | None]:
    data = spec.get("data") if isinstance(spec, Mapping) else None
    section = data if isinstance(data, Mapping) else {}
    path = section.get("tokenizer", BYTES)
    return path if isinstance(path, str) else BYTES, section.get("tokenizer_digest")
