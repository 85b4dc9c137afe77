"""The manifest of a checkpoint and the parts of islands, as plain data. The manifest is written last and completes it.

   CHECKPOINT/manifest.json                 the fields below, and every file with its size and digest
   CHECKPOINT/fragment-PPPP.parameters      Θ of a fragment, a payload of ``parameters.wire_format``; .momentum
                                            likewise, and .residue if updates lose something in their codec
   CHECKPOINT/….blocks                      digests of the blocks of a file of which parts are read (``blocks``)
   CHECKPOINT/ISLAND/part.json              the position that the island's arrays belong to, and their files
   CHECKPOINT/ISLAND/arrays…                parameters and inner optimizer state

Every document that is read has all fields, each of its type and within bounds. Anyone who can write to the place of
checkpoints can make a manifest with a correct digest, so none is trusted: malformed content raises DataError, and
names cannot lead elsewhere. This module opens no files and decides nothing.

A sealed document is canonical JSON after the digest of exactly these bytes, so that damage is always detected:

   {"digest":"…","document":{…}}\\n

Every byte counts: a file is accepted only if writing the document again gives the same bytes, so a flipped bit is found
anywhere, even in a space or in the digest itself.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from typing import Any, TypeVar

from orchestrator.core.commands import UNCHANGED, ChangedSettings
from orchestrator.core.vocabulary import Epoch
from orchestrator.errors import DataError
from orchestrator.parameters.pieces import RoleRow
from orchestrator.system.roots import name_parts, shown

_CANONICAL: dict[str, Any] = {"sort_keys": True, "separators": (",", ":"), "allow_nan": False}
SCHEMA = "atoll-checkpoint/1"
MANIFEST, PART = "manifest.json", "part.json"
MANIFEST_BYTES_MAX, PART_BYTES_MAX = 32 << 20, 4 << 20
"""A thousand islands with a hundred fragments, with the files that Orbax writes, need 6 MB; as objects, ten times that."""
COUNT_MAX, NUMBER_MAX, SECONDS_MAX = 2**62, 2**31 - 1, 1e12
FRAGMENTS_MAX, PARTS_MAX, FILES_MAX, LEGS_MAX, TEXT_MAX = 10_000, 100_000, 1_000_000, 10_000, 1000
_INTERVAL, _NUMBERS = "sync_interval_steps", ("lr_ratio", "grace_cap_steps", "cost_max")
_DIGEST = re.compile(r"[0-9a-f]{16,128}")
T = TypeVar("T")


def seal(document: Mapping[str, Any]) -> bytes:
    """Return the document as the bytes of a file. It must be plain data: mappings by strings, lists, strings, numbers."""
    return json.dumps({"digest": digest_of(document), "document": document}, **_CANONICAL).encode() + b"\n"


def digest_of(document: Mapping[str, Any]) -> str:
    """Return the digest of the document."""
    return blake2b(json.dumps(document, **_CANONICAL).encode(), digest_size=16).hexdigest()


def unseal(content: bytes, name: str) -> dict[str, Any]:
    """Return the document. Raises DataError, with ``name``, for anything but the bytes of ``seal``."""
    try:
        sealed = json.loads(content)
        document = sealed["document"]
        same = seal(document) == content
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(detail=f"{name} is damaged: it cannot be read ({type(error).__name__}).") from error
    if not same or not isinstance(document, dict):
        raise DataError(detail=f"{name} is damaged: its content does not have its digest.")
    return document


@dataclass(frozen=True, slots=True)
class File:
    """A file by its path, relative to the document that lists it."""

    name: str
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class Part:
    """One island's state at its cut, without the arrays.

    ``versions[p]`` is the version of fragment p that it had adopted; ``step_counts`` and ``token_counts`` are its own work
    on it that no adopted version contains. Due points up to ``asked_step`` were offered. ``*_total`` are of this
    incarnation; ``cursor`` counts the batches drawn from its stream.
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
    """One fragment of Θ at the cut. ``step`` is the logical step of its last merge.

    ``roles`` are those of its tensors whose names do not show them.
    """

    version: int
    step: int
    digest: str
    roles: tuple[RoleRow, ...] = ()


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint. ``at`` is in seconds of the job, ``taken_at`` in Unix seconds; ``number`` counts a job's checkpoints
    from 1.

    tokens_trained   by all islands, at their cuts, in this job and in those it was resumed from
    merged_tokens    the part of these in Θ, by fragment
    cursors          for every data shard in the specification's order: the batches drawn from its stream
    legs             the cursors at each earlier resumption, first to last, in blocks (``learners.island_spec``)
    batch_sizes      of every data shard, in sequences
    granules         the block of each resumption, in sequences
    changed          the settings that operators had changed, of the job that took it

    A manifest of an earlier build has no ``batch_sizes`` and no ``granules``: they were ``training.batch_size`` then. It has
    no ``changed`` either.
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
    batch_sizes: tuple[int, ...]
    granules: tuple[int, ...] = ()
    changed: ChangedSettings = UNCHANGED
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


def decode_part(content: bytes, name: str) -> Part:
    """Return the part. Raises DataError, with ``name``, unless these are the bytes of one."""
    return _read(name, _part, unseal(content, name))


def encode(manifest: Manifest) -> bytes:
    return seal(asdict(manifest))


def manifest_digest(manifest: Manifest) -> str:
    return digest_of(asdict(manifest))


def decode(content: bytes, name: str) -> Manifest:
    """Return the manifest. Raises DataError, with ``name``, unless these are the bytes of one that this build can read."""
    return from_document(unseal(content, name), name)


def from_document(document: Any, name: str) -> Manifest:
    """Return the manifest with this plain form. Raises DataError as ``decode``."""
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        raise DataError(detail=f"{name} has the schema {shown(schema)}, but this build reads {SCHEMA!r}.")
    return _read(name, _manifest, document)


# ── the fields ────────────────────────────────────────────────────────────────────────────────────────────────────


def _manifest(document: Any) -> Manifest:
    earlier = {name for name in ("granules", "batch_sizes") if name not in document}
    values = _fields(Manifest, {"changed": asdict(UNCHANGED), **document, **dict.fromkeys(earlier)})
    if not isinstance(values["spec"], dict):
        raise _Unfit("spec", "is not an object")
    legs = _list(values["legs"], "legs", LEGS_MAX, lambda leg: _counts(leg, "legs", PARTS_MAX))
    cursors = _counts(values["cursors"], "cursors", PARTS_MAX)
    batch_sizes, granules = (
        [_batch_size(values["spec"])] * len(of) if name in earlier else values[name]
        for name, of in (("batch_sizes", cursors), ("granules", legs))
    )
    manifest = Manifest(
        job=_text(values["job"], "job"),
        number=_count(values["number"], "number", 1, NUMBER_MAX),
        at=_seconds(values["at"], "at"),
        taken_at=_seconds(values["taken_at"], "taken_at"),
        spec=values["spec"],
        fragments=_list(values["fragments"], "fragments", FRAGMENTS_MAX, _fragment),
        tokens_trained=_count(values["tokens_trained"], "tokens_trained"),
        merged_tokens=_counts(values["merged_tokens"], "merged_tokens", FRAGMENTS_MAX),
        cursors=cursors,
        legs=legs,
        batch_sizes=_list(batch_sizes, "batch_sizes", PARTS_MAX, lambda one: _count(one, "batch_sizes", 1, NUMBER_MAX)),
        granules=_list(granules, "granules", LEGS_MAX, lambda one: _count(one, "granules", 1, NUMBER_MAX)),
        parts=_list(values["parts"], "parts", PARTS_MAX, _part),
        files=_files(values["files"]),
        changed=_changed(values["changed"]),
    )
    _agree(manifest)
    return manifest


def _agree(manifest: Manifest) -> None:
    """Check that its lists have the same length, and that everything in a part is listed."""
    count, names = len(manifest.fragments), {file.name for file in manifest.files}
    if not count or len(manifest.merged_tokens) != count:
        raise _Unfit("merged_tokens", f"has {len(manifest.merged_tokens)} entries for {count} fragments")
    if not manifest.cursors or not all(manifest.legs):
        raise _Unfit("cursors", "of a resumption are missing")
    if len(manifest.granules) != len(manifest.legs) or len(manifest.batch_sizes) != len(manifest.cursors):
        raise _Unfit("granules", "and batch sizes are not one for each resumption and each cursor")
    if len({part.island for part in manifest.parts}) != len(manifest.parts):
        raise _Unfit("parts", "contains an island twice")
    if max(manifest.merged_tokens) > manifest.tokens_trained:
        raise _Unfit("merged_tokens", "is more than was trained")
    for part in manifest.parts:
        if len(part.versions) != count:
            raise _Unfit("versions", f"of {shown(part.island)} has {len(part.versions)} entries for {count} fragments")
        if strangers := {f"{part.island}/{file.name}" for file in part.files} - names:
            raise _Unfit("files", f"lacks {shown(min(strangers))}, which a part lists")


def _batch_size(spec: Mapping[str, Any]) -> Any:
    training = spec.get("training")
    return training.get("batch_size", 1) if isinstance(training, Mapping) else 1


def _changed(document: Any) -> ChangedSettings:
    values = _fields(ChangedSettings, document)
    counts = [None if values[name] is None else _count(values[name], name, 1) for name in ("quorum", _INTERVAL)]
    numbers = {name: None if values[name] is None else _seconds(values[name], name) for name in _NUMBERS}
    epoch, count = Epoch(_count(values["epoch"], "epoch")), _count(values["count"], "count")
    return ChangedSettings(epoch, count, quorum=counts[0], sync_interval_steps=counts[1], **numbers)


def _part(document: Any) -> Part:
    values = _fields(Part, document)
    island = values["island"]
    if len(name_parts(island)) != 1:
        raise _Unfit("island", f"is {shown(island)}, which is not a name")
    part = Part(
        island=island,
        incarnation=_count(values["incarnation"], "incarnation"),
        step=_count(values["step"], "step"),
        asked_step=_count(values["asked_step"], "asked_step"),
        steps_total=_count(values["steps_total"], "steps_total"),
        tokens_total=_count(values["tokens_total"], "tokens_total"),
        cursor=_count(values["cursor"], "cursor"),
        versions=_counts(values["versions"], "versions", FRAGMENTS_MAX),
        step_counts=_counts(values["step_counts"], "step_counts", FRAGMENTS_MAX),
        token_counts=_counts(values["token_counts"], "token_counts", FRAGMENTS_MAX),
        files=_files(values["files"]),
    )
    if not len(part.versions) == len(part.step_counts) == len(part.token_counts):
        raise _Unfit("versions", "and the counts of steps and tokens differ in length")
    return part


def _fragment(document: Any) -> Fragment:
    values = _fields(Fragment, {"roles": [], **document} if isinstance(document, dict) else document)
    version, step = _count(values["version"], "version"), _count(values["step"], "step")
    return Fragment(version, step, _hex(values["digest"]), _list(values["roles"], "roles", FILES_MAX, _role))


def _role(row: Any) -> RoleRow:
    if not isinstance(row, list | tuple) or [*map(type, row)] != [str, bool, int, bool]:
        raise _Unfit("roles", f"contains {shown(row)}, which is not a role")
    return _text(row[0], "roles"), row[1], _count(row[2], "roles"), row[3]


def _files(value: Any) -> tuple[File, ...]:
    files = _list(value, "files", FILES_MAX, _file)
    if len({file.name for file in files}) != len(files):
        raise _Unfit("files", "contains a name twice")
    return files


def _file(document: Any) -> File:
    values = _fields(File, document)
    return File("/".join(name_parts(values["name"])), _count(values["size"], "size"), _hex(values["digest"]))


class _Unfit(ValueError):
    """A field has a wrong value, and why."""

    def __str__(self) -> str:
        return " ".join(self.args)


def _read(name: str, read: Callable[[Any], T], document: Any) -> T:
    try:
        return read(document)
    except (_Unfit, DataError) as error:
        raise DataError(detail=f"{name} is not a document of this build: {error}.") from error


def _fields(kind: type, document: Any) -> dict[str, Any]:
    names = {field.name for field in fields(kind)}
    if not isinstance(document, dict):
        raise _Unfit(kind.__name__.lower(), f"is {shown(document)}, which is not an object")
    if wrong := names ^ document.keys():
        raise _Unfit(kind.__name__.lower(), f"has {len(wrong)} missing or unknown fields")
    return document


def _list(value: Any, name: str, count_max: int, read: Callable[[Any], T]) -> tuple[T, ...]:
    """Read a list of JSON, or the tuple from which it was written."""
    if not isinstance(value, list | tuple) or len(value) > count_max:
        raise _Unfit(name, f"is not a list of at most {count_max:,}")
    return tuple(read(one) for one in value)


def _counts(value: Any, name: str, count_max: int) -> tuple[int, ...]:
    return _list(value, name, count_max, lambda one: _count(one, name))


def _count(value: Any, name: str, least: int = 0, most: int = COUNT_MAX) -> int:
    if type(value) is not int or not least <= value <= most:  # Python's bool is an int
        raise _Unfit(name, f"is not a whole number from {least} to {most}")
    return value


def _seconds(value: Any, name: str) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or not 0 <= value <= SECONDS_MAX:
        raise _Unfit(name, f"is not a number of seconds up to {SECONDS_MAX:g}")
    return value  # type: ignore[no-any-return]


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or len(value) > TEXT_MAX or not value.isprintable():
        raise _Unfit(name, f"is not a text of at most {TEXT_MAX:,} printable characters")
    return value


def _hex(value: Any) -> str:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise _Unfit("digest", "is not a digest in hexadecimal")
    return value
