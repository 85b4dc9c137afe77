"""Fetches the states of peers, from process to process: calls request them, and the job's channel transfers them.

A peer with one process gives all of a fragment. If the peer or the receiver is spread over hosts, each process gives its
part: the peer keeps the state of one boundary under a name, and each receiving process gets the windows that it needs from
each of the peer's processes (``state_transfer``).

When states are fetched, and from which peers, is decided in ``state_transfer``. Files of a checkpoint on the synchroniser's
machine are fetched here in the same way, for ``carried_parts``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from learners import state_transfer
from learners.carried_parts import ReadWindow
from learners.contract import Arrays
from learners.group.link import FetchPart
from learners.group.ranks import Leader
from learners.handed_over import HandedOver
from learners.island_arrays import HeldPieces
from learners.plain_arrays import restored
from learners.state_transfer import Block, CutStates, DonorReply, blocks_of, put_together, require_numbers
from orchestrator.actors import ActorHandle, IslandInterface, SynchroniserInterface
from orchestrator.channel.frames import Ticket
from orchestrator.core.vocabulary import Epoch, FragmentId
from orchestrator.errors import InfrastructureError, PayloadDamaged, TransferError, in_words
from orchestrator.parameters.parts import Bounds

ABSENCE_CHECK_S = 1.0
SAVED_WINDOW_S, SAVED_WINDOW_RETRY_S, SAVED_PATIENCE_S = 60.0, 0.5, 300.0
"""A synchroniser answers within the first. It is asked again after the second: it may be made again after a death, or the
line may be down. An island that gives up takes another state than its own, so it is patient."""
NOTHING = memoryview(b"")
PULLS_MAX = 4
"""The most processes of a peer from which one process pulls at the same time."""


class Absence:
    """Tells whether another island's process is gone. It may be called often: it asks the process once a second at most."""

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
                except RayError:  # the call failed, which says nothing about the channel
                    self._hello = self._actor.call(IslandInterface.hello)
                self._asked_at = time.monotonic()
            return self._gone


class Peers:
    """The other islands. ``bytes_per_s`` limits a donor's rate; ``fragment_sizes`` are in parameters."""

    def __init__(
        self, handed_over: HandedOver, bytes_per_s: float | None = None, fragment_sizes: Sequence[int] = ()
    ) -> None:
        self._handed_over, self._bytes_per_s, self._sizes = handed_over, bytes_per_s, fragment_sizes

    def state(self, epoch: Epoch, process: str, fragment: int, *, in_parts: bool) -> dict[str, Any]:
        """Return the answer of ``IslandInterface.export_state``, with ``"arrays"`` unless it comes in parts.

        The call has a time limit, for links that the service does not watch; the pull has none.
        """
        donor, receiver = _actor(process), self._handed_over.subject(epoch)
        call = donor.call(IslandInterface.export_state, epoch, fragment, receiver, in_parts)
        reply: dict[str, Any] = ray.get(call, timeout=self._limit_s(fragment))
        if "content" in reply:
            reply["arrays"] = self._pulled(epoch, donor, reply)
        return reply

    def part(self, order: FetchPart, wanted: Mapping[str, Bounds] | None) -> Arrays:
        """Fetch what is wanted of a fragment's state from all the processes that have parts of it; None wants all.

        Raises DataError if a part is missing, or contains NaN or Inf.
        """
        processes = len(order.processes)
        with ThreadPoolExecutor(min(PULLS_MAX, processes), "fetch-part") as pulling:
            pulls = [pulling.submit(self._part_of, order, process, wanted) for process in order.processes]
            arrays = put_together([block for pull in pulls for block in pull.result()], wanted)
        require_numbers(arrays)
        return arrays

    def fetched(
        self,
        epoch: Epoch,
        actor: str,
        fragment: int,
        held: HeldPieces,
        leader: Leader | None,
        cut_states: CutStates[Callable[[], list[Block]]],
    ) -> DonorReply:
        """Fetch one fragment of the donor's state, here and in the other processes of this island, each what it needs.

        If every process holds the whole model, rank 0 fetches the fragment once and passes it on.
        """
        reply = self.state(epoch, actor, fragment, in_parts=not held.is_whole)
        chunk, at = f"{actor} {reply['step']} {fragment}", (reply["versions"], reply["step"])
        if "cut" not in reply:
            arrays = reply["arrays"]
        else:
            order = FetchPart(epoch, chunk, fragment, reply["cut"], reply["processes"])
            fetch = partial(self.part, order, held.wanted(FragmentId(fragment)))
            try:
                arrays = fetch() if held.is_whole or leader is None else leader.call_beside(order, fetch)
            finally:
                self.forget(order)
        if leader is not None and held.is_whole:
            cut_states.keep(chunk, fragment, lambda: blocks_of(arrays, {}))
            try:
                leader.call(FetchPart(epoch, chunk, fragment, chunk, (own_name(),)))
            finally:
                cut_states.forget(chunk, fragment)
        return DonorReply(arrays, *at, chunk)

    def forget(self, order: FetchPart) -> None:
        """Tell the donor's processes to drop what they keep for this order."""
        for process in order.processes:
            try:
                _actor(process).call(IslandInterface.forget_part, order.cut, order.fragment)
            except ValueError:  # the process is gone
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


def saved_windows(handed_over: HandedOver, epoch: Epoch, synchroniser: str) -> ReadWindow:
    """Return the way to read files of the checkpoint that the job resumed from, on the machine of this actor."""
    actor = ray.get_actor(synchroniser, namespace=ray.get_runtime_context().namespace)
    handle: ActorHandle[SynchroniserInterface] = ActorHandle(actor)
    receiver = handed_over.subject(epoch)

    def window(name: str, start: int, stop: int) -> tuple[int, memoryview]:
        until, reason = time.monotonic() + SAVED_PATIENCE_S, "it has given too many windows to others"
        while time.monotonic() < until:
            try:
                call = handle.call(SynchroniserInterface.read_saved, receiver, name, start, stop)
                if (answer := ray.get(call, timeout=SAVED_WINDOW_S)) is not None:
                    content = answer.content
                    return answer.file_bytes, handed_over.received(epoch, content) if content is not None else NOTHING
            except (RayError, TimeoutError, TransferError, PayloadDamaged) as error:
                if isinstance(error, RayTaskError) and not isinstance(error.cause, TransferError):
                    raise  # its own code failed, and would again
                reason = in_words(error)
            time.sleep(SAVED_WINDOW_RETRY_S)
        raise InfrastructureError(
            detail=f"The synchroniser gave no bytes of {name} for {SAVED_PATIENCE_S:g} s: {reason}."
        )

    return window


def own_name() -> str:
    """Return the name of this process's Ray actor."""
    name = ray.get_runtime_context().get_actor_name()
    assert name is not None
    return name


def _actor(name: str) -> ActorHandle[IslandInterface]:
    return ActorHandle(ray.get_actor(name, namespace=ray.get_runtime_context().namespace))
