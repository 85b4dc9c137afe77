"""What a process of an island exchanges through its job's channel (``orchestrator.channel.endpoint``), and Θ as it arrived.

A process joins the channel once for each synchroniser. A call that needs the channel of a synchroniser before it is joined
waits a little. An offer is served until the synchroniser has it or a newer offer of its fragment replaces it. A part of the
own state is served until its receiver has it, or until no byte of it has moved for longer than its size explains
(``state_transfer.held_s``). Thread-safe.

``PublishedFragments`` holds the newest version of each fragment that has arrived, adopted or not, with what the synchroniser
announced of it: this is what a job continues from if its synchroniser's disk is lost. A publication has values,
or updates that lead from a version held here to a newer one. An update is added to the values here, in float32, as the
synchroniser did; the digest shows that the result has the same bits. A publication that does not fit is dropped, and the
sender learns which version is here. A process of an island of several hosts receives only its part of the pieces.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from learners.contract import Arrays
from learners.outbox import PublishedVersion
from learners.state_transfer import held_s
from orchestrator.channel.endpoint import Carried, Endpoint, Membership, Payload
from orchestrator.channel.frames import SHARD
from orchestrator.core.commands import ChangedSettings
from orchestrator.core.messages import Announcement, HeldVersion, IslandHoldings
from orchestrator.core.vocabulary import Epoch, FragmentId, Life, Version
from orchestrator.errors import Fenced, TransferStalled
from orchestrator.parameters import wire_format
from orchestrator.parameters.holding import EVERYTHING, Holding
from orchestrator.parameters.tensors import digest
from orchestrator.replica.replica import Position

log = logging.getLogger(__name__)


class PublishedFragments:
    """The newest published version of each fragment. Thread-safe; different fragments can be taken at the same time."""

    def __init__(self, fragments: Sequence[Sequence[str]], holding: Holding = EVERYTHING) -> None:
        """``fragments[p]`` names the pieces of fragment p that this process holds a part of; ``holding``: which part."""
        self._fragments, self._holding = fragments, holding
        self._locks = [threading.Lock() for _ in fragments]
        self._newest: dict[FragmentId, PublishedVersion] = {}
        self._announced: dict[FragmentId, dict[Version, Announcement]] = {}
        self._fenced_before = Epoch(0)

    def fence(self, epoch: Epoch) -> None:
        """Take nothing of earlier synchronisers from now on, not even what a call of theirs is pulling at this moment.

        A synchroniser that continues from what is held here makes the next version itself, with other bytes.
        """
        self._fenced_before = max(self._fenced_before, epoch)

    def announce(self, announcement: Announcement) -> None:
        """Keep what the synchroniser says of a version, which arrives about now, and forget it of versions before this."""
        fragment = announcement.fragment
        with self._locks[fragment]:
            later = {v: x for v, x in self._announced.get(fragment, {}).items() if v >= self.version(fragment)}
            self._announced[fragment] = {**later, announcement.version: announcement}

    def held_versions(self) -> tuple[HeldVersion, ...]:
        """Return the versions that are here whole, with the digests that their bytes have now."""
        held = []
        for p in range(len(self._fragments)) if not self._holding.parts else ():
            fragment = FragmentId(p)
            with self._locks[fragment]:
                newest = self._newest.get(fragment)
                announced = self._announced.get(fragment, {}).get(newest.version) if newest is not None else None
            if newest is not None:
                held.append(HeldVersion(fragment, newest.version, digest(newest.arrays), announced))
        return tuple(held)

    def holdings(
        self,
        life: Life,
        held: tuple[HeldVersion, ...],
        position: Position,
        job_tokens: int,
        stepping_seconds: float,
        trains: bool,
        changed: ChangedSettings,
    ) -> IslandHoldings:
        """Return the answer of an island at this position, whose versions of Θ are ``held``."""
        return IslandHoldings(
            *life,
            held,
            position.versions,
            position.step,
            position.steps_total,
            position.tokens_total,
            stepping_seconds,
            position.token_counts,
            job_tokens,
            self.expected_versions(),
            trains,
            changed,
        )

    def expected_versions(self) -> tuple[Announcement, ...]:
        """Return what was announced of versions that have not arrived."""
        fragments = map(FragmentId, range(len(self._fragments)))
        return tuple(
            announcement
            for fragment in fragments
            for version, announcement in sorted(self._announced.get(fragment, {}).copy().items())
            if version > self.version(fragment)
        )

    def hold(self, fragment: FragmentId, version: Version, arrays: Mapping[str, np.ndarray]) -> None:
        """Keep a version that arrived in another way, unless a newer one is here."""
        with self._locks[fragment]:
            if self.version(fragment) < version:
                self._newest[fragment] = PublishedVersion(version, arrays)

    def version(self, fragment: FragmentId) -> int:
        """Return the version that is here; −1 if there is none."""
        newest = self._newest.get(fragment)
        return -1 if newest is None else newest.version

    def at(self, fragment: FragmentId, version: Version) -> PublishedVersion | None:
        """Return the fragment at this version, if it is the one that is here."""
        newest = self._newest.get(fragment)
        return newest if newest is not None and newest.version == version else None

    def values_at(self, versions: tuple[Version, ...]) -> Arrays | None:
        """Return Θ by pieces if all of it is here at these versions or later ones. Evaluations transfer no bytes."""
        newest = [self._newest.get(FragmentId(p)) for p in range(len(versions))]
        if any(here is None or here.version < version for here, version in zip(newest, versions, strict=True)):
            return None
        return {name: array for here in newest if here is not None for name, array in here.arrays.items()}

    def take(
        self,
        fragment: FragmentId,
        version: Version,
        since: Version | None,
        checked_digest: str,
        payloads: Sequence[bytes | memoryview],
        epoch: Epoch | None = None,
    ) -> Arrays | None:
        """Take the fragment at ``version``: from updates since the version ``since``, oldest first, or from its values.

        Returns None if a version as new is here, or if the updates do not start from the version here. Raises InvalidPayload
        for damaged bytes, and if a part of what this process holds of the fragment is missing. Raises Fenced if the
        synchroniser of this epoch has been replaced. Forgets an announcement of the same version with another digest, which
        is of a synchroniser that lost it.
        """
        with self._locks[fragment]:
            if epoch is not None and epoch < self._fenced_before:
                successor = f"one of epoch {self._fenced_before} asked what is held here"
                raise Fenced(detail=f"A synchroniser of epoch {epoch} sends a version, but {successor}.")
            if self.version(fragment) >= version:
                return None
            if since is None:
                arrays = self._holding.own_values(wire_format.parse(payloads[0]), self._fragments[fragment])
            else:
                newest = self.at(fragment, since)
                if newest is None:
                    return None
                arrays = dict(newest.arrays)
                for payload in payloads:
                    arrays = self._holding.added_to(arrays, wire_format.parse(payload))
                if digest(arrays) != checked_digest:
                    log.error(
                        "updates of fragment %d to version %d gave other bits than the synchroniser; it will be sent whole",
                        fragment,
                        version,
                    )
                    del self._newest[fragment]
                    return None
            self._newest[fragment] = PublishedVersion(version, arrays)
            announced = self._announced.get(fragment, {})
            if version in announced and announced[version].digest != checked_digest:
                self._announced[fragment] = {v: x for v, x in announced.items() if v != version}
            return arrays


JOIN_S = 10.0
"""A call may arrive before the one that joins the channel, which may also have to be repeated."""


class HandedOver:
    """The exchanges of one process. It is in no channel at first."""

    def __init__(self) -> None:
        self._joined = threading.Condition()
        self._endpoint: Endpoint | None = None
        self._offered: dict[FragmentId, tuple[int, Payload]] = {}
        self._donated: dict[str, Payload] = {}
        self._outer_given: Payload | None = None
        self._pulls: dict[FragmentId, object] = {}

    def join(self, membership: Membership, host: str) -> None:
        """Join this synchroniser's channel. Leave the one of an earlier synchroniser, and cancel its pulls."""
        with self._joined:
            before = self._endpoint
            if before is not None and membership.epoch <= before.membership.epoch:
                return
            self._endpoint, self._offered, self._donated = Endpoint(membership, host), {}, {}
            self._joined.notify_all()
        if before is not None:
            before.close()

    def offer(self, epoch: Epoch, fragment: FragmentId, number: int, content: memoryview) -> Carried:
        """Return the offer's content for a call to the synchroniser: the same for every call."""
        endpoint = self._of(epoch)
        with self._joined:
            served_number, served = self._offered.get(fragment, (0, None))
            if served is None or served_number != number:
                served = endpoint.payload(f"{fragment}/{number}", content)
                self._offered[fragment] = (number, served)
        return served.carried(SHARD)

    def release(self, fragment: FragmentId, number: int) -> None:
        """Stop serving this offer, if it is served."""
        with self._joined:
            if self._endpoint is not None and self._offered.get(fragment, (0, None))[0] == number:
                del self._offered[fragment]
                self._endpoint.withdraw_unheld()

    def donate(self, epoch: Epoch, receiver: str, content: memoryview) -> Carried:
        """Return a part of the own state for a call to this process."""
        endpoint = self._of(epoch)
        with self._joined:
            terms, idle_s = endpoint.membership.terms, endpoint.server.idle_s
            for name in list(self._donated):
                if idle_s(name) > held_s(self._donated[name].byte_count, terms.stall_s, terms.bytes_per_s):
                    del self._donated[name]
            payload = endpoint.payload(f"state/{receiver}", content)
            self._donated[payload.name] = payload
        return payload.carried(receiver)

    def give_outer(self, epoch: Epoch, fragment: FragmentId, version: Version, content: memoryview) -> Carried:
        """Return a version of Θ for a call to the synchroniser. It is served until the next version that is given."""
        payload = self._of(epoch).payload(f"outer/{fragment}/{version}", content)
        with self._joined:
            self._outer_given = payload
        return payload.carried(SHARD)

    def payload(self, epoch: Epoch, name: str, content: memoryview) -> Payload:
        """Serve this content in this synchroniser's channel for as long as the payload is held."""
        return self._of(epoch).payload(name, content)

    def withdraw_unheld(self) -> None:
        """Free the payloads that are held no more."""
        with self._joined:
            if self._endpoint is not None:
                self._endpoint.withdraw_unheld()

    def forget_donation(self, name: str) -> None:
        """Stop serving the part with this name, which its ticket has. Others for the same process are still served."""
        with self._joined:
            if self._donated.pop(name, None) is not None and self._endpoint is not None:
                self._endpoint.withdraw_unheld()

    def received(self, epoch: Epoch, carried: Carried, abandoned: Callable[[], bool] = lambda: False) -> memoryview:
        """Return the payload that a call of this synchroniser, or of a process of its job, carried.

        It is cancelled when another synchroniser's channel is joined.
        """
        return self._of(epoch).received(carried, abandoned)

    def published(self, epoch: Epoch, fragment: FragmentId, payloads: Sequence[Carried]) -> list[memoryview]:
        """Return what a publication of the fragment carried. End an earlier pull of it: its shard's process may be gone.

        Raises TransferCancelled if a later publication of the fragment ends this pull.
        """
        mine = self._pulls[fragment] = object()
        return [self.received(epoch, one, lambda: self._pulls[fragment] is not mine) for one in payloads]

    def hindrances(self) -> tuple[str, ...]:
        """Return, for operators, what currently blocks the pulls of this process."""
        with self._joined:
            endpoint = self._endpoint
        return () if endpoint is None else endpoint.hindrances()

    def subject(self, epoch: Epoch) -> str:
        """Return the name of this process in the channel of this synchroniser."""
        return self._of(epoch).membership.subject

    def close(self) -> None:
        """Leave the channel."""
        with self._joined:
            before, self._endpoint, self._offered, self._donated = self._endpoint, None, {}, {}
        if before is not None:
            before.close()

    def _of(self, epoch: Epoch) -> Endpoint:
        with self._joined:
            self._joined.wait_for(lambda: self._has_joined(epoch), JOIN_S)
            if self._endpoint is None or not self._has_joined(epoch):
                raise TransferStalled(
                    stall_s=JOIN_S, detail=f"This process has not joined the channel of epoch {epoch}"
                )
            return self._endpoint

    def _has_joined(self, epoch: Epoch) -> bool:
        return self._endpoint is not None and self._endpoint.membership.epoch >= epoch
