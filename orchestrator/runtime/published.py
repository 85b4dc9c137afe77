"""A published fragment as it is handed to islands: its values, or the updates that lead to it from what an island holds.

An island that holds the version before is sent one update; one that missed a few is sent the updates in between, while
they are fewer bytes than the values. Values are encoded when somebody needs them first. ``Published`` is served by this
process, and ``RemotePublished`` by that of a shard (``remote_shard``). Exports and followers get it as files.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from orchestrator.channel.endpoint import Carried, Endpoint, Payload
from orchestrator.channel.frames import SHARD
from orchestrator.core.vocabulary import FragmentId, Version
from orchestrator.errors import InfrastructureError
from orchestrator.host import records
from orchestrator.host.records import UNKNOWN, FragmentRow, FragmentUpdate
from orchestrator.parameters import wire_format
from orchestrator.parameters.holding import EVERYTHING, Holding
from orchestrator.parameters.pieces import Shape
from orchestrator.parameters.shard import Publication
from orchestrator.parameters.tensors import Tensors
from orchestrator.system.run_folder import PARAMETERS

Result = TypeVar("Result")


@dataclass(eq=False, kw_only=True)
class ShardAway(InfrastructureError):
    """The process of a shard is gone, and is being started again from its journal."""


@dataclass(eq=False, kw_only=True)
class PublicationGone(InfrastructureError):
    """The version died with the process of its shard, which has a newer one by now."""


class Spoilable(Protocol):
    """Bytes in another process, which spoils them there."""

    def __len__(self) -> int: ...

    def spoiled(self) -> Spoilable:
        """Return them with some bits flipped."""
        ...


Content = memoryview | Spoilable
"""The pulled bytes of an offer, here or in the process of its shard."""


def spoiled(content: memoryview) -> memoryview:
    """Return the content with some bits in its middle flipped, which its checksum detects."""
    changed = bytearray(content)
    changed[len(changed) // 2] ^= 0b00111100
    return memoryview(changed)


class AnyPayload(Protocol):
    """A payload that this process or another one serves: ``channel.endpoint.Payload``."""

    @property
    def name(self) -> str: ...

    @property
    def byte_count(self) -> int: ...

    @property
    def inline(self) -> bool: ...

    @property
    def content(self) -> memoryview:
        """The bytes themselves, pulled into this process if another one serves them."""
        ...

    def carried(self, receiver: str) -> Carried: ...


@dataclass(frozen=True, slots=True)
class Shipment:
    """The content sent for a fragment: updates since a version, oldest first, or with ``since`` None its values alone.

    Nothing for an island that holds the version, or a later one, which is then ``since``.
    """

    since: Version | None
    payloads: Sequence[AnyPayload]

    @property
    def byte_count(self) -> int:
        return sum(payload.byte_count for payload in self.payloads)

    @property
    def is_pulled(self) -> bool:
        """Return whether any part of it is too large for the call."""
        return not all(payload.inline for payload in self.payloads)


class PublishedFragment(Protocol):
    """One version of a fragment as links hand it out: ``Published``, in this process or in that of another shard.

    The calls of one in another process raise ShardAway while that process is being started again, and PublicationGone if it
    has a newer version since.
    """

    version: Version

    @property
    def server(self) -> object:
        """The process that serves it now; None while that is away. Its payloads are gone with it."""
        ...

    @property
    def usual_bytes(self) -> int:
        """The bytes that an island which holds the version before is sent: the newest update, or else the values."""
        ...

    def digest_of(self, holding: Holding) -> str:
        """The digest of what somebody with this holding has of the fragment."""
        ...

    def values(self, holding: Holding = EVERYTHING) -> AnyPayload:
        """The payload of the values themselves."""
        ...

    def since(self, held: Version | None, holding: Holding = EVERYTHING) -> Shipment:
        """Return the shipment that leads from the version ``held`` to this one; None if that version is not known."""
        ...

    def parameters(self) -> Tensors:
        """Return the values themselves, by piece."""
        ...


class _Served:
    """Content that is cut for each holding when somebody with that needs it first. Thread-safe."""

    def __init__(self, endpoint: Endpoint, name: str, make: Callable[[Holding], memoryview]) -> None:
        self._endpoint, self._name, self._make = endpoint, name, make
        self._lock = threading.Lock()
        self._payloads: dict[Holding, Payload] = {}

    def payload(self, holding: Holding) -> Payload:
        with self._lock:
            if holding not in self._payloads:
                self._payloads[holding] = self._endpoint.payload(self._name, self._make(holding))
            return self._payloads[holding]


@dataclass(frozen=True, slots=True)
class _Update:
    """The update *to* this version."""

    version: Version
    byte_count: int
    served: _Served


class Published:
    """One version of a fragment. Thread-safe. Its bytes are served for as long as somebody holds it or what it gave.

    Who has a part of the model is sent that part, by its holding.
    """

    def __init__(self, publication: Publication, before: Published | None, endpoint: Endpoint) -> None:
        """``before`` is what was published of the fragment until now."""
        self.version, self._publication = publication.version, publication
        name = f"{publication.fragment}/{publication.version}"
        self._naming = threading.Lock()
        self._values = _Served(endpoint, f"{name}/values", publication.values)
        self._digests: dict[Holding, str] = {}
        self._updates: tuple[_Update, ...] = ()
        if (update := publication.update) is not None:
            served = _Served(endpoint, f"{name}/update", update.payload)
            served.payload(EVERYTHING)  # in the thread that merged it, and not in the first island's
            latest = _Update(publication.version, update.byte_count, served)
            earlier = before._updates if before is not None and before.version == publication.version - 1 else ()
            self._updates = _worth_sending((*earlier, latest), publication.values_bytes)

    @property
    def server(self) -> object:
        return self._values

    @property
    def values_bytes(self) -> int:
        """The bytes of the values themselves, without header."""
        return self._publication.values_bytes

    @property
    def usual_bytes(self) -> int:
        return self._updates[-1].byte_count if self._updates else self._publication.values_bytes

    def digest_of(self, holding: Holding) -> str:
        with self._naming:
            if holding not in self._digests:
                self._digests[holding] = self._publication.digest_of(holding)
            return self._digests[holding]

    def values(self, holding: Holding = EVERYTHING) -> Payload:
        return self._values.payload(holding)

    def parameters(self) -> Tensors:
        return self._publication.parameters

    def since(self, held: Version | None, holding: Holding = EVERYTHING) -> Shipment:
        """Return the shipment that leads from the version ``held`` to this one; None if that version is not known.

        An island whose version is unknown is assumed to hold the one before. That is true of all but newcomers, and a wrong
        guess costs little. One that holds this version or a later one needs no bytes: what is published again to an island
        that answers again is mostly there, and would fill the line whose delay was the reason.
        """
        updates = self._updates
        if held is not None and held >= self.version:
            return Shipment(held, ())
        if updates and held is None:
            updates = updates[-1:]
        elif held is None or not updates or held + 1 < updates[0].version:
            return Shipment(None, (self.values(holding),))
        else:
            updates = tuple(update for update in updates if update.version > held)
        since = Version(updates[0].version - 1)
        return Shipment(since, tuple(update.served.payload(holding) for update in updates))


def _worth_sending(updates: tuple[_Update, ...], values_bytes: int) -> tuple[_Update, ...]:
    """The latest ones that are together fewer bytes than the values."""
    total, count = 0, 0
    for update in reversed(updates):
        total += update.byte_count
        if total >= values_bytes:
            break
        count += 1
    return updates[len(updates) - count :]


# ── of a shard in another process ─────────────────────────────────────────────────────────────────────────────────────────


class ServingShard(Protocol):
    """A shard in another process, as its publications call it."""

    @property
    def serving(self) -> object:
        """The process, or None while it is away."""
        ...

    def digest_of(self, fragment: FragmentId, version: Version, holding: Holding) -> str: ...

    def values(self, fragment: FragmentId, version: Version, holding: Holding) -> tuple[str, int]: ...

    def since(
        self, fragment: FragmentId, version: Version, held: Version | None, holding: Holding
    ) -> tuple[Version | None, list[tuple[str, int]]]: ...

    def ticket(self, name: str, receiver: str) -> Carried: ...

    def arrived(self, carried: Carried) -> memoryview:
        """Pull a payload of the shard into this process."""
        ...

    def unheld(self, fragment: FragmentId, version: Version) -> None:
        """Nobody holds this version any more. The garbage collector calls it, in any thread."""
        ...


class RemotePublished:
    """``published.PublishedFragment`` in another process, which keeps it as long as this object lives."""

    def __init__(
        self, shard: ServingShard, fragment: FragmentId, version: Version, digest: str, usual_bytes: int
    ) -> None:
        self.version, self._shard, self._fragment, self._digest = version, shard, fragment, digest
        self._usual_bytes = usual_bytes
        weakref.finalize(self, shard.unheld, fragment, version).atexit = False

    @property
    def server(self) -> object:
        return self._shard.serving

    @property
    def usual_bytes(self) -> int:
        return self._usual_bytes

    def digest_of(self, holding: Holding) -> str:
        return self._shard.digest_of(self._fragment, self.version, holding) if holding.parts else self._digest

    def values(self, holding: Holding = EVERYTHING) -> RemotePayload:
        return RemotePayload(self._shard, self, *self._shard.values(self._fragment, self.version, holding))

    def since(self, held: Version | None, holding: Holding = EVERYTHING) -> Shipment:
        since, payloads = self._shard.since(self._fragment, self.version, held, holding)
        return Shipment(since, [RemotePayload(self._shard, self, *payload) for payload in payloads])

    def parameters(self) -> Tensors:
        return wire_format.decode(self._shard.arrived(self.values().carried(SHARD)))


@dataclass(frozen=True, slots=True)
class RemotePayload:
    """A payload that a shard in another process serves, as long as ``published`` is held."""

    shard: ServingShard
    published: RemotePublished
    name: str
    byte_count: int
    inline: bool = False

    @property
    def content(self) -> memoryview:
        return self.shard.arrived(self.carried(SHARD))

    def carried(self, receiver: str) -> Carried:
        return self.shard.ticket(self.name, receiver)


# ── as files of the run folder ────────────────────────────────────────────────────────────────────────────────────────────


class PublishingShard(Protocol):
    """All of Θ, as ``shard_worker.ShardWorker`` has it."""

    def all_published(self) -> list[PublishedFragment]: ...

    def shapes(self) -> list[Mapping[str, Shape]]:
        """Return the shapes of each fragment's pieces."""
        ...

    def patiently(self, work: Callable[[], Result]) -> Result:
        """Do the work, again once a shard that was away is back."""
        ...


def write_parameters(run_dir: Path, facts: Mapping[str, str], shard: PublishingShard, name: str = PARAMETERS) -> None:
    """Write Θ as it is published, with ``facts`` and its fragments in the file's metadata. Raises OSError."""
    published, shapes = shard.all_published(), shard.shapes()
    fragments = [
        FragmentRow(one.version, one.digest_of(EVERYTHING), list(pieces)).row()
        for one, pieces in zip(published, shapes, strict=True)
    ]
    versions = ",".join(str(one.version) for one in published)
    facts = {**facts, "versions": versions, records.FRAGMENTS: json.dumps(fragments)}
    parts = (shard.patiently(one.parameters) for one in published)
    records.write_parameters(run_dir, {n: s for own in shapes for n, s in own.items()}, parts, facts, name)


def write_updates(run_dir: Path, job: str, held: Sequence[int], shard: PublishingShard, name: str) -> None:
    """Write what leads from the versions ``held`` of the fragments (none: from nothing) to Θ as it is published.

    The payloads are those that islands get. Raises OSError, and PublicationGone while a newer version is announced.
    """
    published = shard.all_published()
    versions = records.versions_of(held, len(published))
    updates = (
        shard.patiently(partial(_update_since, one, version)) for one, version in zip(published, versions, strict=True)
    )
    records.write_updates(run_dir / name, records.updates(job, updates))


def _update_since(one: PublishedFragment, held: int) -> FragmentUpdate:
    # a version that was never announced is not one that updates lead from
    shipment = one.since(Version(held if held <= one.version else UNKNOWN))
    contents = [payload.content for payload in shipment.payloads]
    return FragmentUpdate(one.version, one.digest_of(EVERYTHING), shipment.since, contents)
