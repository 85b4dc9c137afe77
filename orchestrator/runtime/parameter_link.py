"""The parameter link to one incarnation of an island: contributions up into the shard, publications down.

    up        ``request`` asks the island for an offer, ``fetch`` pulls its bytes and gives them to the shard
    watch     what is in the way of payloads, here or at the island, for the status
    deliver   newest version of each fragment; at most one batch is under way, so a silent island costs no memory

An island of many hosts has a process on each: an offer has arrived once all have given their parts, which are pulled at
once; each is sent of a publication what it has a part of, and the next batch goes to none before all have the one before.

Ray's calls carry tickets, and small payloads; the rest travels by the job's channel, of which ``deliver`` makes the island's
process a member first. A pull has no time limit; it ends when the island's process does, or a newer offer makes it needless.

Knows nothing of reports and events: the report link, which reads reports in their order, says which offers to fetch. Only
the shard knows what is in the bytes. A checkpoint's marker comes this way because it must keep its place among publications.
Everything passes the ``ImpairedLink``, which the report link shares: chaos impairs it.

Source: Ray 2.60 as measured: calls to a stopped or cut-off actor hang, so every get has a timeout and
keeps waiting on the *same* call, whose answer still comes.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar, assert_never

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from orchestrator.actors import ActorHandle, IslandInterface
from orchestrator.channel.client import HINDERED_S
from orchestrator.channel.endpoint import Carried, Membership
from orchestrator.channel.frames import Address, Ticket
from orchestrator.core.faults import Corrupt, Delay, Drop, LinkImpairment
from orchestrator.core.messages import Announcement, Offer
from orchestrator.core.vocabulary import FragmentId, MergedOffer, PayloadId, ScheduleAnchor, Version, offer_number
from orchestrator.errors import PayloadDamaged, TransferCancelled, TransferError, first_line, in_words, origin
from orchestrator.host.job_context import JobContext
from orchestrator.host.line_traffic import LineCounter
from orchestrator.host.records import UNKNOWN
from orchestrator.parameters.holding import EVERYTHING, Holding
from orchestrator.parameters.shard import Held, Unusable
from orchestrator.parameters.wire_format import InvalidPayload
from orchestrator.runtime.published import Content, PublicationGone, PublishedFragment, ShardAway, Shipment, spoiled
from orchestrator.runtime.shard_worker import ShardWorker

log = logging.getLogger(__name__)

ARRIVAL_CHECK_S = 0.5
PULL_SLICE_S = 5.0
IMPAIRED_SLICE_S = 0.1
"""How soon it is noticed that a cut, or slowness, was called off."""
RETRY_S = 0.2
JOIN_TIMEOUT_S = 10.0
WATCH_S = 2.0
"""Between two looks at what is in the way of payloads."""
MARKER_TIMEOUT_S = 10.0
"""What waits behind it has a way that does not work, either."""
PULLS_MAX = 4
"""Publications that the island pulls at once: each takes one of its process's threads, of which reports need some."""
IN_CALLS_BYTES_MAX = 128 << 10
"""Of publications in calls that are not answered yet. Reports and commands share these calls' connection and wait behind."""

HOLDING_TIMEOUT_S = 10.0
DAMAGED = (TransferError, PayloadDamaged, InvalidPayload)
"""What says that a publication did not come as it was sent: it is sent again."""

Request = tuple[ray.ObjectRef[Carried | None], ...]
"""An offer, which was asked for already: of each of the island's processes."""
Answer = TypeVar("Answer")


class ImpairedLink:
    """The link to one incarnation, through which everything to and from it passes, until ``closed`` is set.

    Injected faults (``core.faults``) delay, corrupt or drop what it carries. An answer, or a failure, during a cut arrives
    at its end; bytes on a slow link take their time; a payload may come spoilt, late, or not at all. Every wait ends when
    the link is closed, and soon after the impairment was cleared. Knows nothing of what is carried.
    """

    def __init__(self, closed: threading.Event) -> None:
        self.impairment = LinkImpairment()
        self.closed = closed

    def slow(self) -> bool:
        return self.impairment.slow(time.monotonic())

    def get(self, call: ray.ObjectRef[Answer], timeout_s: float) -> Answer:
        """Return the answer, as ``ray.get`` does. What comes while the link is cut is seen only afterwards."""
        deadline = time.monotonic() + timeout_s
        while True:
            while self.is_cut():
                if time.monotonic() >= deadline or self.closed.wait(IMPAIRED_SLICE_S):
                    raise TimeoutError
            try:
                answer = ray.get(call, timeout=max(0.0, deadline - time.monotonic()))
            except RayError:
                if not self.is_cut():
                    raise
            else:
                if not self.is_cut():
                    return answer

    def wait_until_open(self) -> bool:
        """Returns once nothing is cut off; false if the link was closed before that."""
        while self.is_cut() and not self.closed.wait(IMPAIRED_SLICE_S):
            pass
        return not self.closed.is_set()

    def delay(self, size_bytes: int) -> None:
        """Take the time that slowness costs so many bytes, unless it ends or is called off before."""
        now = time.monotonic()
        there_at = now + self.impairment.transfer_delay_s(size_bytes, now)
        while (now := time.monotonic()) < there_at and self.impairment.slow(now):
            if self.closed.wait(min(IMPAIRED_SLICE_S, there_at - now)):
                return

    def impaired(self, payload: Content | None) -> Content | None:
        """The payload as it arrives, when it does; None if it does not arrive, or there was no payload."""
        if payload is None:
            return None
        self.delay(len(payload))
        fault = self.impairment.payload_fault()
        if fault is None:
            return payload
        match fault:
            case Delay():
                self.closed.wait(fault.duration_s)
                return payload
            case Corrupt():
                return spoiled(payload) if isinstance(payload, memoryview) else payload.spoiled()
            case Drop():
                return None
            case _:
                assert_never(fault)

    def is_cut(self) -> bool:
        """Return whether the link is cut now."""
        return self.impairment.cut_s(time.monotonic()) > 0.0


@dataclass(frozen=True, slots=True)
class Delivery:
    """A publication on its way to one island, with the facts that go with it."""

    published: PublishedFragment
    step: int
    merged_offer: MergedOffer
    anchor: ScheduleAnchor
    announcement: Announcement | None = None


@dataclass(frozen=True, slots=True)
class Consignment:
    """The part of a publication that one of the island's processes, by rank, is sent, according to what it holds.

    ``server`` is the process that serves what it pulls.
    """

    rank: int
    fragment: FragmentId
    delivery: Delivery
    shipment: Shipment
    digest: str
    carried: tuple[Carried, ...]
    server: object


@dataclass(frozen=True, slots=True)
class Marker:
    """A checkpoint's marker. ``collect`` is called for each of the island's processes once the island has it."""

    checkpoint: int
    folder: str
    collect: Callable[[int, ActorHandle[IslandInterface], Callable[[], bool]], None] | None = None


class ParameterLink:
    """The payloads to and from one incarnation, until ``closed`` is set; ``close`` then wakes the thread that delivers."""

    def __init__(
        self,
        name: str,
        ranks: Sequence[tuple[ActorHandle[IslandInterface], Membership]],
        context: JobContext,
        link: ImpairedLink,
        closed: threading.Event,
        shard: ShardWorker,
        line: LineCounter,
    ) -> None:
        self._name, self._epoch = name, context.epoch
        self._ranks = tuple(actor for actor, _ in ranks)
        self._memberships = tuple(membership for _, membership in ranks)
        self._link, self._closed, self._shard, self._line = link, closed, shard, line
        self._outgoing: dict[FragmentId, Delivery] = {}
        self._under_way: dict[FragmentId, Delivery] = {}
        self._held: dict[tuple[int, FragmentId], Version] = {}
        """What each of the island's processes said that it holds."""
        self._holdings: dict[int, Holding] = {}
        self._marker: Marker | None = None
        self._outgoing_changed = threading.Condition()
        self._newest_version: dict[FragmentId, Version] = {}
        """The newest version of each fragment that was published to the island, whether it has come or not."""
        self._newest_offer: dict[FragmentId, int] = {}
        self._passed_over: set[FragmentId] = set()
        """Whose last pull was abandoned for a newer offer. The next is not, so that a slow line brings one now and then."""
        self._dead = threading.Event()
        self.answered_at = -math.inf
        """When, by the monotonic clock, rank 0 last answered a call of this link."""
        self._served_at: Address | None = None
        """Where the island's process serves, once a ticket has said so."""
        self._not_joined: tuple[float, str] | None = None
        """Since when, and why, the island is no member of the channel; None once it is."""
        threading.Thread(target=context.guarded, args=(self._watch,), name=f"{name}.watch", daemon=True).start()
        threading.Thread(target=context.guarded, args=(self._deliver,), name=f"{name}.deliver", daemon=True).start()

    # ── up ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def request(self, offer: Offer) -> Request:
        """Ask the island for the offer; the request is for ``fetch``."""
        self.note(offer)
        return tuple(self._request_of(rank, offer) for rank in range(len(self._ranks)))

    def _request_of(self, rank: int, offer: Offer) -> ray.ObjectRef[Carried | None]:
        return self._ranks[rank].call(IslandInterface.take_payload, self._epoch, offer.fragment, offer.offer)

    def note(self, offer: Offer) -> None:
        """There is this offer, which may make the pull of an older one of its fragment needless."""
        self._newest_offer[offer.fragment] = max(offer.offer, self._newest_offer.get(offer.fragment, 0))

    def is_replaced(self, offer: Offer) -> bool:
        """Return whether there is a newer offer of its fragment: the island does not give the bytes of this one any more."""
        return self._newest_offer.get(offer.fragment, 0) > offer.offer

    def versions_behind(self, offer: Offer) -> int:
        """Return how many versions of its fragment were published since the one that this offer is based on."""
        return max(0, self._newest_version.get(offer.fragment, 0) - offer.base_version)

    def withdraw(self, offer: Offer, request: Request) -> bool:
        """Let go of an offer that was asked for, if its bytes are still to be pulled. Return whether it was let go."""
        try:
            answers = [self._link.get(answer, 0.0) for answer in request]
        except (RayError, TimeoutError):
            return False  # what is still to be answered may have the bytes
        for rank, carried in enumerate(answers):
            if carried is not None:
                self._let_go(rank, offer, carried)
        return any(isinstance(carried, Ticket) for carried in answers)

    def abandon(self) -> None:
        """The island's process is gone: pulls from it end now, and not when they are found to stall."""
        self._dead.set()

    def fetch(self, offer: Offer, payload: PayloadId, request: Request) -> Held | Unusable | None:
        """Pull the bytes of all its parts and have the shard hold them under this name.

        None where nothing came: the offer was replaced meanwhile, or died with its island. Raises ShardAway.
        """
        began, contents = time.monotonic(), []
        may_pass_over = offer.fragment not in self._passed_over
        self._passed_over.discard(offer.fragment)
        for pulled in self._pulled(offer, request, may_pass_over):
            content = self._link.impaired(pulled)  # one after another: all are on one line
            if content is None or self._closed.is_set():
                return None
            contents.append(content)
        self._line.received(sum(map(len, contents)), time.monotonic() - began)
        return self._shard.receive(payload, offer.fragment, *contents)

    def _pulled(self, offer: Offer, request: Request, may_pass_over: bool) -> Sequence[Content | None]:
        """Pull all parts of the offer at once, and return each of them, or None for one that was not pulled."""
        if len(request) == 1:
            return (self._pull(0, offer, request[0], may_pass_over),)
        with ThreadPoolExecutor(len(request), f"{self._name}.pull") as pulling:
            pulls = [pulling.submit(self._pull, rank, offer, of, may_pass_over) for rank, of in enumerate(request)]
            return [pull.result() for pull in pulls]

    def _pull(
        self, rank: int, offer: Offer, request: ray.ObjectRef[Carried | None], may_pass_over: bool
    ) -> Content | None:
        fragment = offer.fragment

        def over() -> bool:
            return self._closed.is_set() or self._dead.is_set()

        def superseded() -> bool:
            return may_pass_over and self.is_replaced(offer)

        while not over():
            try:
                carried = self._link.get(request, PULL_SLICE_S)
                self._answered(rank)
                if carried is None:
                    return None
                if isinstance(carried, Ticket):
                    self._served_at = carried.addresses[0]
                content = self._shard.pull(fragment, carried, lambda: over() or superseded() or self._link.is_cut())
                self._let_go(rank, offer, carried)
                return content if self._link.wait_until_open() else None
            except TimeoutError:
                continue  # the same call: a stopped island answers it when it goes on
            except TransferCancelled:
                if over() or not self._link.wait_until_open():
                    return None
                if superseded():
                    self._passed_over.add(fragment)
                    return None
            except PayloadDamaged as error:  # it was pulled again and again
                log.error("%s: offer %d is skipped: %s", self._name, offer.offer, in_words(error))
                return None
            except TransferError as error:
                log.warning("%s: offer %d is asked for again: %s", self._name, offer.offer, in_words(error))
                self._closed.wait(RETRY_S)
            except ActorDiedError:
                return None  # the report link notices it, too
            except RayTaskError as error:
                if not isinstance(error.cause, TransferError):  # its own code failed, and would again
                    log.error("%s: offer %d is skipped: %s", self._name, offer.offer, in_words(error))
                    return None
                self._closed.wait(RETRY_S)
            except RayError:
                self._closed.wait(RETRY_S)
            self.note(offer)
            request = self._request_of(rank, offer)
        return None

    def _let_go(self, rank: int, offer: Offer, carried: Carried) -> None:
        """The island need not serve it any more. Nobody waits for the answer: a newer offer has the same effect."""
        if isinstance(carried, Ticket):
            self._ranks[rank].call(IslandInterface.release_payload, offer.fragment, offer.offer)

    # ── down ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def publish(self, fragment: FragmentId, delivery: Delivery) -> None:
        """Send this version on when the batch before it has arrived."""
        with self._outgoing_changed:
            self._outgoing[fragment] = delivery
            self._newest_version[fragment] = delivery.published.version
            self._count_waiting()
            self._outgoing_changed.notify()

    def mark(self, marker: Marker) -> None:
        """Send a checkpoint's marker, behind all that was published before and ahead of all that is published after."""
        with self._outgoing_changed:
            self._marker = marker
            self._outgoing_changed.notify()

    def holdings(self) -> tuple[Holding, ...]:
        """Return what each of the island's processes holds, by rank; everything, for one that cannot be asked now.

        The processes have built their models by then: nothing is published for them before.
        """
        if len(self._ranks) == 1:
            return (EVERYTHING,)
        for rank, actor in enumerate(self._ranks):
            if rank not in self._holdings:
                try:
                    call = actor.call(IslandInterface.holding, self._epoch)
                    self._holdings[rank] = self._link.get(call, HOLDING_TIMEOUT_S)
                except (RayError, TimeoutError) as error:
                    log.warning("%s: host %d is sent whole fragments: %s", self._name, rank, _reason_of(error))
        return tuple(self._holdings.get(rank, EVERYTHING) for rank in range(len(self._ranks)))

    def close(self) -> None:
        with self._outgoing_changed:
            self._outgoing_changed.notify()

    def _deliver(self) -> None:
        self._join()
        while True:
            with self._outgoing_changed:
                self._outgoing_changed.wait_for(lambda: self._outgoing or self._marker or self._closed.is_set())
                batch, self._outgoing = self._outgoing, {}
                self._under_way = batch
                self._count_waiting()
                marker, self._marker = self._marker, None
            if marker is not None:
                self._deliver_marker(marker)
            holdings = self.holdings() if batch else ()
            consignments = [
                one
                for fragment, delivery in sorted(batch.items())
                for one in self._consigned(fragment, delivery, holdings)
            ]
            began = time.monotonic()
            self._link.delay(sum(one.shipment.byte_count for one in consignments))
            if not self._link.wait_until_open():
                self._line.waits(0, 0)
                return
            with_bytes = [one.shipment for one in consignments if one.shipment.payloads]
            for shipment in with_bytes:
                self._line.sent("values" if shipment.since is None else "update", shipment.byte_count)
            self._send(consignments)
            if with_bytes:
                self._line.delivered(time.monotonic() - began)
            with self._outgoing_changed:
                self._under_way = {}
                self._count_waiting()

    def _consigned(self, fragment: FragmentId, delivery: Delivery, holdings: Sequence[Holding]) -> list[Consignment]:
        """Return what each of the island's processes is sent: nothing yet, while the fragment's shard is away."""
        published = delivery.published
        server = published.server
        try:
            consignments = []
            for rank, holding in enumerate(holdings):
                shipment = published.since(self._held.get((rank, fragment)), holding)
                carried = tuple(payload.carried(self._memberships[rank].subject) for payload in shipment.payloads)
                consignments.append(
                    Consignment(rank, fragment, delivery, shipment, published.digest_of(holding), carried, server)
                )
        except PublicationGone:
            return []  # the newer version is published when the core has heard of it
        except ShardAway:
            self._send_again(fragment, delivery)
            self._closed.wait(RETRY_S)
            return []
        return consignments

    def _count_waiting(self) -> None:
        """Count what has not arrived, and not what the island holds. The caller has locked what is outgoing."""
        both = (*self._outgoing.items(), *self._under_way.items())
        deliveries = [
            delivery for fragment, delivery in both if not self._is_held(fragment, delivery.published.version)
        ]
        self._line.waits(len(deliveries), sum(delivery.published.usual_bytes for delivery in deliveries))

    def _is_held(self, fragment: FragmentId, version: Version) -> bool:
        """Return whether each of the island's processes said that it holds this version or a later one."""
        return all(self._held.get((rank, fragment), UNKNOWN) >= version for rank in range(len(self._ranks)))

    def _join(self) -> None:
        """Make the island's processes members of the channel, however long that takes; what needs it waits for it there."""
        while self._link.wait_until_open() and not self._dead.is_set():
            try:
                calls = [
                    actor.call(IslandInterface.join_channel, self._epoch, membership)
                    for actor, membership in zip(self._ranks, self._memberships, strict=True)
                ]
                for call in calls:
                    self._link.get(call, JOIN_TIMEOUT_S)
                self._not_joined = None
                return
            except ActorDiedError:
                return  # the report link notices it, too
            except (RayError, TimeoutError) as error:
                log.warning("%s: it has not joined the channel: %s", self._name, in_words(error))
                self._not_joined = (self._not_joined or (time.monotonic(), ""))[0], _reason_of(error)
                self._closed.wait(RETRY_S)

    # ── what is in the way ────────────────────────────────────────────────────────────────────────────────────────

    def _watch(self) -> None:
        """Say what is in the way of payloads, at either end, for as long as somebody waits for any."""
        while self._link.wait_until_open() and not self._dead.is_set():
            self._line.hindered(self._trouble_here() or self._trouble_there())
            self._closed.wait(WATCH_S)
        self._line.hindered(None)

    def _trouble_here(self) -> str | None:
        if (not_joined := self._not_joined) is not None and time.monotonic() - not_joined[0] >= HINDERED_S:
            return f"it cannot take part in the channel: {not_joined[1]}"
        if self._served_at is None:
            return None
        return "; ".join(self._shard.hindrances(self._served_at)) or None

    def _trouble_there(self) -> str | None:
        troubles = [trouble for actor in self._ranks if (trouble := self._trouble_of(actor))]
        return "; ".join(troubles) or None

    def _trouble_of(self, actor: ActorHandle[IslandInterface]) -> str | None:
        call = actor.call(IslandInterface.hindrances, self._epoch)
        while not self._closed.is_set() and not self._dead.is_set():
            try:
                troubles = self._link.get(call, WATCH_S)
                return "; ".join(troubles) if troubles else None
            except TimeoutError:
                continue  # the same call: a stopped island answers it when it goes on
            except RayError:
                return None  # the report link says why
        return None

    def _call(self, one: Consignment) -> ray.ObjectRef[int]:
        delivery = one.delivery
        announcement, actor = delivery.announcement, self._ranks[one.rank]
        if announcement is not None and len(self._ranks) == 1 and actor.has(IslandInterface.announce):
            # nobody waits for the answer: it only serves a salvage
            actor.call(IslandInterface.announce, self._epoch, replace(announcement, digest=one.digest))
        return self._ranks[one.rank].call(
            IslandInterface.deliver,
            self._epoch,
            one.fragment,
            delivery.published.version,
            delivery.step,
            offer_number(delivery.merged_offer),
            delivery.anchor,
            one.shipment.since,
            one.digest,
            *one.carried,
        )

    def _gone(self) -> bool:
        return self._closed.is_set() or self._dead.is_set()

    def _deliver_marker(self, marker: Marker) -> None:
        """Send the marker until the island has it or the checkpoint no longer waits for it. Nothing newer overtakes it."""
        while self._link.wait_until_open():
            try:
                call = self._ranks[0].call(IslandInterface.save, self._epoch, marker.checkpoint, marker.folder)
                self._link.get(call, MARKER_TIMEOUT_S)
                break
            except ActorDiedError:
                return  # the report link notices it, too
            except RayTaskError as error:
                log.error("%s: a marker is not taken: %s", self._name, in_words(error))
                return
            except (RayError, TimeoutError) as error:
                log.warning("%s: a marker did not arrive: %s", self._name, in_words(error))
                self._closed.wait(RETRY_S)
        if marker.collect is not None and not self._closed.is_set():
            for rank, actor in enumerate(self._ranks):
                marker.collect(rank, actor, self._gone)

    def _send(self, consignments: Sequence[Consignment]) -> None:
        """Send until everything has arrived, something newer waits, or the link is closed.

        A part that was lost, or that does not follow what the island holds, is sent again. Nothing waits for a part whose
        shard's process is gone: an island pulls that until ``stall_s`` are over, or it is sent the fragment again.
        """
        unsent = deque(consignments)
        waiting: dict[ray.ObjectRef[int], Consignment] = {}
        while (unsent or waiting) and not self._closed.is_set():
            while unsent and self._has_room(unsent[0].shipment, [one.shipment for one in waiting.values()]):
                one = unsent.popleft()
                waiting[self._call(one)] = one
            wanted_count = 1 if unsent else len(waiting)
            done, _ = ray.wait(list(waiting), num_returns=wanted_count, timeout=ARRIVAL_CHECK_S)
            for call in done:
                self._settle(call, waiting.pop(call))
            for call in [c for c, one in waiting.items() if one.delivery.published.server is not one.server]:
                one = waiting.pop(call)
                log.warning("%s: the shard of fragment %d is gone; others do not wait for it", self._name, one.fragment)
                self._send_again(one.fragment, one.delivery)

    def _has_room(self, next_one: Shipment, waiting: Sequence[Shipment]) -> bool:
        """Return whether the next one may be sent while these wait for their answers."""
        if next_one.is_pulled:
            return sum(one.is_pulled for one in waiting) < PULLS_MAX * len(self._ranks)
        in_calls = sum(one.byte_count for one in waiting if not one.is_pulled)
        return in_calls == 0 or in_calls + next_one.byte_count <= IN_CALLS_BYTES_MAX * len(self._ranks)

    def _settle(self, call: ray.ObjectRef[int], one: Consignment) -> None:
        """Note the answer of a call that has ended, whose payloads were held until now."""
        try:
            held = self._link.get(call, ARRIVAL_CHECK_S)
        except (RayError, TimeoutError) as error:
            if isinstance(error, RayTaskError) and not isinstance(error.cause, DAMAGED):
                # its own code failed, and would again: the next version may do better
                log.error("%s: a fragment is not taken: %s", self._name, in_words(error))
                return
            log.warning("%s: a fragment did not arrive: %s", self._name, in_words(error))
            self._send_again(one.fragment, one.delivery)
            self._closed.wait(RETRY_S)
        else:
            self._answered(one.rank)
            self._held[one.rank, one.fragment] = Version(held)
            if held < one.delivery.published.version:
                self._send_again(one.fragment, one.delivery)

    def _answered(self, rank: int) -> None:
        if rank == 0:
            self.answered_at = time.monotonic()

    def _send_again(self, fragment: FragmentId, delivery: Delivery) -> None:
        with self._outgoing_changed:
            self._outgoing.setdefault(fragment, delivery)


def _reason_of(error: RayError | TimeoutError) -> str:
    return first_line(error) if str(origin(error)) else "no answer"
