"""The parameter link to one incarnation of an island: contributions up into the shard, publications down.

    up        ``request`` asks the island for an offer's bytes, ``fetch`` waits for them and gives them to the shard
    deliver   newest version of each fragment; at most one batch is under way, so a silent island costs no memory

Knows nothing of reports and events: the report link, which reads reports in their order, says which offers to fetch. Only
the shard knows what is in the bytes. A checkpoint's marker comes this way because it must keep its place among publications.
Everything passes the ``ImpairedLink``, which is chaos' business.

Source: Ray 2.60 as measured: calls to a stopped or cut-off actor hang, so every get has a timeout and
keeps waiting on the *same* call, whose answer still comes.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from orchestrator.actors.handle import ActorHandle, as_received
from orchestrator.actors.island import IslandInterface
from orchestrator.core.messages import Offer
from orchestrator.core.vocabulary import FragmentId, PayloadId, ScheduleAnchor, Version
from orchestrator.host.job_context import JobContext
from orchestrator.host.line_traffic import LineCounter
from orchestrator.parameters.shard import Held, Unusable
from orchestrator.parameters.tensors import ByteArray
from orchestrator.runtime.impaired_link import ImpairedLink
from orchestrator.runtime.published import Published, Shipment
from orchestrator.runtime.shard_worker import ShardWorker

log = logging.getLogger(__name__)

ARRIVAL_CHECK_S = 0.5
PULL_SLICE_S = 5.0
RETRY_S = 0.2
MARKER_TIMEOUT_S = 10.0
"""What waits behind it has a way that does not work, either."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A publication on its way to one island, with the facts that go with it."""

    published: Published
    step: int
    merged_offer: int
    fix: ScheduleAnchor


class ParameterLink:
    """Until ``closed`` is set; ``close`` then wakes the thread that delivers."""

    def __init__(
        self,
        name: str,
        actor: ActorHandle[IslandInterface],
        context: JobContext,
        link: ImpairedLink,
        closed: threading.Event,
        shard: ShardWorker,
        line: LineCounter,
    ) -> None:
        self._name, self._actor, self._epoch = name, actor, context.epoch
        self._link, self._closed, self._shard, self._line = link, closed, shard, line
        self._outgoing: dict[FragmentId, Delivery] = {}
        self._under_way: dict[FragmentId, Delivery] = {}
        self._held: dict[FragmentId, Version] = {}
        """What the island said that it holds."""
        self._marker: tuple[int, str] | None = None
        self._outgoing_changed = threading.Condition()
        threading.Thread(target=context.guarded, args=(self._deliver,), name=f"{name}.deliver", daemon=True).start()

    # ── up ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def request(self, offer: Offer) -> ray.ObjectRef[ByteArray | None]:
        """Ask the island for the offer's bytes; the request is for ``fetch``."""
        return self._actor.call(IslandInterface.take_payload, offer.fragment, offer.offer)

    def fetch(
        self, offer: Offer, payload: PayloadId, request: ray.ObjectRef[ByteArray | None]
    ) -> Held | Unusable | None:
        """Wait for the bytes and have the shard hold them under this name.

        None where nothing came: the offer was replaced meanwhile, or died with its island.
        """
        began = time.monotonic()
        answer = self._pull(offer, request)
        content = self._link.impaired(None if answer is None else answer.data)
        if content is None or self._closed.is_set():
            return None
        self._line.received(len(content), time.monotonic() - began)
        return self._shard.receive(payload, offer.fragment, content)

    def _pull(self, offer: Offer, request: ray.ObjectRef[ByteArray | None]) -> ByteArray | None:
        while not self._closed.is_set():
            try:
                return self._link.get(request, PULL_SLICE_S)
            except TimeoutError:
                continue  # the same call: a stopped island answers it when it goes on
            except ActorDiedError:
                return None  # the report link notices it, too
            except RayTaskError as error:  # its own code failed, and would again: the reports behind it must be read
                log.error("%s: offer %d is skipped: %s", self._name, offer.offer, error)
                return None
            except RayError:
                self._closed.wait(RETRY_S)
                request = self.request(offer)
        return None

    # ── down ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def publish(self, fragment: FragmentId, delivery: Delivery) -> None:
        """Send this version on when the batch before it has arrived."""
        with self._outgoing_changed:
            self._outgoing[fragment] = delivery
            self._count_waiting()
            self._outgoing_changed.notify()

    def mark(self, checkpoint: int, folder: str) -> None:
        """Send a checkpoint's marker, behind all that was published before and ahead of all that is published after."""
        with self._outgoing_changed:
            self._marker = (checkpoint, folder)
            self._outgoing_changed.notify()

    def close(self) -> None:
        with self._outgoing_changed:
            self._outgoing_changed.notify()

    def _deliver(self) -> None:
        while True:
            with self._outgoing_changed:
                self._outgoing_changed.wait_for(lambda: self._outgoing or self._marker or self._closed.is_set())
                batch, self._outgoing = self._outgoing, {}
                self._under_way = batch
                self._count_waiting()
                marker, self._marker = self._marker, None
            if marker is not None:
                self._deliver_marker(*marker)
            shipments = {fragment: d.published.since(self._held.get(fragment)) for fragment, d in batch.items()}
            began = time.monotonic()
            self._link.delay(sum(shipment.byte_count for shipment in shipments.values()))
            if not self._link.wait_until_open():
                self._line.waits(0, 0)
                return
            for shipment in shipments.values():
                self._line.sent("values" if shipment.since is None else "update", shipment.byte_count)
            calls = {self._call(p, batch[p], shipments[p]): (p, batch[p]) for p in sorted(batch)}
            self._await(calls)
            self._line.delivered(time.monotonic() - began)
            with self._outgoing_changed:
                self._under_way = {}
                self._count_waiting()

    def _count_waiting(self) -> None:
        """The caller has locked what is outgoing."""
        deliveries = [*self._outgoing.values(), *self._under_way.values()]
        self._line.waits(len(deliveries), sum(delivery.published.usual_bytes for delivery in deliveries))

    def _call(self, fragment: FragmentId, delivery: Delivery, shipment: Shipment) -> ray.ObjectRef[int]:
        published = delivery.published
        return self._actor.call(
            IslandInterface.deliver,
            self._epoch,
            fragment,
            published.version,
            delivery.step,
            delivery.merged_offer,
            delivery.fix,
            shipment.since,
            published.digest,
            *map(as_received, shipment.payloads),
        )

    def _deliver_marker(self, checkpoint: int, folder: str) -> None:
        """Until the island has it, or the checkpoint would not wait for it any more; nothing newer overtakes it."""
        while self._link.wait_until_open():
            try:
                call = self._actor.call(IslandInterface.save, self._epoch, checkpoint, folder)
                self._link.get(call, MARKER_TIMEOUT_S)
                return
            except ActorDiedError:
                return  # the report link notices it, too
            except RayTaskError as error:
                log.error("%s: a marker is not taken: %s", self._name, error)
                return
            except (RayError, TimeoutError) as error:
                log.warning("%s: a marker did not arrive: %s", self._name, error)
                self._closed.wait(RETRY_S)

    def _await(self, calls: dict[ray.ObjectRef[int], tuple[FragmentId, Delivery]]) -> None:
        """Until all have arrived. What was lost, or did not lead on from what the island holds, is sent again, unless
        something newer waits, until the link is closed.
        """
        waiting = list(calls)
        while waiting and not self._closed.is_set():
            done, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=ARRIVAL_CHECK_S)
            for call in done:
                fragment, delivery = calls[call]
                try:
                    held = self._link.get(call, ARRIVAL_CHECK_S)
                except RayTaskError as error:  # its own code failed, and would again: the next version may do better
                    log.error("%s: a fragment is not taken: %s", self._name, error)
                except (RayError, TimeoutError) as error:
                    log.warning("%s: a fragment did not arrive: %s", self._name, error)
                    self._send_again(fragment, delivery)
                    self._closed.wait(RETRY_S)
                else:
                    self._held[fragment] = Version(held)
                    if held < delivery.published.version:
                        self._send_again(fragment, delivery)

    def _send_again(self, fragment: FragmentId, delivery: Delivery) -> None:
        with self._outgoing_changed:
            self._outgoing.setdefault(fragment, delivery)
