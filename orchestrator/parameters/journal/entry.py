"""One merge as bytes: an entry of the journal, whole or recognisably not.

    prefix      magic "atollj3\\n", sizes of header (u32) and body (u64), CRC-32C of prefix and header
    header      JSON: fragment, version, step, epoch, digest, base_digest, contributors, merge_seconds, roles, the outer
                learning rate's ratio; what the body is, and the sizes of its payloads
    body        payloads of ``wire_format``, each with a checksum of its own: Θ, μ and the residue of the fragment
                (``state``), what each contributor gave (``inputs``), or their average by which the merge stepped
                (``outer_gradient``)

A state and an outer gradient are float32, bit for bit. Inputs are what the merge read, in the codec in which they
travelled. Taken again from the version before, with the contributors' weights or with their average, the same merge gives
the same bits, and so the same digest.

The sizes are believed only once the checksum over them holds, so a torn entry is known as torn and an entry behind a
damaged one can still be found. ``base_digest`` chains an entry to the one before it.

Refuses to know: files (``storage``), what merges are for, and how one is taken.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from crc32c import crc32c

from orchestrator.core.vocabulary import Epoch, FragmentId, Version
from orchestrator.errors import DataError
from orchestrator.parameters import tensors, wire_format
from orchestrator.parameters.outer_state import FragmentState
from orchestrator.parameters.pieces import RoleRow, from_rows
from orchestrator.parameters.wire_format import EncodedTensors

_MAGIC = b"atollj3\n"
_PREFIX = struct.Struct("<8sIQ")
_CHECKSUM = struct.Struct("<I")
PREFIX_BYTES = _PREFIX.size + _CHECKSUM.size
HEADER_BYTES_MAX = 1 << 24
"""A header names contributors; sixteen megabytes of them are no header."""
_STATE: Literal["state"] = "state"
_INPUTS: Literal["inputs"] = "inputs"
_OUTER_GRADIENT: Literal["outer_gradient"] = "outer_gradient"


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of a merge, besides its tensors. ``contributors`` are (island, weight), as they were merged.

    ``roles`` are those of the fragment's tensors, where the model says something else than their names. Entries of before
    the outer learning rate changed in a job have no ``outer_lr_ratio``.
    """

    fragment: FragmentId
    version: Version
    step: int
    epoch: Epoch
    digest: str
    base_digest: str
    contributors: tuple[tuple[str, float], ...]
    merge_seconds: float
    roles: tuple[RoleRow, ...] = ()
    outer_lr_ratio: float = 1.0


@dataclass(frozen=True, slots=True)
class Sizes:
    header: int
    body: int

    @property
    def total(self) -> int:
        return PREFIX_BYTES + self.header + self.body


@dataclass(frozen=True, slots=True)
class OuterGradient:
    """The average of a merge's displacements, weighted already: float32, from the version before."""

    average: EncodedTensors


Content = FragmentState | tuple[EncodedTensors, ...] | OuterGradient
"""The fragment as it stands after the merge; the merge's inputs in the order of the contributors; or their average."""


def encode(facts: Facts, content: Content) -> list[bytes | memoryview]:
    """The entry in parts, to be written one after another."""
    payloads = _payloads(content)
    document = {name: getattr(facts, name) for name in facts.__slots__}
    document |= {"body": _kind(content), "payloads": [len(payload) for payload in payloads]}
    header = json.dumps(document, separators=(",", ":")).encode()
    prefix = _PREFIX.pack(_MAGIC, len(header), sum(map(len, payloads)))
    return [prefix, _CHECKSUM.pack(crc32c(header, crc32c(prefix))), header, *payloads]


def sizes_of(beginning: bytes) -> Sizes:
    """The sizes of the entry that begins so (``PREFIX_BYTES``). Raises DataError if it is none; nothing is verified yet."""
    if len(beginning) < PREFIX_BYTES:
        raise DataError(detail=f"{len(beginning)} bytes are too few to begin an entry of the journal.")
    magic, *sizes = _PREFIX.unpack_from(beginning)
    if magic != _MAGIC:
        raise DataError(detail=f"An entry of the journal begins with {_MAGIC!r}, this one with {magic!r}.")
    if sizes[0] > HEADER_BYTES_MAX:
        raise DataError(detail=f"An entry of the journal announces a header of {sizes[0]} bytes.")
    return Sizes(*sizes)


def facts_of(beginning: bytes) -> Facts:
    """The facts of the entry, from its prefix and header. Raises DataError unless their checksum holds."""
    return _facts(_header(beginning))


def decode(entry: bytes) -> tuple[Facts, Content]:
    """The merge that the bytes hold. Raises DataError for anything that is not a whole entry, unchanged."""
    document, sizes = _header(entry), sizes_of(entry)
    facts = _facts(document)
    if len(entry) != sizes.total:
        raise DataError(detail=f"An entry of the journal announces {sizes.total} bytes and has {len(entry)}.")
    payloads = _cut(memoryview(entry)[PREFIX_BYTES + sizes.header :], document["payloads"])
    if document["body"] == _INPUTS:
        if len(payloads) != len(facts.contributors):
            raise DataError(detail=f"{len(payloads)} inputs came for {len(facts.contributors)} contributors.")
        return facts, tuple(map(wire_format.parse, payloads))
    if document["body"] == _OUTER_GRADIENT:
        (average,) = map(wire_format.parse, payloads)
        return facts, OuterGradient(average)
    if document["body"] != _STATE:
        raise DataError(detail=f"An entry of the journal holds {document['body']!r}, which this build does not know.")
    parameters, momentum, residue = map(wire_format.decode, payloads)
    if (computed := tensors.digest(parameters)) != facts.digest:
        raise DataError(detail=f"The journal's entry should hold {facts.digest} and holds {computed}.")
    roles = from_rows(facts.roles)
    return facts, FragmentState(facts.version, parameters, momentum, facts.digest, roles, residue)


def _kind(content: Content) -> Literal["state", "inputs", "outer_gradient"]:
    if isinstance(content, FragmentState):
        return _STATE
    return _OUTER_GRADIENT if isinstance(content, OuterGradient) else _INPUTS


def _payloads(content: Content) -> list[memoryview]:
    if isinstance(content, FragmentState):
        return [wire_format.encode(arrays) for arrays in content.arrays()]
    if isinstance(content, OuterGradient):
        return [wire_format.written(content.average)]
    return [wire_format.written(displacement) for displacement in content]


def _header(beginning: bytes) -> dict[str, Any]:
    sizes = sizes_of(beginning)
    header = beginning[PREFIX_BYTES:][: sizes.header]
    (stated,) = _CHECKSUM.unpack_from(beginning, _PREFIX.size)
    computed = crc32c(header, crc32c(beginning[: _PREFIX.size]))
    if len(header) != sizes.header or computed != stated:
        raise DataError(detail=f"The head of a journal's entry is damaged: checksum {computed:08x}, not {stated:08x}.")
    document: dict[str, Any] = json.loads(header)
    return document


def _cut(body: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    payloads, start = [], 0
    for size in sizes:
        payloads.append(body[start : start + size])
        start += size
    return payloads


def _facts(document: dict[str, Any]) -> Facts:
    document = {"outer_lr_ratio": 1.0, **document}
    try:
        values = {field.name: document[field.name] for field in fields(Facts)}
    except KeyError as error:
        raise DataError(detail=f"The head of a journal's entry lacks {error}; another build wrote it.") from error
    contributors = tuple((island, weight) for island, weight in values["contributors"])
    return Facts(**{**values, "contributors": contributors, "roles": tuple(map(tuple, values["roles"]))})
