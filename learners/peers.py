"""The way to the states of peers, from process to process: calls ask for them, and the job's channel brings them.

A peer that is one process gives all of a fragment. Of one that is spread over hosts, and to one that is, each process gives
its part: the peer holds a boundary still under a name, and each receiving process gets from each of its processes the
windows that it needs (``state_parts``).

Refuses to know when states are wanted, and from whom (``catching_up``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from learners import state_transfer
from learners.contract import Arrays
from learners.group.link import FetchPart
from learners.handed_over import HandedOver
from learners.plain_arrays import restored
from learners.state_transfer import Block, blocks_of, put_together, require_numbers
from orchestrator.actors.handle import ActorHandle
from orchestrator.actors.island import IslandInterface
from orchestrator.channel.frames import Ticket
from orchestrator.core.vocabulary import Epoch
from orchestrator.parameters.parts import Bounds

ABSENCE_CHECK_S = 1.0
PULLS_MAX = 4
"""Processes of a peer from which one process pulls at once."""


class Absence:
    """Whether another island's process is gone, called as often as one likes: it is asked once a second at most."""

    def __init__(self, actor: ActorHandle[IslandInterface]) -> None:
        self._actor, self._lock = actor, threading.Lock()
        self._hello, self._asked_at, self._gone = actor.call(IslandInterface.hello), time.monotonic(), False

    def __call__(self) -> bool:
        with self._lock:
            if not self._gone and time.monotonic() - self._asked_at >= ABSENCE_CHECK_S:
                done, _ = ray.wait([self._hello], timeout=0)
                try:
                    if done:
                        ray.get(self._hello)
                        self._hello = self._actor.call(IslandInterface.hello)
                except ActorDiedError:
                    self._gone = True
                except RayError:  # it is not answered, which says nothing of the channel
                    self._hello = self._actor.call(IslandInterface.hello)
                self._asked_at = time.monotonic()
            return self._gone


class Peers:
    """``bytes_per_s`` limits what a donor gives, ``fragment_sizes`` are in parameters."""

    def __init__(
        self, handed_over: HandedOver, bytes_per_s: float | None = None, fragment_sizes: Sequence[int] = ()
    ) -> None:
        self._handed_over, self._bytes_per_s, self._sizes = handed_over, bytes_per_s, fragment_sizes

    def state(self, epoch: Epoch, process: str, fragment: int, *, in_parts: bool) -> dict[str, Any]:
        """``IslandInterface.export_state``'s answer, with the arrays under ``"arrays"`` where it is not to be had in parts.

        Asked for with a limit, for links that the service does not watch, and pulled without one.
        """
        donor, receiver = _actor(process), self._handed_over.subject(epoch)
        call = donor.call(IslandInterface.export_state, epoch, fragment, receiver, in_parts)
        reply: dict[str, Any] = ray.get(call, timeout=self._limit_s(fragment))
        if "content" in reply:
            reply["arrays"] = self._pulled(epoch, donor, reply)
        return reply

    def part(self, order: FetchPart, wanted: Mapping[str, Bounds] | None) -> Arrays:
        """What is wanted of a fragment's state, from all the processes that have parts of it; None wants all.

        Raises DataError where they have not all of it, or it has no numbers.
        """
        processes = len(order.processes)
        with ThreadPoolExecutor(min(PULLS_MAX, processes), "fetch-part") as pulling:
            pulls = [pulling.submit(self._part_of, order, process, wanted) for process in order.processes]
            arrays = put_together([block for pull in pulls for block in pull.result()], wanted)
        require_numbers(arrays)
        return arrays

    def forget(self, order: FetchPart) -> None:
        """What was held for this order has arrived, or is not wanted any more."""
        for process in order.processes:
            try:
                _actor(process).call(IslandInterface.forget_part, order.cut, order.fragment)
            except ValueError:  # it is gone
                continue

    def _part_of(self, order: FetchPart, process: str, wanted: Mapping[str, Bounds] | None) -> list[Block]:
        donor, receiver = _actor(process), self._handed_over.subject(order.epoch)
        arguments = (order.epoch, order.cut, order.fragment, receiver, wanted)
        call = donor.call(IslandInterface.export_part, *arguments)
        reply: dict[str, Any] = ray.get(call, timeout=self._limit_s(order.fragment))
        return blocks_of(self._pulled(order.epoch, donor, reply), reply["bounds"])

    def _pulled(self, epoch: Epoch, donor: ActorHandle[IslandInterface], reply: Mapping[str, Any]) -> Arrays:
        carried = reply["content"]
        try:
            content = self._handed_over.received(epoch, carried, Absence(donor))
        finally:
            if isinstance(carried, Ticket):
                donor.call(IslandInterface.release_state, carried.payload)
        return restored(reply["table"], content)

    def _limit_s(self, fragment: int) -> float:
        part, whole = (state_transfer.STATE_BYTES_PER_PARAMETER * n for n in (self._sizes[fragment], sum(self._sizes)))
        return state_transfer.limit_s(part, self._bytes_per_s) + whole / state_transfer.TO_HOST_BYTES_PER_S


def _actor(name: str) -> ActorHandle[IslandInterface]:
    return ActorHandle(ray.get_actor(name, namespace=ray.get_runtime_context().namespace))
