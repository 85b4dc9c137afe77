"""An island as a Ray actor: passes the service's calls to the island's loop, and the loop's reports back.

It decides nothing and waits for nothing. No step needs what passes through here, so an island trains on whatever happens to
Ray. The process starts with few imports; ``prepare`` imports what reads the specification, and JAX if its work needs JAX.

Every command carries the epoch of its synchroniser; a command with an older epoch raises ``Fenced`` (``outbox``, which also
keeps the reports). A payload is a *returned* value: it belongs to the caller and outlives this process.

Source: measurements of Ray 2.60, listed in ``runtime.report_link``.
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
from typing import TYPE_CHECKING, Any, assert_never, cast

import ray

from learners import checkpointing, state_transfer
from learners.carried_parts import CarriedParts
from learners.contract import Arrays, FirstRun, Trainer, broken_by
from learners.factories import loop_plan, require_spread, trainer_of
from learners.group import link
from learners.group.ranks import Follower, Leader
from learners.handed_over import HandedOver
from learners.island_arrays import HeldPieces, IslandArrays, State, StateRequest
from learners.loop import EvaluationRequest, IslandLoop, LoopPlan
from learners.outbox import Outbox, lower_priority, lower_priority_of_new, python_thread_ids, thread_ids
from learners.peers import Peers, own_name, saved_windows
from learners.plain_arrays import flattened
from learners.state_transfer import CatchingUp, Donor, Loaded
from learners.step_watch import Watchdog
from orchestrator.actors import IslandFactory, MeetingPlace, PartWindow, ProfileRecord, Rank, SavedPlace
from orchestrator.channel.endpoint import Carried, Membership
from orchestrator.core.messages import Announcement, IslandHoldings, IslandReport, NotSaved, Ready
from orchestrator.core.vocabulary import Epoch, FragmentId, Incarnation, IslandId, ScheduleAnchor, Version
from orchestrator.errors import ConfigurationError, Conflict, InfrastructureError, in_words
from orchestrator.parameters import fragment_map
from orchestrator.parameters.holding import Holding
from orchestrator.parameters.parts import Bounds
from orchestrator.parameters.wire_format import encode
from orchestrator.replica.replica import Publication
from orchestrator.system import logbook, python_process
from orchestrator.system.ports import free_port
from orchestrator.system.roots import AllowedRoots

if TYPE_CHECKING:
    from learners.island_spec import IslandSpec
    from orchestrator.core.commands import ChangedSettings

log = logging.getLogger(__name__)


class Island:
    """One incarnation. The actor has many threads: a long poll, an export and deliveries can run at the same time."""

    def __init__(
        self, island: IslandId, environment: Mapping[str, str], book: logbook.Logbook, abandoned_after_s: float
    ) -> None:
        python_process.set_variables(environment)
        logbook.keep(book)
        log.info("%s, incarnation %d, is process %d", island, book.number, os.getpid())
        self._island, self._incarnation = island, Incarnation(book.number)
        self._synthetic, self._roots = False, AllowedRoots()
        self._saves: set[int] = set()
        self._outbox = Outbox(self._standing)
        self._handed_over = HandedOver()
        self._parts = CarriedParts(self._handed_over, partial(saved_windows, self._handed_over))
        self._loop: IslandLoop | None = None
        self._listening: socket.socket | None = None
        self._leader: Leader | None = None
        self._follower: Follower | None = None
        self._catching_up = CatchingUp(self._outbox)
        self._ready: Ready | None = None
        self._computes, self._shard_index = False, 0
        self._left = checkpointing.LeftStates.of_node(book, self._leave)
        self._watchdog = Watchdog(abandoned_after_s, self._give_up)
        self._throttle, self._held_s = state_transfer.Throttle(None), 0.0
        self._of_one_boundary = True
        self._held_states = state_transfer.HeldStates(
            lambda: self._built().export_fragments(state_transfer.BOUNDARY_S, self._new_cut()), lambda: self._held_s
        )
        self._cut_states = state_transfer.CutStates[Callable[[], list[state_transfer.Block]]](lambda: self._held_s)
        self._cut_count = itertools.count(1)
        self._peers = Peers(self._handed_over)
        self._chunks: dict[str, Arrays] = {}
        """Chunks of a peer's state that this process has fetched. Rank 0 says when they are loaded."""

    def hello(self) -> dict[str, Any]:
        """Return the identity of this process: the facts of ``Placement``."""
        return {
            "pid": os.getpid(),
            "seen_at": time.clock_gettime(time.CLOCK_BOOTTIME),
            "node_id": ray.get_runtime_context().get_node_id(),
            "node": socket.gethostname(),
        }

    def meeting_place(self) -> MeetingPlace:
        """Open the port where the other processes of this island connect. This process is rank 0 from now on."""
        host = ray.util.get_node_ip_address()
        self._listening = link.listener(host)
        devices_port = free_port(host)  # JAX's coordinator binds its port itself
        return MeetingPlace(host, self._listening.getsockname()[1], devices_port)

    def prepare(
        self, spec: dict[str, Any], shard_index: int, shard_count: int, normal_priority: bool, rank: Rank | None = None
    ) -> None:
        """Start building and compiling the model. ``Ready`` or ``Broken`` follows.

        This island may read or write the ``roots`` of ``spec`` when others name a path. ``rank`` is set only for an island
        of several hosts. A returning island gets ``normal_priority`` until it is ready, so that it starts as others train.
        """
        from learners.island_spec import IslandSpec  # pydantic, too, waits until it has a specification to read

        try:
            parsed = IslandSpec.of(spec)
        except ConfigurationError as error:
            self._outbox.put(broken_by(error))
            return
        self._synthetic, self._roots = parsed.job.trainer.is_synthetic, parsed.roots
        self._computes = os.environ.get("JAX_PLATFORMS") == "cpu" and not self._synthetic
        begin = self._prepare if rank is None or rank.number == 0 else self._follow
        arguments = (parsed, shard_index, shard_count, normal_priority, rank)
        threading.Thread(target=begin, args=arguments, name="prepare", daemon=True).start()

    def load(self, epoch: Epoch, versions: Sequence[Version], step: int, cursor: int, *payloads: Carried) -> None:
        """Load the synchroniser's parameters, one payload per fragment. ``CaughtUp`` or ``CatchUpFailure`` follows."""
        self._outbox.check_epoch(epoch)
        contents = self._pulled(epoch, payloads)

        def load() -> Loaded:
            loop = self._built()
            loop.load(loop.outer_values(contents), versions, step, cursor)
            return Loaded(tuple(versions), step)

        self._catching_up.take(None, load)

    def load_left(self, epoch: Epoch, versions: Sequence[Version], step: int, cursor: int, *payloads: Carried) -> None:
        """Load the state that was found on this machine, and Θ. ``CaughtUp`` or ``CatchUpFailure`` follows."""
        self._outbox.check_epoch(epoch)

        def load() -> Loaded:
            loop, held = self._built(), self._built().held
            values = loop.outer_values(self._pulled(epoch, payloads))
            saved, left = self._left.restored(epoch, tuple(versions), values, held.fragments, held.needs())
            loop.load_saved(saved, cursor)
            return Loaded(saved.versions, saved.part.step, left)

        self._catching_up.take(self._island, load)

    def load_ranks(
        self, epoch: Epoch, versions: Sequence[Version], step: int, cursor: int, payloads: Sequence[Sequence[Carried]]
    ) -> None:
        """Do the same as ``load`` for an island of several hosts. ``payloads`` are in the order of the ranks."""
        self._outbox.check_epoch(epoch)
        leader = self._leader
        assert leader is not None

        def load() -> Loaded:
            loop = self._built()
            orders = {
                rank: link.TakeOuter(epoch, tuple(versions), step, cursor, tuple(own))
                for rank, own in enumerate(payloads)
            }
            contents = leader.call_beside(orders, lambda: self._pulled(epoch, payloads[0]))
            loop.load(loop.outer_values(contents), versions, step, cursor)
            return Loaded(tuple(versions), step)

        self._catching_up.take(None, load)

    def load_from(self, epoch: Epoch, count: int, donors: Mapping[str, IslandId], cursor: int) -> None:
        """Load the state of peers, named by their actors, directly from their processes (``CatchingUp.fetch``)."""
        self._outbox.check_epoch(epoch)
        loop = self._built()
        self._catching_up.fetch(
            (epoch, count),
            {actor: Donor(island, partial(self._state_of, epoch, actor)) for actor, island in donors.items()},
            loop.fragment_count,
            lambda state: self._load_peer(state, cursor),
            of_one_boundary=self._of_one_boundary,
        )

    def promote(self, island: IslandId, shard_index: int, book: logbook.Logbook) -> dict[str, Any]:
        """Turn this standby into an island, with its data and logbook. Return the facts of ``hello``; ``Ready`` follows."""
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
        """Continue with the state that this process held as a standby. ``CaughtUp`` or ``CatchUpFailure`` follows."""
        self._outbox.check_epoch(epoch)
        self._catching_up.take(None, lambda: Loaded(*self._built().promote(self._shard_index, cursor)))

    def load_saved(self, epoch: Epoch, place: SavedPlace, cursor: int) -> None:
        """Load this island's state from the checkpoint. ``CaughtUp`` or ``CatchUpFailure`` follows."""
        self._outbox.check_epoch(epoch)

        def load() -> Loaded:
            loop, leader = self._built(), self._leader
            read = partial(self._saved, epoch, place, loop.held)
            saved = read() if leader is None else leader.call_beside(link.TakeSaved(epoch, place, cursor), read)
            loop.load_saved(saved, cursor)
            return Loaded(saved.versions, saved.part.step)

        self._catching_up.take(self._island, load)

    def start(self, epoch: Epoch, anchor: ScheduleAnchor) -> None:
        self._outbox.check_epoch(epoch)
        starting = threading.Thread(target=self._start, args=(anchor,), name="start", daemon=True)
        starting.start()
        starting.join()  # else a drain that arrives next could be carried out first, and be cancelled

    def adjust(self, epoch: Epoch, lr_ratio: float, interval_steps: int, changed: ChangedSettings) -> None:
        self._outbox.check_epoch(epoch)
        self._built().adjust(lr_ratio, interval_steps, changed)

    def flush(self, epoch: Epoch) -> None:
        self._outbox.check_epoch(epoch)
        self._built().flush()

    def drain(self, epoch: Epoch) -> None:
        self._outbox.check_epoch(epoch)
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
        """Queue a published fragment for adoption: either updates since version ``since``, oldest first, or whole values.

        Returns the version of the fragment that this process then holds, −1 for none. It is below ``version`` if the updates
        do not start from the version held here.
        """
        self._outbox.check_epoch(epoch)
        loop = self._receiving()
        held = loop.published.version(fragment)
        if held >= version or since not in (None, held):
            return held  # before pulling bytes that are of no use
        contents = self._handed_over.published(epoch, fragment, payloads)
        publication = Publication.received(fragment, version, step, merged_offer, anchor)
        return loop.receive(publication, since, digest, contents, epoch)

    def save(self, epoch: Epoch, checkpoint: int, folder: str) -> None:
        """Cut the state at the next boundary, and write this island's part. ``Saved`` or ``NotSaved`` follows."""
        self._outbox.check_epoch(epoch)
        if checkpoint in self._saves:
            return  # this marker has arrived before
        self._saves.add(checkpoint)
        try:
            cut = self._built().request_cut((epoch, checkpoint, folder))
        except InfrastructureError as error:
            self._outbox.put(NotSaved(checkpoint, in_words(error)))
            return
        threading.Thread(target=self._save, args=(epoch, checkpoint, folder, cut), name="save", daemon=True).start()

    def give_part(self, epoch: Epoch, checkpoint: int, place: str, number: int, timeout_s: float) -> PartWindow | None:
        """Give the synchroniser a window of this process's part of a checkpoint (``PartSpool.window``)."""
        self._outbox.check_epoch(epoch)
        return self._parts.spool(epoch, checkpoint).window(place, number, timeout_s)

    def part_stored(self, epoch: Epoch, checkpoint: int, problem: str) -> None:
        """Take the synchroniser's answer: this process's part is on its disk, or the problem."""
        self._outbox.check_epoch(epoch)
        self._parts.stored(epoch, checkpoint, problem)

    def evaluate(self, epoch: Epoch, global_version: int, versions: tuple[Version, ...], limit_s: float | None) -> None:
        """Measure Θ between two steps. ``Evaluated`` or ``NotEvaluated`` follows."""
        self._outbox.check_epoch(epoch)
        within_s = math.inf if limit_s is None else limit_s
        self._built().request_evaluation(EvaluationRequest(global_version, versions, within_s))

    def join_channel(self, epoch: Epoch, membership: Membership) -> None:
        """Join the job's channel, through which this synchroniser exchanges payloads."""
        self._outbox.check_epoch(epoch)
        self._handed_over.join(membership, ray.util.get_node_ip_address())

    def hindrances(self, epoch: Epoch) -> tuple[str, ...]:
        """Return what currently blocks pulls of this process."""
        self._outbox.check_epoch(epoch)
        return self._handed_over.hindrances()

    def holding(self, epoch: Epoch) -> Holding:
        """Return the part of the model that this process holds, and therefore needs of publications."""
        self._outbox.check_epoch(epoch)
        return self._receiving().held.holding

    def take_payload(self, epoch: Epoch, fragment: FragmentId, offer: int) -> Carried | None:
        """Return the offer's bytes or a ticket for them; ``None`` if a newer offer has replaced it."""
        self._outbox.check_epoch(epoch)
        content = self._receiving().take(fragment, offer)
        return None if content is None else self._handed_over.offer(epoch, fragment, offer, content)

    def announce(self, epoch: Epoch, announcement: Announcement) -> None:
        """Keep what the synchroniser says of a version, for a job that loses its synchroniser's disk."""
        self._outbox.check_epoch(epoch)
        if self._loop is not None:
            self._loop.published.announce(announcement)

    def profile(self, profile: str, steps: int | None) -> ProfileRecord:
        """Begin to trace inner steps, or say how far that is (``Profiler.state``)."""
        return self._built().profiler.state(profile, steps)

    def read_profile(self, profile: str, start: int, stop: int) -> bytes:
        return self._built().profiler.read(profile, start, stop)

    def holdings(self, epoch: Epoch) -> tuple[Epoch, IslandHoldings | None]:
        """Return the newest epoch heard of, and what this island holds, if it trained. Epoch 0 asks for the former alone."""
        if epoch:
            self._outbox.check_epoch(epoch)
        if not epoch or (loop := self._loop) is None:
            return self._outbox.epoch, None
        return self._outbox.epoch, loop.holdings(self._island, self._incarnation, epoch)

    def give_outer(self, epoch: Epoch, fragment: FragmentId, version: Version) -> Carried | None:
        """Return the bytes of a version of Θ, or a ticket for them; None if this process holds another."""
        self._outbox.check_epoch(epoch)
        held = self._built().published.at(fragment, version)
        return held and self._handed_over.give_outer(epoch, fragment, version, encode(held.arrays))

    def release_payload(self, fragment: FragmentId, offer: int) -> None:
        """Release the offer's bytes, which have arrived."""
        self._handed_over.release(fragment, offer)

    def reports(self, epoch: Epoch, read: int, acknowledged: int, timeout_s: float) -> list[tuple[int, IslandReport]]:
        """See ``Outbox.read``."""
        reports = self._outbox.read(epoch, read, acknowledged, timeout_s)
        self._watchdog.reset()
        return reports

    def export_state(self, epoch: Epoch, fragment: int, receiver: str, in_parts: bool) -> dict[str, Any]:
        """Tell a peer how to get one fragment of this island's state.

        Returns ``{"table": names and shapes, "content": the bytes or a ticket for them, "versions": (…), "step": int}``. If
        the state comes in parts, ``{"cut": its name, "processes": those that have parts of it}`` replace the first two
        (``export_part``). With a single donor all fragments for this ``receiver`` are from one boundary, held on the host
        meanwhile. Raises InfrastructureError if there is no state to give, or not in time.
        """
        loop = self._built()
        if self._of_one_boundary:
            state = self._held_states.give(receiver, fragment)
        else:
            state = loop.export_state(state_transfer.BOUNDARY_S, StateRequest((fragment,), self._new_cut()))
        at = {"versions": state.versions, "step": state.step}
        if in_parts or state.bounds is not None:
            cut, others = state.cut or receiver, () if self._leader is None else self._leader.processes()
            self._cut_states.keep(cut, fragment, state.blocks)
            return {"cut": cut, "processes": (own_name(), *(others if state.bounds is not None else ())), **at}
        return {**self._donated(epoch, receiver, state.arrays()), **at}

    def export_part(
        self, epoch: Epoch, cut: str, fragment: int, receiver: str, wanted: Mapping[str, Bounds] | None
    ) -> dict[str, Any]:
        """Return this process's part of a fragment of the state named ``cut``, restricted to ``wanted`` (None: all of it).

        ``{"table": …, "content": …}`` are as in ``export_state``; ``"bounds"`` says where each array lies in its whole
        array.
        """
        blocks = state_transfer.windows(self._cut_states.state(cut, fragment, state_transfer.BOUNDARY_S)(), wanted)
        donated = self._donated(epoch, receiver, {name: array for name, _, array in blocks})
        return {**donated, "bounds": {name: bounds for name, bounds, _ in blocks}}

    def forget_part(self, cut: str, fragment: int) -> None:
        """Drop a part that no receiver will fetch any more."""
        self._cut_states.forget(cut, fragment)

    def _donated(self, epoch: Epoch, receiver: str, arrays: Arrays) -> dict[str, Any]:
        byte_count = sum(array.nbytes for array in arrays.values())
        self._throttle.wait(byte_count, state_transfer.queue_s(byte_count, self._throttle.bytes_per_s))
        table, content = flattened(arrays)
        return {"table": table, "content": self._handed_over.donate(epoch, receiver, content)}

    def release_state(self, payload: str) -> None:
        """Drop the content of a ticket that has been pulled or is no longer needed."""
        self._handed_over.forget_donation(payload)

    def _prepare(self, spec: IslandSpec, shard_index: int, shard_count: int, urgent: bool, rank: Rank | None) -> None:
        began, before = time.monotonic(), thread_ids()
        if self._computes and not urgent:
            lower_priority()
        try:
            if rank is not None:
                assert self._listening is not None
                lines = link.admitted(self._listening, rank.size, rank.key)
                count, tokens_of = spec.job.synchroniser.fragments, spec.tokens_of
                self._leader = Leader(lines, count, tokens_of, self._outbox.put, self._end_with)
            trainer, plan, device_count = self._build(spec, shard_index, shard_count, rank)
            if self._leader is not None:
                device_count += self._leader.device_count()
            self._loop = IslandLoop(trainer, plan, self._outbox, self._leader)
            left = self._left.find(self._island, self._incarnation)
            self._ready = Ready(device_count, time.monotonic() - began, left)
            earlier = python_thread_ids()
            self._outbox.put(self._ready)
            if isinstance(trainer, FirstRun):
                trainer.first_run()
        except BaseException as error:  # without this, a user's code that exits would end the thread silently
            log.exception("the model cannot be built")
            self._outbox.put(broken_by(error))
            return
        if self._computes:  # but not the threads that fetch a state
            lower_priority_of_new(before | (python_thread_ids() - earlier))
        self._catching_up.loadable.set()
        python_process.say_ready()

    def _follow(self, spec: IslandSpec, shard_index: int, shard_count: int, urgent: bool, rank: Rank) -> None:
        """Run this process as a rank other than 0. Its life ends with that of rank 0."""
        before = thread_ids()
        self._watchdog.stop()  # rank 0 has one
        if self._computes and not urgent:
            lower_priority()
        try:
            line = link.joined((rank.place.host, rank.place.port), rank.number, rank.key)
            try:
                trainer, plan, device_count = self._build(spec, shard_index, shard_count, rank)
            except BaseException as error:
                log.exception("the model cannot be built")
                line.send(link.Failed(broken_by(error)))
                line.receive()  # blocks until the island is ended
                return
            if self._computes:
                lower_priority_of_new(before)
            save, promoted = partial(self._save_rank, line, rank.number), partial(self._promoted, rank.number)
            hooks = (link.Prepared(device_count, own_name()), self._take_state, self._give_part, save, promoted)
            self._follower = Follower(line, trainer, plan.arrays, *hooks)
            self._follower.run()
        except link.LinkEnded as error:
            self._end_with(in_words(error))

    def _build(
        self, spec: IslandSpec, shard_index: int, shard_count: int, rank: Rank | None
    ) -> tuple[Trainer, LoopPlan, int]:
        """Return the trainer, the loop's plan, and how many devices of this host it uses."""
        device_count = None
        if rank is not None and not self._synthetic:
            counts = link.join_devices(rank, in_torch=spec.is_in_torch)
            link.require_promised(spec, counts)  # every process has the same counts and reaches the same result
            device_count = counts[rank.number]
        trainer = trainer_of(spec, shard_index, shard_count)
        device_count = trainer.device_count if device_count is None else device_count
        if rank is not None:
            require_spread(trainer, spec, rank.size)
        if not self._synthetic:  # it has no devices and stands for any number of them
            link.require_promised(spec, (device_count,))
        trainer.warm_up()
        recovery, transport = spec.job.recovery, spec.job.transport
        self._of_one_boundary = recovery.donors_max == 1 and recovery.donor_bytes_per_s is None
        shapes = trainer.tensor_shapes()
        sync = spec.job.synchroniser
        fragments = fragment_map.build(shapes, sync.fragments, trainer.roles(), sync.routers_apart)
        sizes = fragment_map.sizes(fragments, shapes)
        self._peers = Peers(self._handed_over, recovery.donor_bytes_per_s, sizes)
        largest = state_transfer.STATE_BYTES_PER_PARAMETER * max(sizes)
        held_s = state_transfer.held_s(largest, transport.stall_s, transport.bytes_per_s)
        self._held_s = state_transfer.BOUNDARY_S + held_s
        plan = loop_plan(spec, fragments, None if rank is None else rank.number)
        spread = rank is not None and not HeldPieces(trainer, fragments, rank.number).is_whole
        # a limit for the whole island, whose hosts give at once
        if (rate := recovery.donor_bytes_per_s) is not None:
            self._throttle = state_transfer.Throttle(rate / rank.size if rank is not None and spread else rate)
        return trainer, plan, device_count

    # ── as one process of several ─────────────────────────────────────────────────────────────────────────────────

    def _load_peer(self, state: state_transfer.FetchedState, cursor: int) -> None:
        """Load the state in every process of the island, each from the chunks that it fetched."""
        if self._leader is not None:
            self._leader.call(link.TakePeer(state.chunks, state.versions, state.step, cursor))
        self._built().load_peer(state, cursor)

    def _take_state(self, arrays: IslandArrays, order: link.StateOrder) -> None:
        if isinstance(order, link.FetchPart):
            self._chunks[order.chunk] = self._peers.part(order, arrays.held.wanted(FragmentId(order.fragment)))
            return
        chunks, self._chunks = self._chunks, {}
        match order:
            case link.TakeOuter():
                values = arrays.outer_values(self._pulled(order.epoch, order.payloads))
                arrays.load(values, order.versions, order.cursor)
            case link.TakeSaved():
                arrays.load_saved(self._saved(order.epoch, order.place, arrays.held), order.cursor)
            case link.TakePeer():
                own = {name: array for chunk in order.chunks for name, array in chunks[chunk].items()}
                arrays.load_peer(
                    state_transfer.FetchedState(self._island, own, order.versions, order.step, ()), order.cursor
                )
            case _:
                assert_never(order)

    def _saved(self, epoch: Epoch, place: SavedPlace, held: HeldPieces) -> checkpointing.Restored:
        with self._parts.saved(self._roots, epoch, place) as folder:
            return checkpointing.restored(folder, self._island, held.needs())

    def _give_part(self, cut: str, fragment: int, state: State) -> None:
        self._cut_states.keep(cut, fragment, state.blocks)

    def _pulled(self, epoch: Epoch, payloads: Sequence[Carried]) -> list[memoryview]:
        return [self._handed_over.received(epoch, payload) for payload in payloads]

    def _save_rank(self, line: link.Line, rank: int, of: Hashable, cut: checkpointing.Cut) -> None:
        """Write this process's part in a thread while training continues, and report the result to rank 0."""
        epoch, checkpoint, folder = cast(tuple[Epoch, int, str], of)

        def save() -> None:
            try:
                with self._parts.target(self._roots, epoch, checkpoint, folder) as target:
                    files = checkpointing.write_rank(cut, target, self._island, rank)
            except Exception as error:
                log.exception("this process's part of checkpoint %d is not written", checkpoint)
                line.send(link.Written(of, (), in_words(error)))
                return
            line.send(link.Written(of, files))

        threading.Thread(target=save, name="save", daemon=True).start()

    def _promoted(self, rank: int, order: link.Promote) -> None:
        self._become(order.island, logbook.rank_logbook(order.book, rank))

    def _become(self, island: IslandId, book: logbook.Logbook) -> None:
        """Take over the name and the logbook of another island."""
        log.info("this process is %s, incarnation %d, from here on", island, book.number)
        logbook.keep(book)
        log.info("%s, incarnation %d, is process %d, which was %s", island, book.number, os.getpid(), self._island)
        self._island, self._incarnation = island, Incarnation(book.number)

    def _end_with(self, reason: str) -> None:
        """End this process because another process of the island has ended."""
        log.critical("this process ends because another process of its island has ended: %s", reason)
        os._exit(1)

    def _leave(self) -> None:
        if self._loop is not None and self._leader is None:
            self._left.leave(self._loop, self._island, self._incarnation, self._outbox.epoch)

    def _give_up(self) -> None:
        self._leave()
        log.critical("no synchroniser has polled this island for too long; it ends itself")
        os._exit(1)  # other threads may be in the middle of a step or a call

    def _new_cut(self) -> str:
        """Return a name under which each process keeps its part of a state; empty if this process holds all of it."""
        return "" if self._built().held.is_whole else f"{self._incarnation}.{next(self._cut_count)}"

    def _state_of(self, epoch: Epoch, actor: str, fragments: tuple[int, ...]) -> state_transfer.DonorReply:
        return self._peers.fetched(epoch, actor, fragments[0], self._built().held, self._leader, self._cut_states)

    def _standing(self) -> Iterable[IslandReport]:
        """Yield the reports that a new synchroniser may have missed: that this island is ready, later its current offers."""
        if self._loop is None or self._ready is None:
            return ()
        return (self._ready,) if self._catching_up.caught_up is None else self._loop.standing_offers()

    def _save(self, epoch: Epoch, checkpoint: int, folder: str, cut_taken: Future[checkpointing.Cut]) -> None:
        if self._computes:
            lower_priority()
        leader, target = self._leader, self._parts.target(self._roots, epoch, checkpoint, folder)
        others = partial(leader.written, (epoch, checkpoint, folder)) if leader is not None else tuple
        life = (self._island, self._incarnation)
        self._outbox.put(checkpointing.saved_or_not(cut_taken, target, checkpoint, life, others))

    def _start(self, anchor: ScheduleAnchor) -> None:
        """Start the loop from a thread of low priority if this island computes on the CPU: the loop's thread inherits it."""
        if self._computes:
            lower_priority()
        self._left.forget("the island trains")
        self._built().start(anchor)

    def _receiving(self) -> IslandLoop | Follower:
        """Return the object that takes publications and holds offers in this process."""
        return self._built() if self._follower is None else self._follower

    def _built(self) -> IslandLoop:
        if self._loop is None:
            raise Conflict(detail=f"Island {self._island} builds its model.", remedy="Try again once it trains.")
        return self._loop


_: IslandFactory = Island  # lets the type checker compare the class with what callers expect
