"""What is in a checkpoint, as plain data: the manifest, which is written last and makes it one, and islands' parts.

    CHECKPOINT/manifest.json                 all of this, and every file with its size and digest
    CHECKPOINT/fragment-PPPP.parameters      Θ of a fragment, a payload of ``merge.wire``; .momentum likewise
    CHECKPOINT/ISLAND/part.json              what the island's arrays belong to, and their files
    CHECKPOINT/ISLAND/arrays…                parameters and inner optimizer state

Responsible for the words; that what is read was written so. Refuses to know files, and to decide anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from orchestrator.checkpoints.sealed import digest_of, seal, unseal
from orchestrator.errors import DataError

SCHEMA = "atoll-checkpoint/1"
MANIFEST, PART = "manifest.json", "part.json"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class File:
    """A file by its path from where it is listed."""

    name: str
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class Part:
    """One island's state at its cut, but for the arrays.

    ``versions[p]`` is what it had adopted of fragment p, ``step_counts`` and ``token_counts`` its own work on that since
    which no adopted version holds. Due points up to ``asked_step`` were offered. ``*_total`` are of this incarnation;
    ``cursor`` counts the batches drawn of its stream.
    """

    island: str
    incarnation: int
    step: int
    asked_step: int
    steps_total: int
    tokens_total: int
    cursor: int
    versions: tuple[int, ...]
    step_counts: tuple[int, ...]
    token_counts: tuple[int, ...]
    files: tuple[File, ...] = ()


@dataclass(frozen=True, slots=True)
class Fragment:
    """One fragment of Θ at the cut: ``step`` is the logical step of its last merge."""

    version: int
    step: int
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """``at`` is in seconds of the job, ``taken_at`` in Unix seconds; ``number`` counts the job's checkpoints from 1.

    tokens_trained   by all islands, at their cuts, in this job and in those it was resumed from
    merged_tokens    of these, in Θ, by fragment
    cursors          of every data shard in the specification's order: how many batches of its stream were drawn
    legs             the cursors at each earlier resumption, first to last (``learners.lanes``)
    """

    job: str
    number: int
    at: float
    taken_at: float
    spec: Mapping[str, Any]
    fragments: tuple[Fragment, ...]
    tokens_trained: int
    merged_tokens: tuple[int, ...]
    cursors: tuple[int, ...]
    legs: tuple[tuple[int, ...], ...]
    parts: tuple[Part, ...]
    files: tuple[File, ...]
    schema: str = SCHEMA

    @property
    def byte_count(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def global_version(self) -> int:
        return sum(fragment.version for fragment in self.fragments)


def encode_part(part: Part) -> bytes:
    return seal(asdict(part))


def part_digest(part: Part) -> str:
    return digest_of(asdict(part))


def decode_part(content: bytes, what: str) -> Part:
    """Raises DataError, naming ``what``, unless these are the bytes of a part."""
    return _part(unseal(content, what), what)


def encode(manifest: Manifest) -> bytes:
    return seal(asdict(manifest))


def decode(content: bytes, what: str) -> Manifest:
    """Raises DataError, naming ``what``, unless these are the bytes of a manifest that this build can read."""
    return from_document(unseal(content, what), what)


def from_document(document: Mapping[str, Any], what: str) -> Manifest:
    """The manifest that this is the plain form of. Raises DataError as ``decode``."""
    if document.get("schema") != SCHEMA:
        raise DataError(detail=f"{what} is of schema {document.get('schema')!r}; this build reads {SCHEMA!r}.")
    made = _made(Manifest, document, what)
    parts = tuple(_part(part, what) for part in document["parts"])
    files = tuple(_made(File, file, what) for file in document["files"])
    fragments = tuple(_made(Fragment, fragment, what) for fragment in document["fragments"])
    legs = tuple(tuple(leg) for leg in document["legs"])
    return Manifest(**{**made_fields(made), "parts": parts, "files": files, "fragments": fragments, "legs": legs})


def made_fields(made: Any) -> dict[str, Any]:
    return {field.name: getattr(made, field.name) for field in fields(made)}


def _part(document: Mapping[str, Any], what: str) -> Part:
    part = _made(Part, document, what)
    return Part(**{**made_fields(part), "files": tuple(_made(File, file, what) for file in document["files"])})


def _made(kind: type[T], document: Mapping[str, Any], what: str) -> T:
    try:
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in document.items()}
        return kind(**values)
    except (TypeError, AttributeError) as error:
        raise DataError(detail=f"{what} was written by another build: {error}.") from error
