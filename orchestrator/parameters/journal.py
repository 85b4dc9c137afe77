"""The journal: merges as entries, in append-only segments on disk, and its reconciliation with the tape.

Segments are per fragment, ``fragment-PPPP-SSSSSS.journal``, with a few entries in each. An entry is durable, as the policy
requires, when ``append`` returns. A torn end is cut off when the journal is opened. Older segments are removed once
``versions_kept`` durable versions need nothing in them. An entry of inputs needs those before it, back to a state: a version
exists only while all of them do. A failed append leaves nothing that counts: its rest is cut off, and the next attempt
begins a new segment, because after a failed fsync the system may report pages as written that are not.

   sync                      every merge is on the disk before it is announced
   async (merges_max)        at most this many merges are only with the operating system: they survive the process, but
                             perhaps not a loss of power

An entry is one merge, either complete or recognisably not:

   prefix      magic "atollj3\\n", sizes of header (u32) and body (u64), CRC-32C of prefix and header
   header      JSON: fragment, version, step, epoch, digest, base_digest, contributors, merge_seconds, roles, the outer
               learning rate's ratio, the outer gradient's norm if it has a limit; the kind of the body, and the sizes of its
               payloads
   body        payloads of ``wire_format``, each with its own checksum: Θ, μ and the residue of the fragment
               (``state``), each contributor's displacement (``inputs``), or their average by which the merge stepped
               (``outer_gradient``)

A state and an outer gradient are float32, bit for bit. Inputs are in the codec in which they travelled. Repeating a merge
from the version before, with the contributors' weights or with their average, gives the same bits, and so the same digest.
The sizes are used only once the checksum over them is right, so a torn entry is recognised and an entry after a damaged one
can still be found. ``base_digest`` chains an entry to the one before it.

The tape has the decisions, the journal their results. A merge is on the tape as decided before it is made, and in the
journal before it is on the tape as made. So a fragment's newest entry is the tape's version (then a merge in progress is
lost), or the next one. In that case the tape has decided on it, unless exactly that end of the tape was damaged and cut off:
that merge is dropped. Anything else means files of two jobs, or files that were cut, and nothing may continue from there
unnoticed.

The caller retries, because it knows whether there still is a job. Several threads may append entries of different fragments.
"""

from __future__ import annotations

import json
import re
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from crc32c import crc32c

from orchestrator.core.fragment_round import FragmentRound
from orchestrator.core.vocabulary import Epoch, FragmentId, RoundPhase, Version
from orchestrator.errors import DataError
from orchestrator.parameters import tensors, wire_format
from orchestrator.parameters.outer_state import FragmentState
from orchestrator.parameters.pieces import RoleRow, from_rows
from orchestrator.parameters.wire_format import EncodedTensors
from orchestrator.system.disk import Disk, LocalDisk

_MAGIC = b"atollj3\n"
_PREFIX = struct.Struct("<8sIQ")
_CHECKSUM = struct.Struct("<I")
PREFIX_BYTES = _PREFIX.size + _CHECKSUM.size
HEADER_BYTES_MAX = 1 << 24
"""Larger than any header, which names contributors."""
_STATE: Literal["state"] = "state"
_INPUTS: Literal["inputs"] = "inputs"
_OUTER_GRADIENT: Literal["outer_gradient"] = "outer_gradient"
ENTRIES_PER_SEGMENT = 4
"""Few, because a segment is removed as a whole: a fragment uses at most twice this and ``versions_kept`` in entries."""
SEGMENT_BYTES_FULL = 64 << 20
"""A segment of this size takes no more entries, so that large fragments are not kept eight times."""
SUFFIX = ".journal"
_NAME = re.compile(rf"fragment-([0-9]{{4,}})-([0-9]{{8,}}){re.escape(SUFFIX)}")


def undecided_merges(
    rounds: Sequence[FragmentRound], newest: Callable[[FragmentId], Version | None]
) -> tuple[FragmentId, ...]:
    """Return the fragments whose newest merge the tape has not decided on, because its end was cut off.

    Such a merge was never announced, since its announcement comes later on the tape.
    """
    ahead = (r.fragment for r in rounds if newest(r.fragment) == r.version + 1 and r.phase is not RoundPhase.MERGING)
    return tuple(ahead)


def lost_merges(
    rounds: Sequence[FragmentRound], newest: Callable[[FragmentId], Version | None]
) -> tuple[FragmentId, ...]:
    """Return the fragments whose last version the journal has lost, but not the one before: a sign of damage."""
    return tuple(r.fragment for r in rounds if newest(r.fragment) == r.version - 1)


def unrecorded_merges(
    rounds: Sequence[FragmentRound], newest: Callable[[FragmentId], Version | None], *, over: bool
) -> tuple[FragmentId, ...]:
    """Return the fragments whose journalled merge is not yet on the tape as made.

    A job that is ``over`` (cancelled during a merge) has none. Raises DataError if the two are not of one job.
    """
    unheard = []
    for current in rounds:
        held = newest(current.fragment)
        if held is None or held < current.version:
            raise DataError(
                detail=f"The tape has fragment {current.fragment} at version {current.version}, but the journal "
                f"{'has nothing of it' if held is None else f'only goes up to version {held}'}: merges that islands "
                "already hold are lost. With durability async a loss of power can cause that; sync prevents it."
            )
        if held == current.version or over:
            continue
        if held > current.version + 1 or current.phase is not RoundPhase.MERGING:
            raise DataError(
                detail=f"The journal has version {held} of fragment {current.fragment}, but the tape, at version "
                f"{current.version}, never decided on it: they are of different jobs, or the tape was cut."
            )
        unheard.append(current.fragment)
    return tuple(unheard)


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of a merge, besides its tensors. ``contributors`` are (island, weight), in the order of the merge.

    ``roles`` are those of the fragment's tensors whose names do not show them. ``gradient_norm`` is that of the outer
    gradient before it was clipped, None without a limit. ``router_distance`` and ``router_travel`` are those of
    ``OuterState.router_spread``, None without routers. Entries of earlier builds lack the last four, or some of them: the
    ratio is 1 then.
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
    gradient_norm: float | None = None
    router_distance: float | None = None
    router_travel: float | None = None


@dataclass(frozen=True, slots=True)
class Sizes:
    header: int
    body: int

    @property
    def total(self) -> int:
        return PREFIX_BYTES + self.header + self.body


@dataclass(frozen=True, slots=True)
class OuterGradient:
    """The weighted average of a merge's displacements: float32, from the version before."""

    average: EncodedTensors


Content = FragmentState | tuple[EncodedTensors, ...] | OuterGradient
"""The fragment's state after the merge; or the merge's inputs in the order of the contributors; or their average."""


def continues(announced: Facts, entries: Mapping[Version, Facts], *, with_next: bool = True) -> bool:
    """Return whether a shard whose journal has these entries of a fragment may continue from them.

    They have the version that was announced, bit for bit, and at most one more, if ``with_next``: a merge of that version,
    not yet announced.
    """
    own, newest = entries.get(announced.version), max(entries, default=None)
    if own is None or newest is None or own.digest != announced.digest:
        return False
    is_next = newest == announced.version + 1 and entries[newest].base_digest == announced.digest
    return newest == announced.version or (is_next and with_next)


def set_back(before: Facts, lost: Version, epoch: Epoch) -> Facts:
    """Return the facts of the entry by which a fragment whose last version is lost goes on.

    It has the content of the version ``before`` and the number after the lost one, but no base and no contributors.
    """
    entry = replace(before, version=Version(lost + 1), epoch=epoch, base_digest="", contributors=())
    return replace(entry, gradient_norm=None, router_distance=None, router_travel=None)


def is_set_back(facts: Facts) -> bool:
    """Return whether the entry is one of ``set_back``, or a job's first."""
    return not facts.base_digest and not facts.contributors


def encode(facts: Facts, content: Content) -> list[bytes | memoryview]:
    """Return the entry in parts, to be written one after another."""
    payloads = _payloads(content)
    document = {name: getattr(facts, name) for name in facts.__slots__}
    document |= {"body": _kind(content), "payloads": [len(payload) for payload in payloads]}
    header = json.dumps(document, separators=(",", ":")).encode()
    prefix = _PREFIX.pack(_MAGIC, len(header), sum(map(len, payloads)))
    return [prefix, _CHECKSUM.pack(crc32c(header, crc32c(prefix))), header, *payloads]


def sizes_of(beginning: bytes) -> Sizes:
    """Return the sizes of an entry from its first ``PREFIX_BYTES``, unverified. Raises DataError if it is not an entry."""
    if len(beginning) < PREFIX_BYTES:
        raise DataError(detail=f"{len(beginning)} bytes are too few for the beginning of a journal entry.")
    magic, *sizes = _PREFIX.unpack_from(beginning)
    if magic != _MAGIC:
        raise DataError(detail=f"A journal entry begins with {_MAGIC!r}, but this one with {magic!r}.")
    if sizes[0] > HEADER_BYTES_MAX:
        raise DataError(detail=f"A journal entry announces a header of {sizes[0]} bytes, which is too large.")
    return Sizes(*sizes)


def facts_of(beginning: bytes) -> Facts:
    """Return the facts of the entry, from its prefix and header. Raises DataError if their checksum is wrong."""
    return _facts(_header(beginning))


def decode(entry: bytes) -> tuple[Facts, Content]:
    """Return the merge in these bytes. Raises DataError unless they are a complete, unchanged entry."""
    document, sizes = _header(entry), sizes_of(entry)
    facts = _facts(document)
    if len(entry) != sizes.total:
        raise DataError(detail=f"A journal entry announces {sizes.total} bytes but has {len(entry)}.")
    payloads = _cut(memoryview(entry)[PREFIX_BYTES + sizes.header :], document["payloads"])
    if document["body"] == _INPUTS:
        if len(payloads) != len(facts.contributors):
            raise DataError(detail=f"The entry has {len(payloads)} inputs for {len(facts.contributors)} contributors.")
        return facts, tuple(map(wire_format.parse, payloads))
    if document["body"] == _OUTER_GRADIENT:
        (average,) = map(wire_format.parse, payloads)
        return facts, OuterGradient(average)
    if document["body"] != _STATE:
        raise DataError(detail=f"A journal entry contains {document['body']!r}, which this build does not know.")
    parameters, momentum, residue = map(wire_format.decode, payloads)
    if (computed := tensors.digest(parameters)) != facts.digest:
        raise DataError(detail=f"The journal's entry should have the digest {facts.digest} but has {computed}.")
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
        raise DataError(detail=f"The head of a journal entry is damaged: checksum {computed:08x}, not {stated:08x}.")
    document: dict[str, Any] = json.loads(header)
    return document


def _cut(body: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    payloads, start = [], 0
    for size in sizes:
        payloads.append(body[start : start + size])
        start += size
    return payloads


def _facts(document: dict[str, Any]) -> Facts:
    newer = {"outer_lr_ratio": 1.0, "gradient_norm": None, "router_distance": None, "router_travel": None}
    document = newer | document
    try:
        values = {field.name: document[field.name] for field in fields(Facts)}
    except KeyError as error:
        raise DataError(detail=f"The head of a journal entry lacks {error}; another build wrote it.") from error
    contributors = tuple((island, weight) for island, weight in values["contributors"])
    return Facts(**{**values, "contributors": contributors, "roles": tuple(map(tuple, values["roles"]))})


def segment_name(fragment: FragmentId, number: int) -> str:
    return f"fragment-{fragment:04d}-{number:08d}{SUFFIX}"


def parse_segment_name(name: str) -> tuple[FragmentId, int] | None:
    """Return the fragment and number of the segment with this name, or None if it is not a segment's name."""
    if (match := _NAME.fullmatch(name)) is None:
        return None
    fragment, number = FragmentId(int(match[1])), int(match[2])
    return (fragment, number) if name == segment_name(fragment, number) else None


@dataclass(frozen=True, slots=True)
class Place:
    """The place of an entry, and whether it is a state."""

    path: Path
    start: int
    count: int
    is_state: bool


@dataclass(slots=True)
class _Segment:
    path: Path
    size: int = 0
    entries: dict[Version, Place] = field(default_factory=dict)
    full: bool = False
    synced: bool = True
    sync_failed: bool = False
    """Its sync failed: the system may report as written what is not."""


class Journal:
    """The open journal.

    ``damage`` describes what was cut off on opening; ``foreign`` names the files that it does not read.
    """

    def __init__(
        self,
        folder: Path,
        *,
        versions_kept: int = 1,
        merges_max: int = 0,
        disk: Disk | None = None,
        before_sync: Callable[[], None] = lambda: None,
    ) -> None:
        """Open or create the journal in ``folder``; ``merges_max`` 0 is sync. Raises OSError if it cannot be read.

        ``before_sync`` makes durable what entries depend on (the tape with their decisions), or raises OSError.
        """
        self._folder, self._disk, self._before_sync = folder, disk or LocalDisk(), before_sync
        self._writing = threading.Lock()  # merges' threads append while the pump settles earlier entries
        self._versions_kept, self._merges_max = versions_kept, merges_max
        self._segments: dict[FragmentId, list[_Segment]] = {}
        self._unsynced = 0
        self._numbers = 0
        self.damage: list[str] = []
        self.foreign: list[str] = []
        for name, size in sorted(self._disk.files(folder).items()):
            if (parsed := parse_segment_name(name)) is not None:
                self._open(name, size, *parsed)
            else:
                self.foreign.append(name)
        for fragment, segments in self._segments.items():
            newest = max(self.versions(fragment), default=Version(-1))
            for segment in segments:
                self._cut_off_unusable(segment, newest)

    def append(self, facts: Facts, content: Content) -> None:
        """Keep a merge. Raises OSError on failure; then nothing of it counts, and the call may be repeated."""
        parts = encode(facts, content)
        with self._writing:
            self._append(facts, parts, isinstance(content, FragmentState))

    def settle(self) -> None:
        """Make durable what was there on opening, so that it may be announced. Raises OSError; may be repeated."""
        with self._writing:
            self._sync_all()

    def clear(self) -> None:
        """Forget everything, because it is a beginning that was never announced."""
        for segments in self._segments.values():
            for segment in segments:
                self._disk.remove(segment.path)
        self._segments.clear()

    def forget(self, fragment: FragmentId) -> None:
        """Forget the fragment, whose entries are not those that were announced. Raises OSError, and may be repeated."""
        with self._writing:
            for segment in self._segments.get(fragment, []):
                self._disk.remove(segment.path)
            self._segments.pop(fragment, None)

    def drop_newest(self, fragment: FragmentId) -> str:
        """Forget the fragment's newest merge and return its description. Raises OSError."""
        segment = max(self._segments[fragment], key=lambda one: max(one.entries, default=-1))
        version = max(segment.entries)
        segment.size = segment.entries.pop(version).start
        self._disk.truncate(segment.path, segment.size)
        segment.synced = False
        return f"{segment.path.name}: version {version}, whose decision is not on the tape"

    @property
    def fragments(self) -> tuple[FragmentId, ...]:
        """The fragments that have a file, in order."""
        return tuple(sorted(self._segments))

    def versions(self, fragment: FragmentId) -> tuple[Version, ...]:
        """Return the versions of the fragment that can be restored, in order."""
        places = self._places(fragment)
        whole: list[Version] = []
        for version in sorted(places):
            if places[version].is_state or (whole and whole[-1] == version - 1):
                whole.append(version)
        return tuple(whole)

    def newest(self, fragment: FragmentId) -> Version | None:
        return max(self.versions(fragment), default=None)

    def facts(self, fragment: FragmentId, version: Version) -> Facts:
        """Return the facts of that merge. Raises DataError if it is missing or damaged."""
        place = self._place(fragment, version)
        sizes = sizes_of(self._disk.read(place.path, place.start, PREFIX_BYTES))
        return facts_of(self._disk.read(place.path, place.start, PREFIX_BYTES + sizes.header))

    def entries(self, fragment: FragmentId, version: Version) -> list[tuple[Facts, Content]]:
        """Return the entries that give the fragment at that version: a state, then the merges since.

        Raises DataError if one is missing or damaged.
        """
        self._place(fragment, version)
        places = self._places(fragment)
        first = max(v for v in places if v <= version and places[v].is_state)
        read = (places[Version(v)] for v in range(first, version + 1))
        return [decode(self._disk.read(place.path, place.start, place.count)) for place in read]

    def _place(self, fragment: FragmentId, version: Version) -> Place:
        if version not in (whole := self.versions(fragment)):
            raise DataError(
                detail=f"The journal {self._folder} lacks version {version} of fragment {fragment}; it has "
                f"{', '.join(map(str, whole)) or 'none'}."
            )
        return self._places(fragment)[version]

    def _places(self, fragment: FragmentId) -> dict[Version, Place]:
        """Return the place of each version; of repeated ones the later."""
        return {v: place for segment in self._segments.get(fragment, []) for v, place in segment.entries.items()}

    # ── helpers ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _append(self, facts: Facts, parts: Sequence[bytes | memoryview], is_state: bool) -> None:
        segments = self._segments.setdefault(facts.fragment, [])
        if not segments or segments[-1].full:
            segments.append(self._begun(facts.fragment))
        segment = segments[-1]
        count = sum(len(part) for part in parts)
        try:
            self._disk.append(segment.path, parts)
            segment.synced = False
            if self._unsynced + 1 > self._merges_max:
                self._sync_all()
            else:
                self._unsynced += 1
        except OSError:
            segment.full = True  # for the next attempt
            with suppress(OSError):
                self._disk.truncate(segment.path, segment.size)
            raise
        segment.entries[facts.version] = Place(segment.path, segment.size, count, is_state)
        segment.size += count
        segment.full = len(segment.entries) >= ENTRIES_PER_SEGMENT or segment.size >= SEGMENT_BYTES_FULL
        if self._unsynced == 0:
            self._drop_old()

    def _sync_all(self) -> None:
        self._before_sync()
        for fragment, segments in self._segments.items():
            for n, segment in enumerate(segments):
                if segment.sync_failed and segment.entries:
                    segment = segments[n] = self._copied(fragment, segment)
                if not segment.synced:
                    self._sync(segment)
        self._unsynced = 0

    def _sync(self, segment: _Segment) -> None:
        try:
            self._disk.sync(segment.path)
        except OSError:
            segment.sync_failed = True
            raise
        segment.synced, segment.sync_failed = True, False

    def _begun(self, fragment: FragmentId) -> _Segment:
        self._numbers += 1
        return _Segment(self._folder / segment_name(fragment, self._numbers))

    def _copied(self, fragment: FragmentId, old: _Segment) -> _Segment:
        """Copy its entries to a new file, of which nothing counts as synced yet."""
        new = self._begun(fragment)
        for version, place in old.entries.items():
            entry = self._disk.read(place.path, place.start, place.count)
            decode(entry)
            self._disk.append(new.path, [entry])
            new.entries[version] = replace(place, path=new.path, start=new.size)
            new.size += place.count
        new.full, new.synced = True, False
        self._disk.remove(old.path)
        return new

    def _drop_old(self) -> None:
        for fragment, segments in self._segments.items():
            places = self._places(fragment)
            oldest_kept = max(places, default=Version(0)) - self._versions_kept + 1
            oldest_needed = max((v for v, place in places.items() if place.is_state and v <= oldest_kept), default=0)
            for segment in segments[:-1]:
                if max(segment.entries, default=-1) < oldest_needed:
                    with suppress(OSError):  # the next merge tries again
                        self._disk.remove(segment.path)
                        segments.remove(segment)

    def _open(self, name: str, size: int, fragment: FragmentId, number: int) -> None:
        """Find the entries of one segment, and cut off everything after the last complete one."""
        segment = _Segment(self._folder / name, full=True)
        self._numbers = max(self._numbers, number)
        while segment.size < size:
            try:
                facts, place = self._entry_at(segment.path, segment.size)
            except DataError as error:
                self.damage.append(f"{name}: {size - segment.size} bytes from {segment.size} on were cut off: {error}")
                self._disk.truncate(segment.path, segment.size)
                break
            segment.entries[facts.version] = place
            segment.size += place.count
        segment.synced = False  # its writer may have died before the sync
        self._segments.setdefault(fragment, []).append(segment)

    def _cut_off_unusable(self, segment: _Segment, newest: Version) -> None:
        """Cut off entries of inputs after the newest version that can be restored: useless without an earlier one."""
        unusable = [version for version in segment.entries if version > newest]
        if not unusable:
            return
        start = min(segment.entries[version].start for version in unusable)
        segment.entries = {version: place for version, place in segment.entries.items() if place.start < start}
        self.damage.append(
            f"{segment.path.name}: {segment.size - start} bytes from {start} on were cut off: an earlier entry is missing"
        )
        self._disk.truncate(segment.path, start)
        segment.size = start

    def _entry_at(self, path: Path, start: int) -> tuple[Facts, Place]:
        """Return the complete entry that begins here.

        Its tensors are verified, because a torn write may have the right length.
        """
        sizes = sizes_of(self._disk.read(path, start, PREFIX_BYTES))
        facts_of(self._disk.read(path, start, PREFIX_BYTES + sizes.header))
        facts, content = decode(self._disk.read(path, start, sizes.total))
        return facts, Place(path, start, sizes.total, isinstance(content, FragmentState))
