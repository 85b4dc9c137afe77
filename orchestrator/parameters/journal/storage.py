"""The journal on disk: append-only segments per fragment, ``fragment-PPPP-SSSSSS.journal``, a few entries in each.

Responsible for: an entry being durable, as the policy has it, when ``append`` returns; a torn end being cut when the
journal is opened; older segments going once ``versions_kept`` durable versions need nothing in them. An entry of inputs
needs those before it, back to a state: a version counts only while all of them are here. A failed append leaves nothing
that counts: its rest is cut off, and the next attempt begins a new segment, for what the system says of pages after a
failed fsync cannot be trusted.

    sync                      every merge is on the disk before it is announced
    async (merges_max)        at most so many merges are only with the operating system: they survive the process, and a
                              loss of power may take them

Refuses to interpret (``entry``), to retry (who calls knows whether there is still a job), and to judge whether what it
holds fits the tape (``reconciliation``). Entries of different fragments may be appended by several threads at once.

One merge as bytes: an entry of the journal, whole or recognisably not.

    prefix      magic "atollj3
", sizes of header (u32) and body (u64), CRC-32C of prefix and header
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

The reconciliation of tape and journal: the tape has what was decided, the journal what was made of it.

The order in which both are written leaves few stories: a merge is on the tape as decided before it is made, in the journal
before it is on the tape as made. So a fragment's newest entry is the version where the tape has it (then what was under
way is lost), or the next one, and then the tape has decided on it, unless its end was damaged and cut off just there: that
merge is dropped. Anything else means files of two jobs, or files that somebody or a loss of power has cut, and nobody may go
on from there in silence.

Refuses to know: files, tensors.
"""

from __future__ import annotations

import json
import re
import struct
import threading
from collections.abc import Callable, Sequence
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
"""A header names contributors; sixteen megabytes of them are no header."""
_STATE: Literal["state"] = "state"
_INPUTS: Literal["inputs"] = "inputs"
_OUTER_GRADIENT: Literal["outer_gradient"] = "outer_gradient"
ENTRIES_PER_SEGMENT = 4
"""Few, because a segment goes as a whole: a fragment's disk use is at most twice this and ``versions_kept`` in entries."""
SEGMENT_BYTES_FULL = 64 << 20
"""From here on a segment takes no more, however few its entries: large fragments are not kept eight times."""
SUFFIX = ".journal"
_NAME = re.compile(rf"fragment-([0-9]{{4,}})-([0-9]{{8,}}){re.escape(SUFFIX)}")


def undecided_merges(
    rounds: Sequence[FragmentRound], newest: Callable[[FragmentId], Version | None]
) -> tuple[FragmentId, ...]:
    """The fragments whose newest merge the tape never decided on, for its end was cut off: the decision was its last record.

    Such a merge was never announced, since its announcement comes later on the tape.
    """
    ahead = (r.fragment for r in rounds if newest(r.fragment) == r.version + 1 and r.phase is not RoundPhase.MERGING)
    return tuple(ahead)


def lost_merges(
    rounds: Sequence[FragmentRound], newest: Callable[[FragmentId], Version | None]
) -> tuple[FragmentId, ...]:
    """The fragments whose last version the journal has no more, and the one before it has: damage, if any was found."""
    return tuple(r.fragment for r in rounds if newest(r.fragment) == r.version - 1)


def unrecorded_merges(
    rounds: Sequence[FragmentRound], newest: Callable[[FragmentId], Version | None], *, over: bool
) -> tuple[FragmentId, ...]:
    """The fragments whose journalled merge is not on the tape as made yet.

    A job that is ``over`` (cancelled while it merged) gets none. Raises DataError when the two cannot be of one job.
    """
    unheard = []
    for current in rounds:
        held = newest(current.fragment)
        if held is None or held < current.version:
            raise DataError(
                detail=f"The tape has fragment {current.fragment} at version {current.version}, the journal "
                f"{'nothing of it' if held is None else f'only up to version {held}'}: merges that islands already "
                "hold are lost. With durability async a loss of power can do that; sync prevents it."
            )
        if held == current.version or over:
            continue
        if held > current.version + 1 or current.phase is not RoundPhase.MERGING:
            raise DataError(
                detail=f"The journal has version {held} of fragment {current.fragment}, which the tape, at version "
                f"{current.version}, never decided on: they are not of the same job, or the tape was cut."
            )
        unheard.append(current.fragment)
    return tuple(unheard)


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


def segment_name(fragment: FragmentId, number: int) -> str:
    return f"fragment-{fragment:04d}-{number:08d}{SUFFIX}"


def parse_segment_name(name: str) -> tuple[FragmentId, int] | None:
    """Return the fragment and the number of the segment with this name, or None if no journal names a file so."""
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
    """A sync of it failed: the system counts as written what may not be."""


class Journal:
    """``damage`` says in words what was cut off when it was opened; ``foreign`` names the files that it does not read."""

    def __init__(
        self,
        folder: Path,
        *,
        versions_kept: int = 1,
        merges_max: int = 0,
        disk: Disk | None = None,
        before_sync: Callable[[], None] = lambda: None,
    ) -> None:
        """Open, or begin, the journal in ``folder``; ``merges_max`` 0 is sync. Raises OSError when it cannot be read.

        ``before_sync`` makes durable what entries rest on (the tape, on which they were decided), or raises OSError.
        """
        self._folder, self._disk, self._before_sync = folder, disk or LocalDisk(), before_sync
        self._writing = threading.Lock()  # merges' threads append while the pump settles what was there
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
        """Keep a merge. Raises OSError when it could not be kept; nothing of it counts then, and it may be asked again."""
        parts = encode(facts, content)
        with self._writing:
            self._append(facts, parts, isinstance(content, FragmentState))

    def settle(self) -> None:
        """Make durable what was there when it was opened, so that it may be announced. Raises OSError; may be retried."""
        with self._writing:
            self._sync_all()

    def clear(self) -> None:
        """Forget everything: it holds a beginning that was never announced."""
        for segments in self._segments.values():
            for segment in segments:
                self._disk.remove(segment.path)
        self._segments.clear()

    def drop_newest(self, fragment: FragmentId) -> str:
        """Forget the fragment's newest merge; returns what that was, in words. Raises OSError."""
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
        """The versions of the fragment that can be made from what it holds, in order."""
        places = self._places(fragment)
        whole: list[Version] = []
        for version in sorted(places):
            if places[version].is_state or (whole and whole[-1] == version - 1):
                whole.append(version)
        return tuple(whole)

    def newest(self, fragment: FragmentId) -> Version | None:
        return max(self.versions(fragment), default=None)

    def facts(self, fragment: FragmentId, version: Version) -> Facts:
        """The facts of that merge. Raises DataError when it is not here, or damaged."""
        place = self._place(fragment, version)
        sizes = sizes_of(self._disk.read(place.path, place.start, PREFIX_BYTES))
        return facts_of(self._disk.read(place.path, place.start, PREFIX_BYTES + sizes.header))

    def entries(self, fragment: FragmentId, version: Version) -> list[tuple[Facts, Content]]:
        """What gives the fragment at that version: a state, then the inputs of the merges since, up to the version's own.

        Raises DataError when that is not here, or damaged.
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
        """Of a version that is here twice, the later one counts."""
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
        """Its entries in a new file, of which nothing counts as synced yet."""
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
                    with suppress(OSError):  # it is tried again with the next merge
                        self._disk.remove(segment.path)
                        segments.remove(segment)

    def _open(self, name: str, size: int, fragment: FragmentId, number: int) -> None:
        """Find the entries of one segment, and cut off what follows the last whole one."""
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
        segment.synced = False  # whoever wrote it may have died before
        self._segments.setdefault(fragment, []).append(segment)

    def _cut_off_unusable(self, segment: _Segment, newest: Version) -> None:
        """Entries of inputs behind the newest version that can be made say nothing: an earlier one is gone."""
        unusable = [version for version in segment.entries if version > newest]
        if not unusable:
            return
        start = min(segment.entries[version].start for version in unusable)
        segment.entries = {version: place for version, place in segment.entries.items() if place.start < start}
        self.damage.append(
            f"{segment.path.name}: {segment.size - start} bytes from {start} on were cut off: an entry before them is gone"
        )
        self._disk.truncate(segment.path, start)
        segment.size = start

    def _entry_at(self, path: Path, start: int) -> tuple[Facts, Place]:
        """The whole entry that begins here. Its tensors are verified too: a torn write may have the right length."""
        sizes = sizes_of(self._disk.read(path, start, PREFIX_BYTES))
        facts_of(self._disk.read(path, start, PREFIX_BYTES + sizes.header))
        facts, content = decode(self._disk.read(path, start, sizes.total))
        return facts, Place(path, start, sizes.total, isinstance(content, FragmentState))
