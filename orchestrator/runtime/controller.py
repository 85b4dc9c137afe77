"""One job's controller: it spawns island processes where they belong, kills them, and ends all of them with the job.

A detached actor beside the synchroniser, so that slow Ray calls never hold up a decision. Responsible for: placing by
label and resources, saying why it could not, ending processes for certain. Refuses to decide when an island is placed
or given up (``core.island_record``).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Concatenate, ParamSpec

import ray
from ray.exceptions import RayError

from orchestrator import logbook
from orchestrator.actors.handle import ActorHandle
from orchestrator.actors.island import IslandInterface
from orchestrator.checkpoints.resumption import stored
from orchestrator.config import JobSpec
from orchestrator.core.vocabulary import Incarnation, IslandId, Life
from orchestrator.errors import first_line
from orchestrator.roots import AllowedRoots
from orchestrator.runtime import cluster, disk_space
from orchestrator.runtime.names import controller_name, island_name, synchroniser_name
from orchestrator.runtime.node_agent import NodeAgent
from orchestrator.runtime.node_agents import NodeAgents
from orchestrator.runtime.nodes import NodeWatch
from orchestrator.runtime.orphans import Orphans
from orchestrator.runtime.placement import Placement, Refusal, Unplaced, refusal, resources_of
from orchestrator.runtime.spawn import CONCURRENCY, spawn_island

log = logging.getLogger(__name__)

CAPACITY_WAIT_S = 3.0
"""A killed island's resources are booked until its node notices (well under a second)."""
HELLO_TIMEOUT_S = 60.0
REACH_TIMEOUT_S = 3.0
WATCH_S = 2.0
ORPHANED_S = 10.0
"""A synchroniser that died has its name while Ray makes it again. One without a name for so long does not come back."""
UNWANTED = Unplaced("it was ended before it was placed")

Arguments = ParamSpec("Arguments")


class Controller:
    def __init__(self, job: str, spec: JobSpec, run_dir: str, roots: AllowedRoots) -> None:
        logbook.keep(logbook.service_logbook(Path(run_dir), "controller"))
        self._job, self._spec, self._run_dir = job, spec, Path(run_dir)
        resumption = stored(self._run_dir)
        legs = resumption.legs if resumption else ()
        self._added = {"legs": legs, "roots": roots}
        self._shards = list(spec.island_sections(slots=True))
        self._sections = {**spec.island_sections(slots=True), **spec.standby_sections()}
        self._folder = disk_space.cluster_folder(os.environ)
        self._lock = threading.Lock()
        self._actors: dict[Life, ActorHandle[IslandInterface]] = {}
        self._placements: dict[Life, Placement] = {}
        self._results: dict[Life, Future[Placement | Unplaced]] = {}
        self._ended: set[Life] = set()
        self._taken: set[Life] = set()
        self._node_agents = NodeAgents()
        self._spawning = threading.Lock()  # held from the last look at ``_closing`` until the actor is known
        self._closing = False
        self._nodes, self._orphans = NodeWatch(self._declare_dead), Orphans()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def place(self, island: IslandId, incarnation: Incarnation, standby: Life | None = None) -> Placement | Unplaced:
        """Make the process of this incarnation and have it build its model; returns once it answers.

        With ``standby`` that one's process is it, and the standby's incarnation has none any more.
        Asked again, as by a synchroniser whose predecessor died waiting for the answer, it gives the same answer.
        """
        with self._lock:
            earlier = self._results.get((island, incarnation))
            result: Future[Placement | Unplaced] = Future()
            self._results.setdefault((island, incarnation), result)
        if earlier is not None:
            return earlier.result()
        try:
            if standby is None:
                result.set_result(self._place(island, incarnation))
            else:
                result.set_result(self._promote((island, incarnation), standby))
        except BaseException as error:
            result.set_exception(error)
        return result.result()

    def lives(self, of_others: Iterable[Life] = ()) -> list[Life]:
        """Whose processes there may be, as far as they were made here and not ended.

        From now on that includes those ``of_others`` that answer: made by a controller that died with its node.
        """
        for life in of_others:
            self._placed(*life)
        with self._lock:
            return sorted(self._actors)

    def _place(self, island: IslandId, incarnation: Incarnation) -> Placement | Unplaced:
        section = self._sections[island]
        wanted = resources_of(section)
        life = (island, incarnation)
        deadline = time.monotonic() + CAPACITY_WAIT_S
        while (no := self._refusal(section.node_group, wanted)) is not None:
            if no.final or time.monotonic() > deadline:
                return Unplaced(no.reason)
            if self._over(life):
                return UNWANTED
            time.sleep(0.05)
        with self._spawning:
            if self._over(life):
                return UNWANTED
            book = logbook.island_logbook(self._run_dir, island, incarnation)
            actor = spawn_island(self._job, life, section, wanted, self._nodes.selector(), book)
            with self._lock:
                self._actors[life] = actor
        if self._over(life):
            self.end(island, incarnation)
            return UNWANTED
        shard = self._shards.index(island) if island in self._shards else 0  # a standby's is that of whom it becomes
        document = self._spec.island_document(section) | self._added
        hurry = island in self._shards and incarnation > 1  # it is missed
        actor.call(IslandInterface.prepare, document, shard, len(self._shards), hurry)
        try:
            about = ray.get(actor.call(IslandInterface.hello), timeout=HELLO_TIMEOUT_S)
        except (RayError, TimeoutError) as error:
            self.end(island, incarnation)
            now = self._refusal(section.node_group, wanted)
            return Unplaced(now.reason if now else f"its process did not answer: {first_line(error)}")
        self._node_agents.ensure(about["node_id"])
        placed = Placement(island_name(self._job, island, incarnation), **about)
        log.info("%s.%s is process %d on %s", island, incarnation, placed.pid, placed.node)
        with self._lock:
            self._placements[life] = placed
        if self._over(life):
            self.end(island, incarnation)
            return UNWANTED
        return placed

    def _refusal(self, group: str, wanted: Mapping[str, float]) -> Refusal | None:
        """Why no process can begin on the group now: its nodes have too little free, or the cluster's disk is full."""
        if (no := refusal(group, wanted, self._nodes.placeable())) is not None:
            return no
        shortage = disk_space.shortage(self._folder)
        return Refusal(shortage, final=False) if shortage else None

    def _promote(self, life: Life, standby: Life) -> Placement | Unplaced:
        island, incarnation = life
        with self._lock:
            actor, before = self._actors.pop(standby, None), self._placements.pop(standby, None)
            self._taken.add(standby)
            if actor is not None:
                self._actors[life] = actor
        book = logbook.island_logbook(self._run_dir, island, incarnation)
        try:
            if actor is None or before is None:
                return Unplaced(f"the standby {standby[0]} is gone")
            call = actor.call(IslandInterface.promote, island, self._shards.index(island), book)
            placed = Placement(before.actor, **ray.get(call, timeout=HELLO_TIMEOUT_S))
        except (RayError, TimeoutError) as error:
            self.end(island, incarnation)
            return Unplaced(f"the standby {standby[0]} did not answer: {first_line(error)}")
        log.info("%s.%s is process %d, until now the standby %s", island, incarnation, placed.pid, standby[0])
        with self._lock:
            self._placements[life] = placed
        if self._over(life):
            self.end(island, incarnation)
            return UNWANTED
        return placed

    def kill(self, island: IslandId, incarnation: Incarnation) -> None:
        """SIGKILL the process, if there is one."""
        log.info("%s.%s is killed", island, incarnation)
        placed = self._placed(island, incarnation)
        if (placed is None or not self._node_agents.kill(placed)) and (
            actor := self._actor(island, incarnation)
        ) is not None:
            cluster.end_actor(actor)  # no node agent answers: Ray's own way, which needs the process to cooperate

    def stop(self, island: IslandId, incarnation: Incarnation, duration_s: float) -> str:
        """SIGSTOP the process; it goes on after ``duration_s``. Empty when that is done, else why it could not be."""
        return self._signal(island, incarnation, NodeAgent.stop, duration_s)

    def go_on(self, island: IslandId, incarnation: Incarnation) -> str:
        """SIGCONT the process, before its time. Answers as ``stop``."""
        return self._signal(island, incarnation, NodeAgent.go_on)

    def kill_node(self, island: IslandId, incarnation: Incarnation) -> str:
        """SIGKILL the raylet of the process's node; what runs on it dies within seconds. Answers as ``stop``."""
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
        node = placed.node_id if placed is not None and not self._closing else None
        if node is not None and self._nodes.is_unreachable(node) and self._orphans.add(life, node):
            # Ray would call it dead at once, and nobody could ever ask it what it trained meanwhile
            log.warning("%s.%s is ended once its node can be reached", island, incarnation)
            return
        if (actor := self._actor(island, incarnation)) is not None:
            self.kill(island, incarnation)
            cluster.end_actor(actor)
        with self._lock:
            self._actors.pop(life, None)
            self._placements.pop(life, None)
        self._orphans.discard([life])

    def close(self) -> None:
        """End all islands, then the job's other actors, then this one. Nothing is placed from now on."""
        with self._spawning, self._lock:
            self._closing = True
            lives = sorted(self._actors)
        try:
            for island, incarnation in lives:
                self.end(island, incarnation)
            cluster.end_actors_of(self._job, but=controller_name(self._job))
        finally:
            cluster.end_own_actor()

    def _actor(self, island: IslandId, incarnation: Incarnation) -> ActorHandle[IslandInterface] | None:
        """Its handle; by name where another controller made it. A standby whose process was taken has none."""
        with self._lock:
            if (island, incarnation) in self._taken:
                return None
            actor = self._actors.get((island, incarnation))
        return actor if actor is not None else cluster.actor_named(island_name(self._job, island, incarnation))

    def _placed(self, island: IslandId, incarnation: Incarnation) -> Placement | None:
        """Where its process is, which says so itself where another controller placed it."""
        life = (island, incarnation)
        with self._lock:
            placed, ours = self._placements.get(life), life in self._results
        if placed is not None or ours or (actor := self._actor(island, incarnation)) is None:
            return placed
        try:
            about = ray.get(actor.call(IslandInterface.hello), timeout=REACH_TIMEOUT_S)
        except (RayError, TimeoutError):
            return None
        with self._lock:
            self._actors[life] = actor
            return self._placements.setdefault(life, Placement(island_name(self._job, island, incarnation), **about))

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
                there = cluster.actor_named(synchroniser_name(self._job)) is not None
                own: ActorHandle[Controller] | None = cluster.actor_named(controller_name(self._job))
                trouble = ""
            except Exception as error:  # the cluster itself does not answer, which says nothing of the synchroniser
                reason = f"{type(error).__name__}: {first_line(error)}"
                if reason != trouble:  # it may stay so for hours
                    log.warning("whether the synchroniser is there cannot be told: %s", reason, exc_info=error)
                there, own, trouble = True, None, reason
            if there or own is None:
                seen_at = time.monotonic()
            elif time.monotonic() - seen_at > ORPHANED_S:
                # as a call, for an actor can be left only from one
                own.call(Controller.close)
                return

    def _declare_dead(self, nodes: frozenset[str]) -> None:
        """Have Ray end the islands on these nodes, which are down; their links notice that like any other death."""
        with self._lock:
            lost = [life for life, placed in self._placements.items() if placed.node_id in nodes]
            actors = [self._actors[life] for life in lost if life in self._actors]
        for actor in actors:
            cluster.end_actor(actor)

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
        return self._node_agents.signal(placed, method, *arguments, **named)


def controller_of(job: str, spec: JobSpec, run_dir: str, roots: AllowedRoots) -> ActorHandle[Controller]:
    """The job's controller: the one there is, for a synchroniser whose predecessor died, or a new one."""
    options = {**cluster.on_head(controller_name(job)), "max_restarts": 0, "max_concurrency": CONCURRENCY}
    return cluster.start_actor(Controller, options, job, spec, run_dir, roots)
