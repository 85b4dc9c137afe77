"""One merge as bytes: an entry of the journal, whole or recognisably not.

    prefix      magic "atollj1\\n", sizes of header (u32), parameters (u64) and momentum (u64), CRC-32 of prefix and header
    header      JSON: fragment, version, step, epoch, digest, base_digest, contributors, merge_seconds, roles
    parameters  Θ of the fragment as a payload of ``wire_format``, with a checksum of its own
    momentum    μ of the fragment, likewise

Everything is float32, bit for bit. The sizes are believed only once the checksum over them holds, so a torn entry is known
as torn and an entry behind a damaged one can still be found. ``base_digest`` chains an entry to the one before it.

Refuses to know: files (``storage``), and what merges are for.
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass, fields
from typing import Any

from orchestrator.core.vocabulary import Epoch, FragmentId, Version
from orchestrator.errors import DataError
from orchestrator.parameters import tensors, wire_format
from orchestrator.parameters.codec.registry import JOURNAL_CODEC
from orchestrator.parameters.outer_state import FragmentState
from orchestrator.parameters.roles import RoleRow, from_rows

_MAGIC = b"atollj1\n"
_PREFIX = struct.Struct("<8sIQQ")
_CHECKSUM = struct.Struct("<I")
PREFIX_BYTES = _PREFIX.size + _CHECKSUM.size
HEADER_BYTES_MAX = 1 << 24
"""A header names contributors; sixteen megabytes of them are no header."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of a merge, besides its tensors. ``contributors`` are (island, weight), as they were merged.

    ``roles`` are those of the fragment's tensors, where the model says something else than their names.
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


@dataclass(frozen=True, slots=True)
class Sizes:
    header: int
    parameters: int
    momentum: int

    @property
    def total(self) -> int:
        return PREFIX_BYTES + self.header + self.parameters + self.momentum


def payloads_of(state: FragmentState) -> tuple[bytes, bytes]:
    """Θ and μ of the fragment as an entry holds them."""
    return wire_format.encode(state.parameters, JOURNAL_CODEC), wire_format.encode(state.momentum, JOURNAL_CODEC)


def encode(facts: Facts, parameters: bytes, momentum: bytes) -> list[bytes]:
    """The entry in parts, to be written one after another. Both payloads are those of ``payloads_of``."""
    header = json.dumps({name: getattr(facts, name) for name in facts.__slots__}, separators=(",", ":")).encode()
    prefix = _PREFIX.pack(_MAGIC, len(header), len(parameters), len(momentum))
    return [prefix, _CHECKSUM.pack(zlib.crc32(header, zlib.crc32(prefix))), header, parameters, momentum]


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
    sizes = sizes_of(beginning)
    header = beginning[PREFIX_BYTES:][: sizes.header]
    (stated,) = _CHECKSUM.unpack_from(beginning, _PREFIX.size)
    computed = zlib.crc32(header, zlib.crc32(beginning[: _PREFIX.size]))
    if len(header) != sizes.header or computed != stated:
        raise DataError(detail=f"The head of a journal's entry is damaged: checksum {computed:08x}, not {stated:08x}.")
    return _facts(json.loads(header))


def decode(entry: bytes) -> tuple[Facts, FragmentState]:
    """The merge that the bytes hold. Raises DataError for anything that is not a whole entry, unchanged."""
    facts, sizes = facts_of(entry), sizes_of(entry)
    if len(entry) != sizes.total:
        raise DataError(detail=f"An entry of the journal announces {sizes.total} bytes and has {len(entry)}.")
    body = memoryview(entry)[PREFIX_BYTES + sizes.header :]
    parameters = wire_format.decode(body[: sizes.parameters])
    momentum = wire_format.decode(body[sizes.parameters :])
    if (computed := tensors.digest(parameters)) != facts.digest:
        raise DataError(detail=f"The journal's entry should hold {facts.digest} and holds {computed}.")
    return facts, FragmentState(facts.version, parameters, momentum, facts.digest, from_rows(facts.roles))


def _facts(document: dict[str, Any]) -> Facts:
    document = {"roles": [], **document}  # entries of older builds have none
    try:
        values = {field.name: document[field.name] for field in fields(Facts)}
    except KeyError as error:
        raise DataError(detail=f"The head of a journal's entry lacks {error}; another build wrote it.") from error
    contributors = tuple((island, weight) for island, weight in values["contributors"])
    return Facts(**{**values, "contributors": contributors, "roles": tuple(map(tuple, values["roles"]))})
