"""An island as a Ray actor: the island's loop on one side, the service's calls on the other.

Responsible for turning calls into what the loop understands, and its reports into answers. Refuses to decide anything,
and to wait: nothing a step needs goes through here, so an island trains on whatever becomes of Ray. The process starts
light; JAX is imported when ``prepare`` says what for.

Every command carries its synchroniser's epoch; an older one gets ``Fenced`` (``outbox``, which keeps the reports).
A payload is a *returned* value: it belongs to the caller, and survives this process.

Source: Ray 2.60 as measured; ``runtime.report_link`` says what of it.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, assert_never, cast

import ray

from learners import checkpointing, transfer_limit
from learners.catching_up import CatchingUp
from learners.contract import Arrays, Trainer, batch_size_of, broken_by, tokens_per_schedule_step
from learners.exports import CutStates, HeldStates, Throttle
from learners.factories import trainer_of
from learners.group import devices
from learners.group.follower import Follower
from learners.group.leader import Leader
from learners.group.link import (
    Failed,
    FetchPart,
    Line,
    LinkEnded,
    Prepared,
    Promote,
    StateOrder,
    TakeOuter,
    TakePeer,
    TakeSaved,
    Written,
    admitted,
    joined,
    listener,
)
from learners.handed_over import HandedOver
from learners.island_arrays import HeldPieces, IslandArrays, State, StateRequest
from learners.loop import EvaluationRequest, IslandLoop, LoopPlan
from learners.outbox import Outbox, lower_priority, lower_priority_of_new, thread_ids
from learners.peers import Peers
from learners.plain_arrays import flattened
from learners.state_fetch import Block, Donor, DonorReply, FetchedState, blocks_of, windows
from learners.step_watch import Watchdog
from orchestrator.actors.island import IslandFactory, MeetingPlace, Rank
from orchestrator.channel.endpoint import Carried, Membership
from orchestrator.checkpoints.folder import Folder
from orchestrator.checkpoints.manifest import part_digest
from orchestrator.core.messages import IslandReport, NotSaved, Ready, Saved
from orchestrator.core.vocabulary import Epoch, FragmentId, Incarnation, IslandId, ScheduleAnchor, StepLimits, Version
from orchestrator.errors import ConfigurationError, InfrastructureError, in_words
from orchestrator.parameters import fragment_map
from orchestrator.parameters.holding import Holding
from orchestrator.parameters.parts import Bounds
from orchestrator.replica.replica import Publication
from orchestrator.system import logbook
from orchestrator.system.ports import free_port
from orchestrator.system.roots import AllowedRoots

SYNTHETIC = "learners.synthetic"

log = logging.getLogger(__name__)


class Island:
    """One incarnation. Made with many threads: a long poll, an export and deliveries go on at once."""

    def __init__(
        self, island: IslandId, environment: Mapping[str, str], book: logbook.Logbook, abandoned_after_s: float
    ) -> None:
        os.environ.update(environment)
        logbook.keep(book)
        log.info("%s, incarnation %d, is process %d", island, book.number, os.getpid())
        self._island, self._incarnation = island, Incarnation(book.number)
        self._synthetic = False
        self._roots = AllowedRoots()
        self._saves: set[int] = set()
        self._outbox = Outbox(self._standing)
        self._handed_over = HandedOver()
        self._loop: IslandLoop | None = None
        self._listening: socket.socket | None = None
        self._leader: Leader | None = None
        self._follower: Follower | None = None
        self._catching_up = CatchingUp(self._outbox)
        self._ready: Ready | None = None
        self._computes = False
        self._watchdog = Watchdog(abandoned_after_s, self._give_up)
        self._shard_index = 0
        self._throttle, self._held_s = Throttle(None), 0.0
        self._of_one_boundary = True
        self._held_states = HeldStates(self._export_fragments, lambda: self._held_s)
        self._cut_states: CutStates[Callable[[], list[Block]]] = CutStates(lambda: self._held_s)
        self._cut_count = itertools.count(1)
        self._peers = Peers(self._handed_over)
        self._chunks: dict[str, Arrays] = {}
        """What this process got of a peer's state, by chunk, where rank 0 says when it is loaded."""

    def hello(self) -> dict[str, Any]:
        """The identity of this process: the facts of ``Placement``."""
        return {
            "pid": os.getpid(),
            "seen_at": time.clock_gettime(time.CLOCK_BOOTTIME),
            "node_id": ray.get_runtime_context().get_node_id(),
            "node": socket.gethostname(),
        }

    def meeting_place(self) -> MeetingPlace:
        """Where the other processes of this island meet this one, which is its rank 0 from here on."""
        host = ray.util.get_node_ip_address()
        self._listening = listener(host)
        devices_port = free_port(host)  # JAX's coordinator binds its port itself
        return MeetingPlace(host, self._listening.getsockname()[1], devices_port)

    def prepare(
        self, spec: dict[str, Any], shard_index: int, shard_count: int, normal_priority: bool, rank: Rank | None = None
    ) -> None:
        """Begin to build and compile the model; ``Ready`` or ``Broken`` follows. ``rank`` is of an island of many hosts.

        ``spec["roots"]`` is what this island may touch of files that others name to it.
        An island that comes back gets ``normal_priority`` until it is ready, so that it starts as fast as the others train.
        """
        self._synthetic, self._roots = spec["trainer"].startswith(SYNTHETIC), spec["roots"]
        self._computes = os.environ.get("JAX_PLATFORMS") == "cpu" and not self._synthetic
        begin = self._prepare if rank is None or rank.number == 0 else self._follow
        arguments = (spec, shard_index, shard_count, normal_priority, rank)
        threading.Thread(target=begin, args=arguments, name="prepare", daemon=True).start()

    def load(self, epoch: Epoch, versions: Sequence[Version], step: int, cursor: int, *payloads: Carried) -> None:
        """Take the synchroniser's parameters, one payload a fragment. ``CaughtUp`` or ``CatchUpFailure`` follows."""
        self._outbox.heed(epoch)
        contents = self._pulled(epoch, payloads)

        def load() -> tuple[tuple[Version, ...], int]:
            loop = self._built()
            loop.load(loop.outer_values(contents), versions, step, cursor)
            return tuple(versions), step

        self._catching_up.take(None, load)

    def load_ranks(
        self, epoch: Epoch, versions: Sequence[Version], step: int, cursor: int, payloads: Sequence[Sequence[Carried]]
    ) -> None:
        """As ``load``, of an island of many hosts: the payloads of each rank."""
        self._outbox.heed(epoch)
        leader = self._leader
        assert leader is not None

        def load() -> tuple[tuple[Version, ...], int]:
            loop = self._built()
            orders = {
                rank: TakeOuter(epoch, tuple(versions), step, cursor, tuple(own)) for rank, own in enumerate(payloads)
            }
            contents = leader.call_beside(orders, lambda: self._pulled(epoch, payloads[0]))
            loop.load(loop.outer_values(contents), versions, step, cursor)
            return tuple(versions), step

        self._catching_up.take(None, load)

    def load_from(self, epoch: Epoch, count: int, donors: Mapping[str, IslandId], cursor: int) -> None:
        """Take the state of peers, named by their actors, from process to process (``CatchingUp.fetch``)."""
        self._outbox.heed(epoch)
        loop = self._built()
        self._catching_up.fetch(
            (epoch, count),
            {actor: Donor(island, partial(self._state_of, epoch, actor)) for actor, island in donors.items()},
            loop.fragment_count,
            lambda state: self._load_peer(state, cursor),
            of_one_boundary=self._of_one_boundary,
        )

    def promote(self, island: IslandId, shard_index: int, book: logbook.Logbook) -> dict[str, Any]:
        """A standby becomes an island: its name, data and logbook. ``Ready`` follows; answers as ``hello``."""
        self._become(island, book)
        self._shard_index = shard_index
        if self._leader is not None:
            self._leader.becomes = (island, book)
        self._outbox.forget()
        self._catching_up.forget()
        self._ready = Ready(self._ready.device_count if self._ready else 0, 0.0)
        self._outbox.put(self._ready)
        return self.hello()

    def resume(self, epoch: Epoch, cursor: int) -> None:
        """Go on from what this process holds from its time as a standby. ``CaughtUp`` or ``CatchUpFailure`` follows."""
        self._outbox.heed(epoch)
        self._catching_up.take(None, lambda: self._built().promote(self._shard_index, cursor))

    def load_saved(self, epoch: Epoch, folder: str, cursor: int) -> None:
        """Take the state that the checkpoint has of this island. ``CaughtUp`` or ``CatchUpFailure`` follows."""
        self._outbox.heed(epoch)

        def load() -> tuple[tuple[Version, ...], int]:
            loop, leader = self._built(), self._leader
            read = partial(self._saved, folder, loop.held)
            saved = read() if leader is None else leader.call_beside(TakeSaved(folder, cursor), read)
            loop.load_saved(saved, cursor)
            return saved.versions, saved.part.step

        self._catching_up.take(self._island, load)

    def start(self, epoch: Epoch, anchor: ScheduleAnchor) -> None:
        self._outbox.heed(epoch)
        threading.Thread(target=self._start, args=(anchor,), name="start", daemon=True).start()

    def flush(self, epoch: Epoch) -> None:
        self._outbox.heed(epoch)
        self._built().flush()

    def drain(self, epoch: Epoch) -> None:
        self._outbox.heed(epoch)
        self._built().drain()

    def deliver(
        self,
        epoch: Epoch,
        fragment: FragmentId,
        version: Version,
        step: int,
        merged_offer: int,
        anchor: ScheduleAnchor,
        since: Version | None,
        digest: str,
        *payloads: Carried,
    ) -> int:
        """Put a published fragment into the mailbox: updates since a version, oldest first, or its values.

        Returns the version of it that is here, −1 for none: below ``version`` where these bytes do not lead to it.
        """
        self._outbox.heed(epoch)
        loop = self._receiving()
        held = loop.published_version(fragment)
        if held >= version or since not in (None, held):
            return held  # before bytes are pulled that lead nowhere
        contents = [self._handed_over.received(epoch, payload) for payload in payloads]
        publication = Publication(fragment, version, step, merged_offer, anchor)
        return loop.receive(publication, since, digest, contents)

    def save(self, epoch: Epoch, checkpoint: int, folder: str) -> None:
        """Cut at the next boundary, and write this island's part while it trains on. ``Saved`` or ``NotSaved`` follows."""
        self._outbox.heed(epoch)
        if checkpoint in self._saves:
            return  # the marker came twice
        self._saves.add(checkpoint)
        try:
            cut = self._built().request_cut((checkpoint, folder))
        except InfrastructureError as error:
            self._outbox.put(NotSaved(checkpoint, in_words(error)))
            return
        threading.Thread(target=self._save, args=(checkpoint, folder, cut), name="save", daemon=True).start()

    def evaluate(self, epoch: Epoch, global_version: int, versions: tuple[Version, ...], limit_s: float | None) -> None:
        """Measure Θ at a boundary between two steps. ``Evaluated`` or ``NotEvaluated`` follows."""
        self._outbox.heed(epoch)
        limit = math.inf if limit_s is None else limit_s
        self._built().request_evaluation(EvaluationRequest(global_version, versions, limit))

    def join_channel(self, epoch: Epoch, membership: Membership) -> None:
        """Take part in the job's channel, by which this synchroniser hands payloads over."""
        self._outbox.heed(epoch)
        self._handed_over.join(membership, ray.util.get_node_ip_address())

    def hindrances(self, epoch: Epoch) -> tuple[str, ...]:
        """What is in the way of what this process pulls."""
        self._outbox.heed(epoch)
        return self._handed_over.hindrances()

    def holding(self, epoch: Epoch) -> Holding:
        """What of the pieces this process has, and so needs of what is published."""
        self._outbox.heed(epoch)
        return self._receiving().held.holding

    def take_payload(self, epoch: Epoch, fragment: FragmentId, offer: int) -> Carried | None:
        """The offer's bytes, or a ticket for them; ``None`` if a newer offer has replaced it."""
        self._outbox.heed(epoch)
        content = self._receiving().take(fragment, offer)
        return None if content is None else self._handed_over.offer(epoch, fragment, offer, content)

    def release_payload(self, fragment: FragmentId, offer: int) -> None:
        """The offer's bytes have arrived."""
        self._handed_over.release(fragment, offer)

    def letters(self, epoch: Epoch, read: int, acknowledged: int, timeout_s: float) -> list[tuple[int, IslandReport]]:
        """See ``Outbox.read``."""
        reports = self._outbox.read(epoch, read, acknowledged, timeout_s)
        self._watchdog.reset()
        return reports

    def export_state(self, epoch: Epoch, fragment: int, receiver: str, in_parts: bool) -> dict[str, Any]:
        """A peer's way to a fragment of this island's state; raises when it has none to give, or not soon enough.

        ``{"table": what lies in it, "content": the bytes or a ticket for them, "versions": (…), "step": int}``; in parts, in
        the place of the first two, ``{"cut": its name, "processes": those that have parts of it}`` (``export_part``).
        Where one donor gives all, what this ``receiver`` gets is of one boundary, held on the host meanwhile.
        """
        loop = self._built()
        if self._of_one_boundary:
            state = self._held_states.give(receiver, fragment)
        else:
            state = loop.export_state(transfer_limit.BOUNDARY_S, StateRequest((fragment,), self._new_cut()))
        at = {"versions": state.versions, "step": state.step}
        if in_parts or state.bounds is not None:
            cut, others = state.cut or receiver, () if self._leader is None else self._leader.processes()
            self._cut_states.keep(cut, fragment, state.blocks)
            return {"cut": cut, "processes": (_own_name(), *(others if state.bounds is not None else ())), **at}
        return {**self._donated(epoch, receiver, state.arrays()), **at}

    def export_part(
        self, epoch: Epoch, cut: str, fragment: int, receiver: str, wanted: Mapping[str, Bounds] | None
    ) -> dict[str, Any]:
        """What this process gives of a fragment of the state of that name, of what is wanted; None wants all.

        ``{"table": …, "content": …}`` as ``export_state``, and ``"bounds"``, where each array lies in the one of its name.
        """
        blocks = windows(self._cut_states.state(cut, fragment, transfer_limit.BOUNDARY_S)(), wanted)
        donated = self._donated(epoch, receiver, {name: array for name, _, array in blocks})
        return {**donated, "bounds": {name: bounds for name, bounds, _ in blocks}}

    def forget_part(self, cut: str, fragment: int) -> None:
        """Nobody comes for it any more."""
        self._cut_states.forget(cut, fragment)

    def _donated(self, epoch: Epoch, receiver: str, arrays: Arrays) -> dict[str, Any]:
        byte_count = sum(array.nbytes for array in arrays.values())
        self._throttle.wait(byte_count, transfer_limit.queue_s(byte_count, self._throttle.bytes_per_s))
        table, content = flattened(arrays)
        return {"table": table, "content": self._handed_over.donate(epoch, receiver, content)}

    def release_state(self, payload: str) -> None:
        """What this ticket is for has arrived, or is not wanted any more."""
        self._handed_over.forget_donation(payload)

    def _prepare(
        self, spec: dict[str, Any], shard_index: int, shard_count: int, normal_priority: bool, rank: Rank | None
    ) -> None:
        began, before = time.monotonic(), thread_ids()
        if self._computes and not normal_priority:
            lower_priority()
        try:
            if rank is not None:
                assert self._listening is not None
                lines = admitted(self._listening, rank.size, rank.key)
                tokens = batch_size_of(spec) * spec["data"]["sequence_length"]
                self._leader = Leader(
                    lines, spec["synchroniser"]["fragments"], tokens, self._outbox.put, self._end_with
                )
            trainer, plan, device_count = self._build(spec, shard_index, shard_count, rank)
            if self._leader is not None:
                device_count += self._leader.device_count()
            self._loop = IslandLoop(trainer, plan, self._outbox, self._leader)
        except (Exception, SystemExit) as error:  # a user's code may exit, and nothing would be heard of this thread
            log.exception("the model cannot be built")
            self._outbox.put(broken_by(error))
            return
        if self._computes:
            lower_priority_of_new(before)
        log.info("the model is built, on %d devices", device_count)
        self._ready = Ready(device_count, time.monotonic() - began)
        self._outbox.put(self._ready)

    def _follow(
        self, spec: dict[str, Any], shard_index: int, shard_count: int, normal_priority: bool, rank: Rank
    ) -> None:
        """This process's whole life as another rank than 0: it ends with rank 0."""
        before = thread_ids()
        self._watchdog.stop()  # rank 0 has one
        if self._computes and not normal_priority:
            lower_priority()
        try:
            line = joined((rank.place.host, rank.place.port), rank.number, rank.key)
            try:
                trainer, plan, device_count = self._build(spec, shard_index, shard_count, rank)
            except (Exception, SystemExit) as error:
                log.exception("the model cannot be built")
                line.send(Failed(broken_by(error)))
                line.receive()  # until the island is ended
                return
            if self._computes:
                lower_priority_of_new(before)
            save = partial(self._save_rank, line, rank.number)
            promoted = partial(self._promoted, rank.number)
            prepared = Prepared(device_count, _own_name())
            self._follower = Follower(
                line, trainer, plan.arrays, prepared, self._take_state, self._give_part, save, promoted
            )
            self._follower.run()
        except LinkEnded as error:
            self._end_with(in_words(error))

    def _build(
        self, spec: dict[str, Any], shard_index: int, shard_count: int, rank: Rank | None
    ) -> tuple[Trainer, LoopPlan, int]:
        """The trainer, what of its parameters this process holds and offers, and how many devices of this host it uses."""
        device_count = None
        if rank is not None and not self._synthetic:
            counts = devices.join(rank)
            devices.require_promised(spec, counts)  # each process knows all, and says the same
            device_count = counts[rank.number]
        trainer = trainer_of(spec, shard_index, shard_count)
        device_count = trainer.device_count if device_count is None else device_count
        if rank is not None and not hasattr(trainer, "held"):
            raise ConfigurationError(
                detail=f"The trainer {spec['trainer']} does not say what of a tensor each host has, and islands.hosts is "
                f"{rank.size}. Give it the methods of learners.contract.SpreadTrainer, or set hosts to 1."
            )
        if not self._synthetic:  # which stands for any number
            devices.require_promised(spec, (device_count,))
        trainer.warm_up()
        knobs, recovery = spec["synchroniser"], spec["recovery"]
        self._of_one_boundary = recovery["donors_max"] == 1 and recovery["donor_bytes_per_s"] is None
        shapes = trainer.tensor_shapes()
        fragments = fragment_map.build(shapes, knobs["fragments"], trainer.roles())
        sizes = fragment_map.sizes(fragments, shapes)
        self._peers = Peers(self._handed_over, recovery["donor_bytes_per_s"], sizes)
        largest = transfer_limit.STATE_BYTES_PER_PARAMETER * max(sizes)
        stall_s, bytes_per_s = (spec["transport"][term] for term in ("stall_s", "bytes_per_s"))
        self._held_s = transfer_limit.BOUNDARY_S + transfer_limit.held_s(largest, stall_s, bytes_per_s)
        plan = LoopPlan(
            fragments=fragments,
            interval_steps=knobs["interval_steps"],
            adoption=knobs["adoption"],
            mix_alpha=knobs["mix_alpha"],
            tokens_per_schedule_step=tokens_per_schedule_step(spec),
            codec=knobs["wire"]["up"],
            rank=None if rank is None else rank.number,
            step_limits=StepLimits(
                recovery["step_limit_s"], recovery["step_limit_ratio"], recovery["first_step_limit_s"]
            ),
        )
        spread = rank is not None and not HeldPieces(trainer, fragments, rank.number).is_whole
        if (rate := recovery["donor_bytes_per_s"]) is not None:  # of the island: its hosts give at once
            self._throttle = Throttle(rate / rank.size if rank is not None and spread else rate)
        return trainer, plan, device_count

    # ── as one process of several ─────────────────────────────────────────────────────────────────────────────────

    def _load_peer(self, state: FetchedState, cursor: int) -> None:
        """In every process, of what it got."""
        if self._leader is not None:
            self._leader.call(TakePeer(state.chunks, state.versions, state.step, cursor))
        self._built().load_peer(state, cursor)

    def _take_state(self, arrays: IslandArrays, order: StateOrder) -> None:
        if isinstance(order, FetchPart):
            self._chunks[order.chunk] = self._peers.part(order, arrays.held.wanted(FragmentId(order.fragment)))
            return
        chunks, self._chunks = self._chunks, {}
        match order:
            case TakeOuter():
                values = arrays.outer_values(self._pulled(order.epoch, order.payloads))
                arrays.load(values, order.versions, order.cursor)
            case TakeSaved():
                arrays.load_saved(self._saved(order.folder, arrays.held), order.cursor)
            case TakePeer():
                own = {name: array for chunk in order.chunks for name, array in chunks[chunk].items()}
                arrays.load_peer(FetchedState(self._island, own, order.versions, order.step, ()), order.cursor)
            case _:
                assert_never(order)

    def _saved(self, folder: str, held: HeldPieces) -> checkpointing.Restored:
        return checkpointing.restored(Folder.within(self._roots, folder), self._island, held.needs())

    def _give_part(self, cut: str, fragment: int, state: State) -> None:
        self._cut_states.keep(cut, fragment, state.blocks)

    def _pulled(self, epoch: Epoch, payloads: Sequence[Carried]) -> list[memoryview]:
        return [self._handed_over.received(epoch, payload) for payload in payloads]

    def _save_rank(self, line: Line, rank: int, of: Hashable, cut: checkpointing.Cut) -> None:
        """Write this process's part beside the steps, and say so to rank 0."""
        checkpoint, folder = cast(tuple[int, str], of)

        def save() -> None:
            try:
                target = Folder.within(self._roots, folder)
                files = checkpointing.write_rank(cut, target, self._island, rank)
            except Exception as error:
                log.exception("this process's part of checkpoint %d is not written", checkpoint)
                line.send(Written(of, (), in_words(error)))
                return
            line.send(Written(of, files))

        threading.Thread(target=save, name="save", daemon=True).start()

    def _promoted(self, rank: int, order: Promote) -> None:
        self._become(order.island, logbook.rank_logbook(order.book, rank))

    def _become(self, island: IslandId, book: logbook.Logbook) -> None:
        """Another island's process, and its logbook, from here on."""
        log.info("this process is %s, incarnation %d, from here on", island, book.number)
        logbook.keep(book)
        log.info("%s, incarnation %d, is process %d, which was %s", island, book.number, os.getpid(), self._island)
        self._island, self._incarnation = island, Incarnation(book.number)

    def _end_with(self, reason: str) -> None:
        """One process of the island is gone, and so is the island."""
        log.critical("this process ends, for another of its island is gone: %s", reason)
        os._exit(1)

    def _give_up(self) -> None:
        log.critical("nobody has listened to this island for too long; it ends itself")
        os._exit(1)  # other threads may be inside a step, or a call

    def _export_fragments(self) -> list[State]:
        return self._built().export_fragments(transfer_limit.BOUNDARY_S, self._new_cut())

    def _new_cut(self) -> str:
        """A name by which every process of this island keeps its part of a state; none where this one has all."""
        return "" if self._built().held.is_whole else f"{self._incarnation}.{next(self._cut_count)}"

    def _state_of(self, epoch: Epoch, actor: str, fragments: tuple[int, ...]) -> DonorReply:
        """The donor's state of a fragment, here and in the other processes of this island, each of what it has.

        Where every process has all of the model it comes once, and rank 0 hands it on.
        """
        (fragment,) = fragments
        held, leader = self._built().held, self._leader
        reply = self._peers.state(epoch, actor, fragment, in_parts=not held.is_whole)
        chunk, at = f"{actor} {reply['step']} {fragment}", (reply["versions"], reply["step"])
        if "cut" not in reply:
            arrays = reply["arrays"]
        else:
            order = FetchPart(epoch, chunk, fragment, reply["cut"], reply["processes"])
            fetch = partial(self._peers.part, order, held.wanted(FragmentId(fragment)))
            try:
                arrays = fetch() if held.is_whole or leader is None else leader.call_beside(order, fetch)
            finally:
                self._peers.forget(order)
        if leader is not None and held.is_whole:
            self._cut_states.keep(chunk, fragment, lambda: blocks_of(arrays, {}))
            try:
                leader.call(FetchPart(epoch, chunk, fragment, chunk, (_own_name(),)))
            finally:
                self._cut_states.forget(chunk, fragment)
        return DonorReply(arrays, *at, chunk)

    def _standing(self) -> Iterable[IslandReport]:
        """What a new synchroniser may not know: that this island is ready, and later what it offers."""
        if self._loop is None or self._ready is None:
            return ()
        return (self._ready,) if self._catching_up.caught_up is None else self._loop.standing_offers()

    def _save(self, checkpoint: int, folder: str, cut_taken: Future[checkpointing.Cut]) -> None:
        if self._computes:
            lower_priority()
        try:
            cut = cut_taken.result()
            leader, target = self._leader, Folder.within(self._roots, folder)
            others = partial(leader.written, (checkpoint, folder)) if leader is not None else tuple
            part = checkpointing.write(cut, target, self._island, self._incarnation, others=others)
        except Exception as error:  # a full disk is only one of the ways; training goes on
            log.exception("this island's part of checkpoint %d is not written", checkpoint)
            self._outbox.put(NotSaved(checkpoint, in_words(error)))
            return
        log.info("saved for checkpoint %d, at step %d", checkpoint, cut.position.step)
        self._outbox.put(Saved(checkpoint, part_digest(part), cut.position.tokens_total, cut.held_seconds))

    def _start(self, anchor: ScheduleAnchor) -> None:
        """From a thread that gives way, where this island computes on the host's cores: the loop's own does as well."""
        if self._computes:
            lower_priority()
        self._built().start(anchor)

    def _receiving(self) -> IslandLoop | Follower:
        """What takes publications and has offers in this process."""
        return self._built() if self._follower is None else self._follower

    def _built(self) -> IslandLoop:
        if self._loop is None:
            raise RuntimeError(f"island {self._island} has not built its model yet")
        return self._loop


def _own_name() -> str:
    """What Ray calls this process."""
    name = ray.get_runtime_context().get_actor_name()
    assert name is not None
    return name


_: IslandFactory = Island  # type checkers compare what it answers with what others call
