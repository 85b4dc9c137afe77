"""What an island's process hands over and is handed through its job's channel (``orchestrator.channel.endpoint``).

It joins the channel once for each synchroniser; what needs the channel of a synchroniser that it has not joined yet waits a
little. An offer is served until the synchroniser has it, or a newer one of its fragment takes its place; a part of the own
state until its receiver has it, or no byte of it has moved for as long as its size explains (``transfer_limit``).
Thread-safe.

Θ as it was published, fragment by fragment: the newest version that has come, whether it is adopted yet or not.

What comes is values, or updates that lead from a version that is here to a newer one. An update is added to what is here,
in float32, as the synchroniser did; the digest shows that the same bits came of it. What does not fit is not taken, and
whoever sends hears which version is here. A process of an island of many hosts has its part of the pieces, and gets that.
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
from orchestrator.core.vocabulary import Epoch, FragmentId, Version
from orchestrator.errors import TransferStalled
from orchestrator.parameters import wire_format
from orchestrator.parameters.holding import EVERYTHING, Holding
from orchestrator.parameters.tensors import digest

log = logging.getLogger(__name__)


class PublishedFragments:
    """Thread-safe; different fragments are taken at once."""

    def __init__(self, fragments: Sequence[Sequence[str]], holding: Holding = EVERYTHING) -> None:
        """``fragments[p]`` names the pieces of fragment p of which something is here, and ``holding`` says what."""
        self._fragments, self._holding = fragments, holding
        self._locks = [threading.Lock() for _ in fragments]
        self._newest: dict[FragmentId, PublishedVersion] = {}

    def hold(self, fragment: FragmentId, version: Version, arrays: Mapping[str, np.ndarray]) -> None:
        """Keep what came in another way, of what is here, unless something newer is."""
        with self._locks[fragment]:
            if self.version(fragment) < version:
                self._newest[fragment] = PublishedVersion(version, arrays)

    def version(self, fragment: FragmentId) -> int:
        """The version that is here; −1 if there is none."""
        newest = self._newest.get(fragment)
        return -1 if newest is None else newest.version

    def at(self, fragment: FragmentId, version: Version) -> PublishedVersion | None:
        """The fragment at this version, if that is the one that is here."""
        newest = self._newest.get(fragment)
        return newest if newest is not None and newest.version == version else None

    def values_at(self, versions: tuple[Version, ...]) -> Arrays | None:
        """Θ by pieces, if all of it is here at these versions or later ones; no byte is sent for an evaluation."""
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
    ) -> Arrays | None:
        """The fragment at ``version``, from updates since the version ``since``, oldest first, or from its values.

        None where something as new is here, or the updates do not lead on from what is here. Raises InvalidPayload for
        damaged bytes, and where not all came of what is here of the fragment.
        """
        with self._locks[fragment]:
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
                        "updates of fragment %d to version %d gave something else; it is asked for whole",
                        fragment,
                        version,
                    )
                    del self._newest[fragment]
                    return None
            self._newest[fragment] = PublishedVersion(version, arrays)
            return arrays


JOIN_S = 10.0
"""Calls may overtake the one by which this process joins, and that one may have to be repeated."""


class HandedOver:
    """One process's; no member of any channel at first."""

    def __init__(self) -> None:
        self._joined = threading.Condition()
        self._endpoint: Endpoint | None = None
        self._offered: dict[FragmentId, tuple[int, Payload]] = {}
        self._donated: dict[str, Payload] = {}

    def join(self, membership: Membership, host: str) -> None:
        """Take part in the channel of this synchroniser, and no more in that of one before it, whose pulls are cancelled."""
        with self._joined:
            before = self._endpoint
            if before is not None and membership.epoch <= before.membership.epoch:
                return
            self._endpoint, self._offered, self._donated = Endpoint(membership, host), {}, {}
            self._joined.notify_all()
        if before is not None:
            before.close()

    def offer(self, epoch: Epoch, fragment: FragmentId, number: int, content: memoryview) -> Carried:
        """The offer's content for a call to the synchroniser: the same, however often it asks."""
        endpoint = self._of(epoch)
        with self._joined:
            served_number, served = self._offered.get(fragment, (0, None))
            if served is None or served_number != number:
                served = endpoint.payload(f"{fragment}/{number}", content)
                self._offered[fragment] = (number, served)
        return served.carried(SHARD)

    def release(self, fragment: FragmentId, number: int) -> None:
        """Serve this offer no more, if it is served."""
        with self._joined:
            if self._endpoint is not None and self._offered.get(fragment, (0, None))[0] == number:
                del self._offered[fragment]
                self._endpoint.withdraw_unheld()

    def donate(self, epoch: Epoch, receiver: str, content: memoryview) -> Carried:
        """A part of the own state for a call to this process."""
        endpoint = self._of(epoch)
        with self._joined:
            terms, idle_s = endpoint.membership.terms, endpoint.server.idle_s
            for name in list(self._donated):
                if idle_s(name) > held_s(self._donated[name].byte_count, terms.stall_s, terms.bytes_per_s):
                    del self._donated[name]
            payload = endpoint.payload(f"state/{receiver}", content)
            self._donated[payload.name] = payload
        return payload.carried(receiver)

    def forget_donation(self, name: str) -> None:
        """The part under this name, which its ticket says, is served no more; others for the same process are."""
        with self._joined:
            if self._donated.pop(name, None) is not None and self._endpoint is not None:
                self._endpoint.withdraw_unheld()

    def received(self, epoch: Epoch, carried: Carried, abandoned: Callable[[], bool] = lambda: False) -> memoryview:
        """What a call of this synchroniser, or of a process of its job, carried. It is cancelled when another is joined."""
        return self._of(epoch).received(carried, abandoned)

    def hindrances(self) -> tuple[str, ...]:
        """What is in the way of what this process pulls, for operators."""
        with self._joined:
            endpoint = self._endpoint
        return () if endpoint is None else endpoint.hindrances()

    def subject(self, epoch: Epoch) -> str:
        """What this process is called in the channel of this synchroniser."""
        return self._of(epoch).membership.subject

    def close(self) -> None:
        """Take part in no channel any more."""
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
