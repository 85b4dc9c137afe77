"""The interpreter of effects: each one that the core returns becomes a call here. Nothing here waits or decides.

Each effect is handed to a part with threads of its own (connections, shard, evaluation, timers, controller calls), and what
comes of it returns as an event. ``CatchUps`` makes the calls by which islands get a state to start from, and posts the event
for those calls that fail; the island's own report says how the others went. The core chooses the donor.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Concatenate, ParamSpec, assert_never

import ray
from ray.exceptions import ActorDiedError, RayError

from orchestrator.actors import ActorHandle, IslandInterface, SavedPlace
from orchestrator.core import effects as f
from orchestrator.core import events, saving
from orchestrator.core.faults import LinkImpairment
from orchestrator.core.messages import Announcement, CatchUpFailure
from orchestrator.core.vocabulary import Epoch, FragmentId, Incarnation, IslandId, Life, ReleaseReason, Version
from orchestrator.errors import first_line, in_words
from orchestrator.host.checkpoint_writer import CheckpointWriter
from orchestrator.host.job_context import JobContext, Timers
from orchestrator.runtime import cluster
from orchestrator.runtime.carried_parts import PartCollector, PartSource
from orchestrator.runtime.controller import Controller
from orchestrator.runtime.evaluation import Evaluation
from orchestrator.runtime.parameter_link import Delivery, Marker
from orchestrator.runtime.placement import Delayed, Placement, Unplaced
from orchestrator.runtime.report_link import Connection
from orchestrator.runtime.settings import island_name, rank_name, synchroniser_name
from orchestrator.runtime.shard_worker import ShardWorker
from orchestrator.runtime.supervision import Helper

log = logging.getLogger(__name__)
ANSWER_TIMEOUT_S = 10.0
PLACEMENT_TIMEOUT_S = 120.0
PLACEMENTS_MAX = 24
"""At the same time: fewer than the controller has threads for, so that it always has some to end a process. An island whose
turn has not come waits here, where no deadline runs. When 128 began on one saturated machine, those that had not had their
turn after two minutes were ended and placed again, over and over."""
WAITING_LOOK_S = 1.0
Facts = ParamSpec("Facts")
Ending = Callable[[Controller, IslandId, Incarnation], None]
"""``Controller.kill`` or ``Controller.end``."""


@dataclass(frozen=True, slots=True)
class Workers:
    """The parts of a job's process that carry out effects in threads, or processes, of their own."""

    controller: Helper[Controller]
    shard: ShardWorker
    evaluation: Evaluation
    timers: Timers
    checkpoints: CheckpointWriter


class Interpreter:
    """Hands each effect to the part that carries it out. ``finish`` and ``resolve`` are called in the pump's own thread.

    ``announced`` makes the announcement of a fragment's version, but for its digest.
    """

    def __init__(
        self,
        context: JobContext,
        workers: Workers,
        *,
        resolve: Callable[[f.ResolveCommand], None],
        finish: Callable[[f.FinishJob], None],
        hand_over: Callable[[saving.HandOver], None],
        announced: Callable[[FragmentId, Version], Announcement | None],
    ) -> None:
        self._announced = announced
        self._context, self._post = context, context.post
        self._controller, self._shard, self._evaluation = workers.controller, workers.shard, workers.evaluation
        self._timers, self._checkpoints = workers.timers, workers.checkpoints
        self._parts = PartCollector(context, workers.checkpoints, workers.shard.channel.endpoint)
        self._resolve, self._finish, self._hand_over = resolve, finish, hand_over
        sections = {**context.spec.island_sections(slots=True), **context.spec.standby_sections()}
        self._process_counts = {island: section.process_count for island, section in sections.items()}
        self._catch_ups = CatchUps(context, self._connection, self._name, workers.shard, workers.checkpoints)
        self._connections: dict[Life, Connection] = {}
        self._orphans: dict[Life, Connection] = {}  # over, and silent when that was decided
        self._over: set[Life] = set()
        self._closed = False
        self._processes: dict[Life, Life] = {}  # lives that go on as the process of another: a standby's
        self._lives = threading.Lock()  # guards the first four: placing threads open connections, the pump closes them
        self._waiting = WaitingRoom(context, self._waits, self._place_soon)
        self._placing = ThreadPoolExecutor(PLACEMENTS_MAX, "place")
        self._calling = ThreadPoolExecutor(max(8, 4 * len(sections)), "call")

    def act(self, effect: f.Effect) -> None:
        f.carry_out(effect, self)

    # ── core.effects.Shell ────────────────────────────────────────────────────────────────────────────────────────

    def set_timer(self, effect: f.SetTimer) -> None:
        self._timers.set(effect.timer, effect.serial, effect.due_at)

    def merge_fragment(self, effect: f.MergeFragment) -> None:
        self._shard.merge(effect)

    def publish_fragment(self, effect: f.PublishFragment) -> None:
        published = self._shard.published(effect.fragment)
        if published.version != effect.version:
            return  # a newer one is there, and so is, or soon will be, its own publication
        announcement = self._announced(effect.fragment, effect.version)
        for to in effect.recipients:
            if (connection := self._connection(to.island, to.incarnation)) is not None:
                delivery = Delivery(published, effect.step, to.merged_offer, effect.fix, announcement)
                connection.parameters.publish(effect.fragment, delivery)

    def release_payload(self, effect: f.ReleasePayload) -> None:
        """A lost one died with the process before; what lies under its name was offered to this one meanwhile."""
        if effect.reason is not ReleaseReason.LOST:
            self._shard.release(effect.payload)

    def place_island(self, effect: f.PlaceIsland) -> None:
        if effect.standby is not None:
            self._promote(effect.standby, (effect.island, effect.incarnation))
        life = (effect.island, effect.incarnation)
        if effect.wait_s:
            waiting = threading.Timer(effect.wait_s, self._context.guarded, (self._place_if_wanted, life))
            waiting.daemon = True
            waiting.start()
        else:
            self._place_soon(life, effect.standby)

    def begin_catch_up(self, effect: f.BeginCatchUp) -> None:
        if (rest := self._catch_ups.begin(effect)) is not None:
            self._calling.submit(self._context.guarded, rest)

    def start_training(self, effect: f.StartTraining) -> None:
        self._command(effect.island, effect.incarnation, IslandInterface.start, effect.fix)

    def adjust_island(self, effect: f.AdjustIsland) -> None:
        settings = (effect.lr_ratio, effect.interval_steps, effect.changed)
        self._command(effect.island, effect.incarnation, IslandInterface.adjust, *settings)

    def flush_island(self, effect: f.FlushIsland) -> None:
        self._command(effect.island, effect.incarnation, IslandInterface.flush)

    def drain_island(self, effect: f.DrainIsland) -> None:
        self._command(effect.island, effect.incarnation, IslandInterface.drain)

    def kill_island(self, effect: f.KillIsland) -> None:
        self._end_soon(Controller.kill, effect.island, effect.incarnation)

    def stop_island(self, effect: f.StopIsland) -> None:
        self.end(effect.island, effect.incarnation)

    def evaluate(self, effect: f.Evaluate) -> None:
        if effect.island is None:
            self._evaluation.evaluate(effect)
        else:
            facts = (effect.global_version, effect.versions, effect.limit_s)
            self._command(effect.island, effect.incarnation, IslandInterface.evaluate, *facts)

    def resolve_command(self, effect: f.ResolveCommand) -> None:
        self._resolve(effect)

    def begin_checkpoint(self, effect: saving.BeginCheckpoint) -> None:
        """Save Θ, then send the marker to the islands: the cut on this side comes before any island hears of it."""
        self._checkpoints.act(effect, self._context.now())
        if self._checkpoints.is_open(effect.checkpoint):
            folder = self._checkpoints.folder(effect.checkpoint).url
            for life in effect.islands:
                if (connection := self._connection(*life)) is not None:
                    collect = partial(self._collect, effect.checkpoint, life[0], connection)
                    connection.parameters.mark(
                        Marker(effect.checkpoint, folder, collect if self._checkpoints.collects else None)
                    )

    def _collect(
        self,
        checkpoint: int,
        island: IslandId,
        connection: Connection,
        rank: int,
        actor: ActorHandle[IslandInterface],
        gone: Callable[[], bool],
    ) -> None:
        source = PartSource(island, rank, actor, self._context.epoch, connection.link, gone)
        self._parts.start(source, checkpoint)

    def seal_checkpoint(self, effect: saving.SealCheckpoint) -> None:
        self._checkpoints.act(effect, self._context.now())

    def drop_checkpoint(self, effect: saving.DropCheckpoint) -> None:
        self._checkpoints.act(effect, self._context.now())

    def restore_fragments(self, effect: saving.RestoreFragments) -> None:
        self._shard.restore(effect, self._checkpoints.folder)

    def hand_over(self, effect: saving.HandOver) -> None:
        self._hand_over(effect)

    def finish_job(self, effect: f.FinishJob) -> None:
        self._finish(effect)

    # ── processes, and the connections to them ────────────────────────────────────────────────────────────────────

    def reconnect(self, island: IslandId, incarnation: Incarnation, process: Life | None, *, lost: bool) -> None:
        """Listen to a process that an earlier synchroniser placed, and that was silent at the end of that one if ``lost``.

        ``process`` is the standby that it was.
        """
        if process is not None:
            self._processes[island, incarnation] = process
        actor = cluster.actor_named(self._name(island, incarnation))
        if actor is None:
            reason = "its process was gone when the synchroniser came back"
            self._post(lambda at: events.ConnectionLost(at, island, incarnation, True, reason))
            return
        with self._lives:
            self._connections[island, incarnation] = self._connected(island, incarnation, actor, lost=lost)

    def end(self, island: IslandId, incarnation: Incarnation) -> None:
        """End the process of this incarnation for certain, and read nothing more of it but a silent one's final reports."""
        life = (island, incarnation)
        self._waiting.discard(life)
        with self._lives:
            self._over.add(life)
            connection = self._orphans.pop(life, None)
            if connection is None:
                connection = self._connections.pop(life, None)
                if connection is not None and connection.reports.silent:
                    connection.reports.read_final_reports()
                    self._orphans[life], connection = connection, None
        if connection is not None:
            connection.close()
        self._end_soon(Controller.end, island, incarnation)

    def forget(self, island: IslandId, incarnation: Incarnation) -> None:
        """The process is known to be gone, or broken: close its connection; what is left of it is ended."""
        if (island, incarnation) in self._connections or (island, incarnation) in self._orphans:
            self.end(island, incarnation)

    def impairment(self, island: IslandId, incarnation: Incarnation) -> LinkImpairment | None:
        """Return the part of the incarnation's link that chaos may change; None if there is no link."""
        connection = self._connection(island, incarnation)
        return None if connection is None else connection.link.impairment

    def close(self) -> None:
        with self._lives:
            connections = [*self._connections.values(), *self._orphans.values()]
            self._connections, self._orphans, self._closed = {}, {}, True
        for connection in connections:
            connection.close()
        self._waiting.close()
        self._placing.shutdown(wait=False, cancel_futures=True)
        self._calling.shutdown(wait=False)
        self._timers.close()
        self._shard.close()
        self._evaluation.close()
        self._checkpoints.close()

    def _promote(self, standby: Life, life: Life) -> None:
        """The standby's process is ``life`` from here on: read nothing more of it as the standby."""
        self._processes[life] = standby
        with self._lives:
            self._over.add(standby)
            connection = self._connections.pop(standby, None)
        if connection is not None:
            connection.close()

    def _name(self, island: IslandId, incarnation: Incarnation) -> str:
        """Return Ray's name of this incarnation's process."""
        return island_name(self._context.job, *self._processes.get((island, incarnation), (island, incarnation)))

    def _place_soon(self, life: Life, standby: Life | None = None) -> None:
        threads = self._placing if standby is None else self._calling  # a standby that is ready need not wait its turn
        threads.submit(self._context.guarded, self._place, *life, standby)

    def _place_if_wanted(self, life: Life) -> None:
        with self._lives:
            if not self._closed and life not in self._over:
                self._place_soon(life)

    def _waits(self, islands: list[IslandId]) -> list[str]:
        """Return what ``Controller.waits`` does. Raises RayError or TimeoutError where the controller does not answer."""
        reasons: list[str] = ray.get(self._controller.call(Controller.waits, islands), timeout=ANSWER_TIMEOUT_S)
        return reasons

    def _place(self, island: IslandId, incarnation: Incarnation, standby: Life | None) -> None:
        """Have the process made, or the standby's taken over, then listen to it. Runs in a thread of its own."""
        placed: Placement | Delayed | Unplaced
        controller = self._controller.handle
        try:
            call = controller.call(Controller.place, island, incarnation, standby)
            placed = ray.get(call, timeout=PLACEMENT_TIMEOUT_S)
        except ActorDiedError:
            self._end_for_certain(Controller.end, island, incarnation)
            self._controller.replaced(
                controller, PLACEMENT_TIMEOUT_S
            )  # a try meanwhile would be in vain, and be counted
            placed = Unplaced("the controller died while it placed the island")
        except (RayError, TimeoutError) as error:
            placed = Unplaced(f"the controller did not answer: {type(error).__name__}")
            self._end_for_certain(Controller.end, island, incarnation)  # a process may have come of it all the same
        if isinstance(placed, Delayed):
            with self._lives:
                if (island, incarnation) not in self._over:
                    self._waiting.add((island, incarnation), placed.reason)
            return
        if isinstance(placed, Unplaced):
            self._post_unplaced(island, incarnation, placed.reason)
            return
        actor = cluster.actor_named(placed.actor)
        if actor is None:
            self._end_for_certain(Controller.end, island, incarnation)
            self._post_unplaced(island, incarnation, "its process ended at once")
            return
        node, pid = placed.node, placed.pid
        with self._lives:
            if (island, incarnation) in self._over:
                return
            self._post(lambda at: events.IslandPlaced(at, island, incarnation, node, pid))
            self._connections[island, incarnation] = self._connected(island, incarnation, actor)

    def _post_unplaced(self, island: IslandId, incarnation: Incarnation, reason: str) -> None:
        self._post(lambda at: events.PlacementFailed(at, island, incarnation, reason))

    def _connected(
        self, island: IslandId, incarnation: Incarnation, actor: ActorHandle[IslandInterface], *, lost: bool = False
    ) -> Connection:
        process = self._processes.get((island, incarnation), (island, incarnation))
        channel, process_count = self._shard.channel, self._process_counts[island]
        name = self._name(island, incarnation)
        named = [cluster.actor_named(rank_name(name, rank)) for rank in range(1, process_count)]
        # where one is gone so is the island, which says so itself
        ranks = [(actor, channel.membership(process))]
        ranks += [
            (other, channel.membership(process, rank)) for rank, other in enumerate(named, 1) if other is not None
        ]
        return Connection((island, incarnation), ranks, self._context, self._shard, lost=lost)

    def _connection(self, island: IslandId, incarnation: Incarnation) -> Connection | None:
        """Its connection, if any. Under the lock: a first report (``Ready``) may come while it is being opened."""
        with self._lives:
            return self._connections.get((island, incarnation))

    def _command(
        self,
        island: IslandId,
        incarnation: Incarnation,
        method: Callable[Concatenate[IslandInterface, Epoch, Facts], None],
        *facts: Facts.args,
        **named: Facts.kwargs,
    ) -> None:
        """Call the island after the earlier calls of this kind. They may be made twice, and are repeated when lost."""
        if (connection := self._connection(island, incarnation)) is not None:
            connection.reports.command(method, *facts, **named)

    def _end_soon(self, method: Ending, island: IslandId, incarnation: Incarnation) -> None:
        self._calling.submit(self._context.guarded, self._end_for_certain, method, island, incarnation)

    def _end_for_certain(self, method: Ending, island: IslandId, incarnation: Incarnation) -> None:
        """``kill`` or ``end`` by the controller; from here where that one is dead or hangs."""
        try:
            ray.get(self._controller.call(method, island, incarnation), timeout=ANSWER_TIMEOUT_S)
        except (RayError, TimeoutError) as error:
            log.warning("the controller does not %s %s.%s: %s", method.__name__, island, incarnation, first_line(error))
            if (island, incarnation) not in self._processes.values():
                name = self._name(island, incarnation)
                for rank in range(self._process_counts[island]):
                    cluster.end_actor_named(rank_name(name, rank))
                if self._process_counts[island] > 1:
                    cluster.cancel_booking(name)


class WaitingRoom:
    """The incarnations that wait for a node. A thread asks each second which of them can start, as long as there are some.

    ``waits`` answers for islands, in order, as ``Controller.waits``; ``place`` has one placed.
    """

    def __init__(
        self,
        context: JobContext,
        waits: Callable[[list[IslandId]], list[str]],
        place: Callable[[Life], None],
    ) -> None:
        self._post, self._waits, self._place = context.post, waits, place
        self._reasons: dict[Life, str] = {}
        self._changed = threading.Condition()
        self._closed = False
        threading.Thread(target=context.guarded, args=(self._watch,), name="waiting-room", daemon=True).start()

    def add(self, life: Life, reason: str) -> None:
        """Have it wait, and say so."""
        with self._changed:
            self._reasons[life] = reason
            self._changed.notify_all()
        self._say(life, reason)

    def discard(self, life: Life) -> None:
        with self._changed:
            self._reasons.pop(life, None)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._reasons = {}
            self._changed.notify_all()

    def _say(self, life: Life, reason: str) -> None:
        self._post(lambda at: events.PlacementDelayed(at, *life, reason))

    def _watch(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._reasons or self._closed)
                self._changed.wait_for(lambda: self._closed, WAITING_LOOK_S)
                if self._closed:
                    return
                lives = sorted(self._reasons)
            try:
                reasons = self._waits([island for island, _ in lives])
            except (RayError, TimeoutError):
                continue  # it is asked again in a second
            for life, reason in zip(lives, reasons, strict=True):
                self._decide(life, reason)

    def _decide(self, life: Life, reason: str) -> None:
        with self._changed:
            before = self._reasons.get(life)
            if before is None or before == reason:
                return
            if reason:
                self._reasons[life] = reason
            else:
                del self._reasons[life]
        if reason:
            self._say(life, reason)
        else:
            self._place(life)


class CatchUps:
    """``connection`` finds the connection to an incarnation, ``name`` what Ray calls its process."""

    def __init__(
        self,
        context: JobContext,
        connection: Callable[[IslandId, Incarnation], Connection | None],
        name: Callable[[IslandId, Incarnation], str],
        shard: ShardWorker,
        checkpoints: CheckpointWriter,
    ) -> None:
        self._connection, self._name, self._shard = connection, name, shard
        self._job, self._epoch, self._post = context.job, context.epoch, context.post
        self._checkpoints = checkpoints
        self._count = count(1)

    def begin(self, effect: f.BeginCatchUp) -> Callable[[], None] | None:
        """The rest of the work, for a thread of its own: until the island has answered, or is listened to no more.

        ``None`` where nobody listens to the island any more.
        """
        connection = self._connection(effect.island, effect.incarnation)
        if connection is None:
            return None
        island = connection.actor
        match effect.source:
            case f.FromStandby():
                call = island.call(IslandInterface.resume, self._epoch, effect.cursor)
            case f.FromSynchroniser() | f.FromLeft():
                return lambda: self._give_outer(effect, connection)
            case f.FromCheckpoint():
                place = SavedPlace(*self._checkpoints.resumed_from, synchroniser_name(self._job))
                call = island.call(IslandInterface.load_saved, self._epoch, place, effect.cursor)
            case f.FromPeers(donor, helpers):
                donors = {self._name(*life): life[0] for life in (donor, *helpers)}
                request = next(self._count)
                call = island.call(IslandInterface.load_from, self._epoch, request, donors, effect.cursor)
            case unknown:
                assert_never(unknown)
        return lambda: self._wait(effect, connection, call)

    def _give_outer(self, effect: f.BeginCatchUp, connection: Connection) -> None:
        """Θ to each of the island's processes, of what it has. The payloads are held until the island has answered."""
        holdings = connection.parameters.holdings()
        versions, step, payloads, contents = self._shard.patiently(
            lambda: self._shard.whole_state(connection.subjects, holdings)
        )
        connection.line.sent("state", sum(payload.byte_count for own in payloads for payload in own))
        island, facts = connection.actor, (self._epoch, versions, step, effect.cursor)
        if isinstance(effect.source, f.FromLeft):  # an island of one process
            call = island.call(IslandInterface.load_left, *facts, *contents[0])
        elif len(contents) == 1:
            call = island.call(IslandInterface.load, *facts, *contents[0])
        else:
            call = island.call(IslandInterface.load_ranks, *facts, contents)
        self._wait(effect, connection, call)

    def _wait(self, effect: f.BeginCatchUp, connection: Connection, call: ray.ObjectRef[None]) -> None:
        island, incarnation = effect.island, effect.incarnation
        donor = effect.donor[0] if effect.donor is not None else None
        while self._connection(island, incarnation) is connection:
            try:
                ray.get(call, timeout=ANSWER_TIMEOUT_S)
                return
            except TimeoutError:
                continue  # the same call: a stopped island answers it when it goes on
            except ActorDiedError:
                return  # the report link notices it, too
            except RayError as error:
                failure = CatchUpFailure(donor, in_words(error))
                self._post(partial(events.IslandReported, island=island, incarnation=incarnation, report=failure))
                return
