"""The index of a job that is submitted: it is whole, fits the job's data as far as that is seen here, and its digest becomes
the job's.

Files that only the nodes have are theirs to compare; every island does so again, and also looks at how files are cut.
"""

from __future__ import annotations

from orchestrator import data_index
from orchestrator.bounds import BYTES
from orchestrator.config import JobSpec
from orchestrator.data_index import FIELD
from orchestrator.errors import ConfigurationError, InvalidJobSpec, OutsideRoots, Problem
from orchestrator.roots import AllowedRoots, data_bytes

DIGEST = "data.index_digest"


def with_index_digest(spec: JobSpec, roots: AllowedRoots) -> JobSpec:
    """The specification, which has its tokenizer's digest, with that of its index too.

    Raises InvalidJobSpec; a file outside the roots is others' business.
    """
    section = spec.data
    if section.index is None:
        return spec
    try:
        index, digest = data_index.read(roots, section.index)
    except OutsideRoots:
        return spec
    except ConfigurationError as error:
        message = str(error).removeprefix(f"{FIELD}: ")
        raise InvalidJobSpec(problems=(Problem(FIELD, message, "Correct the path, or leave it out."),)) from error
    if section.index_digest not in (None, digest):
        message = f"is {section.index_digest}, and the file has {digest}."
        raise InvalidJobSpec(problems=(Problem(DIGEST, message, "Leave it out, or use the file that it is of."),))
    tokenizer = data_index.counted_with(section.tokenizer_digest or BYTES, isinstance(section.begin_token, int))
    problem = data_index.misfit(index, section.model_dump(mode="json"), tokenizer, lambda path: _size(roots, path))
    if problem is not None:
        raise InvalidJobSpec(problems=(problem,))
    return spec.model_copy(update={"data": section.model_copy(update={"index_digest": digest})})


def _size(roots: AllowedRoots, path: str) -> int | None:
    """None for a file of a store, for that takes its time, and for one that is not on this machine."""
    if "://" in path:
        return None
    try:
        return data_bytes(roots, path)
    except (OSError, ConfigurationError):
        return None
