"""A published fragment as calls carry it: its values, or the updates that lead to it from what an island holds.

An island that holds the version before is sent one update; one that missed a few is sent the updates in between, while
they are fewer bytes than the values. Values are encoded when somebody needs them first.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import ray

from orchestrator.core.vocabulary import Version
from orchestrator.parameters.shard import Publication
from orchestrator.parameters.tensors import ByteArray, byte_array
from orchestrator.runtime.settings import INLINE_BYTES_MAX

Carried = ByteArray | ray.ObjectRef[ByteArray]
"""Bytes, or a reference to them if they are too many for a call. By value costs half the cpu-seconds of a reference, for
which every island's node pulls a copy into its own store."""


@dataclass(frozen=True, slots=True)
class Shipment:
    """What is sent of a fragment: updates since a version, oldest first, or with ``since`` None its values alone."""

    since: Version | None
    payloads: tuple[Carried, ...]
    byte_count: int


@dataclass(frozen=True, slots=True)
class _Update:
    """The update *to* this version."""

    version: Version
    payload: Carried
    byte_count: int


class Published:
    """One version of a fragment. Thread-safe."""

    def __init__(self, publication: Publication, before: Published | None) -> None:
        """``before`` is what was published of the fragment until now."""
        self.version, self.digest = publication.version, publication.digest
        self._publication = publication
        self._lock = threading.Lock()
        self._values: tuple[Carried, int] | None = None
        self._updates: tuple[_Update, ...] = ()
        if publication.update is not None:
            size = len(publication.update)
            latest = _Update(publication.version, _carried(publication.update), size)
            earlier = before._updates if before is not None and before.version == publication.version - 1 else ()
            self._updates = _worth_sending((*earlier, latest), publication.values_bytes)

    @property
    def values_bytes(self) -> int:
        """The bytes of the values themselves, without header."""
        return self._publication.values_bytes

    @property
    def usual_bytes(self) -> int:
        """The bytes that an island which holds the version before is sent: the newest update, or else the values."""
        return self._updates[-1].byte_count if self._updates else self._publication.values_bytes

    def values(self) -> Carried:
        """The payload of the values themselves."""
        return self._encoded_values()[0]

    def since(self, held: Version | None) -> Shipment:
        """What leads here from the version that somebody holds; None: that is not known.

        Who is not known is believed to hold the version before, which is so but for newcomers, and costs little. Who holds
        this version, or a later one, takes nothing, so that anything will do.
        """
        updates = self._updates
        if updates and (held is None or held >= self.version):
            updates = updates[-1:]
        elif held is None or not updates or held + 1 < updates[0].version:
            payload, size = self._encoded_values()
            return Shipment(None, (payload,), size)
        else:
            updates = tuple(update for update in updates if update.version > held)
        since = Version(updates[0].version - 1)
        return Shipment(since, tuple(u.payload for u in updates), sum(u.byte_count for u in updates))

    def _encoded_values(self) -> tuple[Carried, int]:
        with self._lock:
            if self._values is None:
                payload = self._publication.values()
                self._values = _carried(payload), len(payload)
            return self._values


def _worth_sending(updates: tuple[_Update, ...], values_bytes: int) -> tuple[_Update, ...]:
    """The latest ones that are together fewer bytes than the values."""
    total, count = 0, 0
    for update in reversed(updates):
        total += update.byte_count
        if total >= values_bytes:
            break
        count += 1
    return updates[len(updates) - count :]


def _carried(payload: memoryview) -> Carried:
    array = byte_array(payload)
    return array if len(payload) <= INLINE_BYTES_MAX else ray.put(array)
