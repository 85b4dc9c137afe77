"""One job's controller: it spawns island processes where they belong, kills them, and ends all of them with the job.

It is in another process than the synchroniser, so that slow Ray calls never delay a decision: in one for all jobs of the
cluster (``runtime.controllers``). Responsible for placing by label and resources, for saying why that failed, and for ending
processes for certain. The core decides when an island is placed or given up, and ``placement`` whether it fits.

``Orphans`` are processes that were to end while their node was unreachable, and that run on behind the partition. Each is
ended once its node can be reached again, after a moment in which its link may read its final reports, so that what it
trained there is counted.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from pathlib import Path
from secrets import token_bytes
from typing import Any, Concatenate, ParamSpec

import ray
from ray.exceptions import RayError

from orchestrator.actors import ActorHandle, IslandFactory, IslandInterface, Rank, SynchroniserInterface
from orchestrator.checkpoints.resumption import stored
from orchestrator.core.salvage import last_incarnations
from orchestrator.core.vocabulary import Incarnation, IslandId, Life
from orchestrator.errors import first_line, in_words
from orchestrator.runtime import cluster
from orchestrator.runtime.head_copies import LAST_LOOK_S, HeadCopy, LogCopies, machine_of
from orchestrator.runtime.node_agent import NodeAgent
from orchestrator.runtime.node_agents import FAULT_TIMEOUT_S, NodeAgents
from orchestrator.runtime.nodes import NodeWatch, Orphans
from orchestrator.runtime.placement import (
    Delayed,
    Gang,
    Leaving,
    Node,
    Placement,
    Refusal,
    Unplaced,
    booked,
    environment_of,
    gang,
    refusal,
    resources_of,
)
from orchestrator.runtime.settings import (
    GROUP_LABEL,
    abandoned_after_s,
    island_name,
    rank_name,
    synchroniser_name,
)
from orchestrator.runtime.supervision import Past, Supervisor, SynchroniserFacts, SynchroniserKeeper
from orchestrator.specification.config import JobSpec
from orchestrator.specification.sections import IslandsSection
from orchestrator.system import logbook
from orchestrator.system.logbook import Logbook, rank_logbook
from orchestrator.system.roots import AllowedRoots

log = logging.getLogger(__name__)
ISLAND_CLASS = "learners.island:Island"
CONCURRENCY = 32
"""Calls of an island's process that run at the same time."""
CAPACITY_WAIT_S = 3.0
"""A killed island's resources are booked until its node notices (well under a second)."""
HELLO_TIMEOUT_S, REACH_TIMEOUT_S = 60.0, 3.0
WATCH_S = 2.0
ORPHANED_S = 10.0
"""A synchroniser that died has its name while Ray makes it again. One without a name for so long does not come back."""
COPIED_WITHIN_S = 10.0
"""How long ``close`` waits for the copy of the run folder before it says that it is not complete yet."""
UNWANTED = Unplaced("it was ended before it was placed")
Arguments = ParamSpec("Arguments")


class Controller:
    """``nodes`` watches the cluster's nodes. ``on_closed`` is called once, when the job's processes have ended."""

    def __init__(
        self,
        job: str,
        spec: JobSpec,
        run_dir: Path,
        roots: AllowedRoots,
        nodes: NodeWatch,
        on_closed: Callable[[], None],
    ) -> None:
        self._job, self._spec, self._run_dir, self._on_closed = job, spec, run_dir, on_closed
        resumption = stored(self._run_dir)
        resumptions = resumption.resumptions if resumption else ()
        self._added = {"legs": resumptions, "roots": roots}
        self._shards = list(spec.island_sections(slots=True))
        self._sections = {**spec.island_sections(slots=True), **spec.standby_sections()}
        self._folder = cluster.cluster_folder(os.environ)
        self._lock = threading.Lock()
        self._actors: dict[Life, tuple[ActorHandle[IslandInterface], ...]] = {}
        """By rank: one, but of islands of many hosts."""
        self._placements: dict[Life, Placement] = {}
        self._results: dict[Life, Future[Placement | Delayed | Unplaced]] = {}
        self._bookings: dict[Life, Life] = {}
        """As whose the hosts of a life were booked, where that is another's: a standby's."""
        self._ended: set[Life] = set()
        self._taken: set[Life] = set()
        self._spawning = threading.Lock()  # held from the last look at ``_closing`` until the actor is known
        self._closing = False
        self._supervisor = Supervisor("nodes-agents")
        self._keeper = SynchroniserKeeper(job, spec, str(run_dir), roots, nodes)
        self._nodes, self._orphans = nodes, Orphans()
        self._node_agents = NodeAgents(self._supervisor, self._nodes.is_there)
        self._logs = LogCopies(self._run_dir, self._node_agents)
        self._copy = HeadCopy(self._run_dir, lambda: self._keeper.node, partial(machine_of, self._node_agents))
        self._supervisor.begin()
        self._logs.begin()
        self._copy.begin()
        threading.Thread(target=copy_context().run, args=(self._watch,), name="watch", daemon=True).start()

    def place(
        self, island: IslandId, incarnation: Incarnation, standby: Life | None = None
    ) -> Placement | Delayed | Unplaced:
        """Make the process of this incarnation and have it build its model; returns once it answers.

        With ``standby``, that process becomes this incarnation, and the standby's incarnation has none any more.
        Asked again, as by a synchroniser whose predecessor died waiting for the answer, it gives the same answer.
        """
        with self._lock:
            earlier, there = self._results.get((island, incarnation)), self._placements.get((island, incarnation))
            result: Future[Placement | Delayed | Unplaced] = Future()
            self._results.setdefault((island, incarnation), result)
        if earlier is not None:
            return earlier.result()
        try:
            if standby is None:  # one that is there was placed by another controller
                result.set_result(there or self._place(island, incarnation))
            else:
                result.set_result(self._promote((island, incarnation), standby))
        except BaseException as error:
            result.set_exception(error)
        placed = result.result()
        if isinstance(placed, Delayed):
            with self._lock:
                self._results.pop((island, incarnation), None)  # asked again once there is room
        return placed

    def waits(self, islands: Sequence[IslandId]) -> list[str]:
        """Return why each of these islands cannot start now; empty where it can, the islands before it included."""
        nodes, shortage, reasons = self._nodes.placeable(), cluster.disk_shortage(self._folder), []
        for island in islands:
            section = self._sections[island]
            wanted = resources_of(section)
            places = self._places(section, wanted, nodes)
            reasons.append(places.reason if isinstance(places, Refusal) else shortage)
            if isinstance(places, Gang) and section.hosts == 1:
                nodes = booked(section.node_group, wanted, nodes)
        return reasons

    def lives(self, of_others: Iterable[Life] = ()) -> list[Life]:
        """Return the lives that may have processes: those made here and not ended.

        From now on that includes those ``of_others`` that answer. A controller that died with its node made them.
        """
        for life in of_others:
            self._placed(*life)
        with self._lock:
            return sorted(self._actors)

    def note_synchroniser(self, facts: SynchroniserFacts, had_theta: bool) -> None:
        self._keeper.note(facts, had_theta)

    def is_moving(self) -> bool:
        return self._keeper.is_moving

    def replace_synchroniser(self, build: str, python: str) -> None:
        self._keeper.replace(build, python)

    def past(self) -> Past:
        """Return what a synchroniser that lost its files, or has those of an earlier history, has to know."""
        with self._lock:
            over = set(self._ended)
            names = {
                life: placed.actor
                for life, placed in self._placements.items()
                if life in self._actors and life not in over
            }
            all_lives = {*self._results, *over, *self._actors}
        return self._keeper.past(names, last_incarnations(all_lives))

    def helpers(self) -> list[dict[str, Any]]:
        """Return the agents of the nodes that this job's islands are on, or were, and the copy of the run folder if there
        is one: ``orchestrator.status.Helper`` as data.
        """
        return [helper.model_dump() for helper in (*self._supervisor.statuses(), *self._copy.statuses())]

    def take(self, name: str) -> None:
        """Move this file of the run folder to the head, if the synchroniser is elsewhere."""
        self._copy.take(name)

    def _place(self, island: IslandId, incarnation: Incarnation) -> Placement | Delayed | Unplaced:
        section = self._sections[island]
        wanted = resources_of(section)
        life = (island, incarnation)
        if incarnation > 1:  # what ended the one before may have been its node's
            self._nodes.look_again()
        deadline = time.monotonic() + CAPACITY_WAIT_S
        while isinstance(gang := self._gang(section, wanted), Refusal):
            if gang.final or time.monotonic() > deadline:
                return Delayed(gang.reason)
            if self._over(life):
                return UNWANTED
            time.sleep(0.05)
        with self._spawning:
            if self._over(life):
                return UNWANTED
            actors = self._spawned(life, section, wanted, gang)
            with self._lock:
                self._actors[life] = actors
        if not actors:
            reason = f"{section.node_group!r} has fewer than {section.hosts} free nodes; it will be tried again"
            return Delayed(reason)
        if self._over(life):
            self.end(island, incarnation)
            return UNWANTED
        try:
            self._prepare(life, section, actors)
            hellos = [actor.call(IslandInterface.hello) for actor in actors]
            abouts = ray.get(hellos, timeout=HELLO_TIMEOUT_S)
        except (RayError, TimeoutError) as error:
            began = any(map(_has_process, actors))
            self.end(island, incarnation)
            now = self._gang(section, wanted)
            if isinstance(now, Refusal):
                return Unplaced(now.reason) if began else Delayed(now.reason)
            return Unplaced(f"its process did not answer: {first_line(error)}")
        placed = self._placement(island_name(self._job, island, incarnation), abouts)
        for each in placed.ranks:
            self._node_agents.ensure(each)
            log.info("%s.%s is process %d on %s", island, incarnation, each.pid, each.node)
        self._know(life, placed)
        if self._over(life):
            self.end(island, incarnation)
            return UNWANTED
        return placed

    def _spawned(
        self, life: Life, section: IslandsSection, wanted: Mapping[str, float], gang: Gang
    ) -> tuple[ActorHandle[IslandInterface], ...]:
        """The processes of this life, by rank; none where Ray has no place for all of them."""
        book, selector = logbook.island_logbook(self._run_dir, *life), self._nodes.selector(self._job, life[0], wanted)
        if section.process_count == 1:
            return (spawn_island(self._job, life, section, wanted, selector, book),)
        return spawn_gang(self._job, life, section, wanted, gang, selector, book, CAPACITY_WAIT_S)

    def _prepare(self, life: Life, section: IslandsSection, actors: Sequence[ActorHandle[IslandInterface]]) -> None:
        """Have its processes build their models. Raises RayError, TimeoutError."""
        island, incarnation = life
        shard = (
            self._shards.index(island) if island in self._shards else 0
        )  # a standby has that of the island that it becomes
        urgent = island in self._shards and incarnation > 1  # it is missed
        document = self._spec.island_document(section) | self._added | {"returns": urgent}
        if len(actors) == 1:
            actors[0].call(IslandInterface.prepare, document, shard, len(self._shards), urgent)
            return
        place, key = ray.get(actors[0].call(IslandInterface.meeting_place), timeout=HELLO_TIMEOUT_S), token_bytes(32)
        for number, actor in enumerate(actors):
            rank = Rank(number, len(actors), place, key)
            actor.call(IslandInterface.prepare, document, shard, len(self._shards), urgent, rank)

    def _placement(self, name: str, abouts: Sequence[Mapping[str, Any]]) -> Placement:
        """Return the placement of processes that report ``abouts`` of themselves, by rank."""
        first, *others = [Placement(rank_name(name, rank), **about) for rank, about in enumerate(abouts)]
        return replace(first, others=tuple(others))

    def _gang(self, section: IslandsSection, wanted: Mapping[str, float]) -> Gang | Refusal:
        """Return where an island can start on its node group now, or why none can: its nodes or the disk are full."""
        places = self._places(section, wanted, self._nodes.placeable())
        if isinstance(places, Refusal):
            return places
        shortage = cluster.disk_shortage(self._folder)
        return Refusal(shortage, final=False) if shortage else places

    def _places(self, section: IslandsSection, wanted: Mapping[str, float], nodes: Sequence[Node]) -> Gang | Refusal:
        if section.hosts == 1:
            return refusal(section.node_group, wanted, nodes) or Gang(({},))
        return gang(section.node_group, section.accelerator, wanted, section.hosts, nodes)

    def _promote(self, life: Life, standby: Life) -> Placement | Unplaced:
        island, incarnation = life
        with self._lock:
            actors, before = self._actors.pop(standby, ()), self._placements.pop(standby, None)
            self._taken.add(standby)
            if actors:
                self._actors[life] = actors
                self._bookings[life] = self._bookings.get(standby, standby)
        book = logbook.island_logbook(self._run_dir, island, incarnation)
        try:
            if not actors or before is None:
                return Unplaced(f"the standby {standby[0]} is gone")
            call = actors[0].call(IslandInterface.promote, island, self._shards.index(island), book)
            placed = Placement(before.actor, **ray.get(call, timeout=HELLO_TIMEOUT_S), others=before.others)
        except (RayError, TimeoutError) as error:
            self.end(island, incarnation)
            return Unplaced(f"the standby {standby[0]} did not answer: {first_line(error)}")
        log.info("%s.%s is process %d, until now the standby %s", island, incarnation, placed.pid, standby[0])
        self._logs.end(standby)
        self._know(life, placed)
        if self._over(life):
            self.end(island, incarnation)
            return UNWANTED
        return placed

    def _know(self, life: Life, placed: Placement) -> None:
        with self._lock:
            self._placements[life] = placed
        self._logs.add(logbook.island_logbook(self._run_dir, *life), placed)

    def kill(self, island: IslandId, incarnation: Incarnation) -> None:
        """SIGKILL its processes, if there are any."""
        log.info("%s.%s is killed", island, incarnation)
        placed, actors = self._placed(island, incarnation), self._actors_of(island, incarnation)
        reached = [self._node_agents.kill(rank) for rank in placed.ranks] if placed is not None else []
        for actor in [actor for rank, actor in enumerate(actors) if rank >= len(reached) or not reached[rank]]:
            cluster.end_actor(actor)  # no node agent answers: Ray's own way, which needs the process to cooperate

    def kill_host(self, island: IslandId, incarnation: Incarnation, host: int | None = None) -> str:
        """SIGKILL its process on this host, numbered from 0, or on its last. Answers as ``stop``."""
        placed = self._placed(island, incarnation)
        if placed is None:
            return f"{island} has no process"
        count = len(placed.ranks)
        if host is not None and host >= count:
            hosts = f"the hosts 0 to {count - 1}" if count > 1 else "one host, of number 0"
            return f"{island} has {hosts}, and host is {host}: give one of these, or none for the last"
        struck = placed.ranks[-1 if host is None else host]
        if self._node_agents.kill(struck, FAULT_TIMEOUT_S):
            return ""
        return f"the node agent of {struck.node} did not answer"

    def stop(self, island: IslandId, incarnation: Incarnation, duration_s: float) -> str:
        """SIGSTOP its processes; they go on after ``duration_s``. Empty when that is done, else why it could not be."""
        return self._signal(island, incarnation, NodeAgent.stop, duration_s)

    def go_on(self, island: IslandId, incarnation: Incarnation) -> str:
        """SIGCONT its processes, before their time. Answers as ``stop``."""
        return self._signal(island, incarnation, NodeAgent.go_on)

    def kill_node(self, island: IslandId, incarnation: Incarnation) -> str:
        """SIGKILL the raylet of its first node; what runs on it dies within seconds. Answers as ``stop``."""
        placed = self._placed(island, incarnation)
        return self._node_agents.kill_node(placed) if placed is not None else f"{island} has no process"

    def end(self, island: IslandId, incarnation: Incarnation) -> None:
        """Take the name away and end the process for certain, also one that is stopped or hangs.

        One whose node is unreachable is ended once that can be reached again.
        """
        life = (island, incarnation)
        placed = self._placed(island, incarnation)
        with self._lock:
            self._ended.add(life)
        nodes = [each.node_id for each in placed.ranks] if placed is not None and not self._closing else []
        if nodes:  # its link noticed the silence, perhaps before the watch over nodes did
            self._nodes.look_again()
        cut_off = next((node for node in nodes if self._nodes.is_unreachable(node)), None)
        if cut_off is not None and self._orphans.add(life, cut_off):
            # Ray would call it dead at once, and nobody could ever ask it what it trained meanwhile
            log.warning("%s.%s is ended once its node can be reached", island, incarnation)
            return
        if actors := self._actors_of(island, incarnation):
            self.kill(island, incarnation)
            for actor in actors:
                cluster.end_actor(actor)
        with self._lock:
            self._actors.pop(life, None)
            self._placements.pop(life, None)
            booking = self._bookings.pop(life, life)
        if self._sections[island].process_count > 1:
            cluster.cancel_booking(island_name(self._job, *booking))
        self._orphans.discard([life])
        self._logs.end(life)

    def close(self) -> str:
        """End all islands, then the job's other actors. Nothing is placed from now on.

        Returns why the files of a synchroniser elsewhere are not on the head yet: it is to call again. Empty at the end.
        """
        lives, is_over = self._stop(), True
        try:
            for island, incarnation in lives:
                self.end(island, incarnation)
            self._logs.look(LAST_LOOK_S)
            if self._keeper.look() and (missing := self._copy.finish(COPIED_WITHIN_S)):
                is_over = False
                return missing
            cluster.end_actors_of(self._job)
            self._copy.clear()
        finally:
            if is_over:
                self._logs.close()
                self._copy.close()
                self._on_closed()
        return ""

    def let_go(self) -> None:
        """Place nothing and watch nothing from now on. The job's processes run on: another controller has them."""
        self._stop()
        self._logs.close()
        self._copy.close()

    def _stop(self) -> list[Life]:
        """Place nothing from now on. Return the lives that may have processes."""
        self._supervisor.close()
        self._keeper.close()
        with self._spawning, self._lock:
            self._closing = True
            return sorted(self._actors)

    def _actors_of(self, island: IslandId, incarnation: Incarnation) -> tuple[ActorHandle[IslandInterface], ...]:
        """Their handles; by name where another controller made them. A standby whose processes were taken has none."""
        with self._lock:
            if (island, incarnation) in self._taken:
                return ()
            actors = self._actors.get((island, incarnation), ())
        return actors or self._named(island, incarnation)

    def _named(self, island: IslandId, incarnation: Incarnation) -> tuple[ActorHandle[IslandInterface], ...]:
        name = island_name(self._job, island, incarnation)
        ranks = (cluster.actor_named(rank_name(name, rank)) for rank in range(self._sections[island].process_count))
        return tuple(actor for actor in ranks if actor is not None)

    def _placed(self, island: IslandId, incarnation: Incarnation) -> Placement | None:
        """Return where the island's processes are. If another controller placed them, ask the processes."""
        life = (island, incarnation)
        with self._lock:
            placed, ours = self._placements.get(life), life in self._results
        if placed is not None or ours or not (actors := self._actors_of(island, incarnation)):
            return placed
        try:
            abouts = ray.get([actor.call(IslandInterface.hello) for actor in actors], timeout=REACH_TIMEOUT_S)
        except (RayError, TimeoutError):
            return None
        placed = self._placement(island_name(self._job, *life), abouts)
        for rank in placed.ranks:
            self._node_agents.ensure(rank)
        self._logs.add(logbook.island_logbook(self._run_dir, *life), placed)
        with self._lock:
            self._actors[life] = actors
            return self._placements.setdefault(life, placed)

    def _over(self, life: Life) -> bool:
        with self._lock:
            return self._closing or life in self._ended

    def _watch(self) -> None:
        """Close this job when its synchroniser is gone; islands would train on for nobody, and keep their nodes booked."""
        seen_at, trouble = time.monotonic(), ""
        while not self._closing:
            time.sleep(WATCH_S)
            try:
                for life in self._orphans.due(self._nodes.is_unreachable, time.monotonic()):
                    self.end(*life)
                there, trouble = self._keeper.look(), ""
            except Exception as error:  # the cluster itself does not answer, which says nothing of the synchroniser
                reason = in_words(error)
                if reason != trouble:  # it may stay so for hours
                    log.warning("whether the synchroniser is there cannot be told: %s", reason, exc_info=error)
                there, trouble = True, reason
            if there:
                seen_at = time.monotonic()
            elif time.monotonic() - seen_at > ORPHANED_S:
                log.warning("the synchroniser is gone: the job's processes are ended")
                self.close()
                return

    def declare_dead(self, nodes: frozenset[str]) -> None:
        """Have Ray end the islands on these nodes, which are down; their links notice that like any other death."""
        if not self._closing:
            self._keeper.nodes_down(nodes)
        with self._lock:
            placements = self._placements.items()
            lost = [life for life, placed in placements if any(rank.node_id in nodes for rank in placed.ranks)]
            actors = [actor for life in lost for actor in self._actors.get(life, ())]
        for actor in actors:
            cluster.end_actor(actor)

    def announce(self, leaving: Mapping[str, Leaving]) -> None:
        """Have the synchroniser hear which islands are on nodes that are about to go. It is told at every look, until they
        have gone: one that died meanwhile may not have heard. The next look tells it again, so no answer is waited for.
        """
        with self._lock:
            placed = {life: where for life, where in self._placements.items() if life not in self._ended}
        affected = {
            life: next(leaving[rank.node_id] for rank in where.ranks if rank.node_id in leaving)
            for life, where in placed.items()
            if any(rank.node_id in leaving for rank in where.ranks)
        }
        synchroniser: ActorHandle[SynchroniserInterface] | None = (
            cluster.actor_named(synchroniser_name(self._job)) if affected else None
        )
        for (island, incarnation), why in sorted(affected.items(), key=lambda item: item[0]):
            if synchroniser is not None:
                about = (island, incarnation, why.cause, why.seconds_left(time.time()))
                synchroniser.call(SynchroniserInterface.notice, *about)
        self._node_agents.leave(leaving)

    def _signal(
        self,
        island: IslandId,
        incarnation: Incarnation,
        method: Callable[Concatenate[NodeAgent, int, float, Arguments], bool],
        *arguments: Arguments.args,
        **named: Arguments.kwargs,
    ) -> str:
        placed = self._placed(island, incarnation)
        if placed is None:
            return f"{island} has no process"
        answers = (self._node_agents.signal(rank, method, *arguments, **named) for rank in placed.ranks)
        return "; ".join(filter(None, answers))


def _has_process(actor: ActorHandle[IslandInterface]) -> bool:
    """Return whether Ray has found a node for the actor and started its process there."""
    try:
        return cluster.address_of(actor) is not None
    except Exception:  # whatever Ray raises where its head is away: then nobody can tell
        return True


def spawn_island(
    job: str,
    life: Life,
    section: IslandsSection,
    wanted: Mapping[str, float],
    selector: Mapping[str, str],
    book: Logbook,
) -> ActorHandle[IslandInterface]:
    """Ask for the process of this life on a node of its group that ``selector`` allows, with ``wanted`` booked there."""
    where = {"label_selector": {GROUP_LABEL: section.node_group, **selector}}
    return _spawned(island_name(job, *life), life, section, wanted, where, book)


def spawn_gang(
    job: str,
    life: Life,
    section: IslandsSection,
    wanted: Mapping[str, float],
    gang: Gang,
    selector: Mapping[str, str],
    book: Logbook,
    timeout_s: float,
) -> tuple[ActorHandle[IslandInterface], ...]:
    """Start the processes of an island of many, as ``spawn_island`` does one, and return them by rank.

    Starts none if not all can be placed in time. Those of a host have successive ranks and share what is booked there.
    """
    name = island_name(job, *life)
    selectors = [{GROUP_LABEL: section.node_group, **selector, **own} for own in gang.selectors]
    booking = cluster.booked(name, wanted, selectors, timeout_s)
    if booking is None:
        return ()
    per_host = section.processes_per_host
    share = {resource: amount / per_host for resource, amount in wanted.items()}
    hosts = [cluster.in_booking(booking, rank // per_host) for rank in range(section.process_count)]
    return tuple(
        _spawned(rank_name(name, rank), life, section, share, host, rank_logbook(book, rank))
        for rank, host in enumerate(hosts)
    )


def _spawned(
    name: str,
    life: Life,
    section: IslandsSection,
    wanted: Mapping[str, float],
    where: Mapping[str, Any],
    book: Logbook,
) -> ActorHandle[IslandInterface]:
    island_class: IslandFactory = cluster.actor_class(ISLAND_CLASS)
    options = {
        "name": name,
        "max_restarts": 0,
        "max_concurrency": CONCURRENCY,
        "num_cpus": wanted["CPU"],
        "num_gpus": wanted.get("GPU", 0),
        "resources": {name: amount for name, amount in wanted.items() if name not in ("CPU", "GPU")},
        "enable_task_events": False,
        **where,
    }
    return cluster.start_actor(
        island_class, options, life[0], environment_of(section.accelerator, wanted["CPU"]), book, abandoned_after_s()
    )
