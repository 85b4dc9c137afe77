"""The supervision of helper processes: an actor that dies is made again, and what is wrong meanwhile can be asked for.

    running ──its process dies──▶ dead ──at once, then after 1, 2, 4 … 60 s──▶ running
       └──no answer for 30 s──▶ silent ──it answers──▶ running

The synchroniser supervises its job's controller and evaluators, and each controller the agents of the nodes that its
islands are on; Ray itself makes the synchroniser again. One call is always under way to each helper, and fails within
milliseconds of its death. A helper that dies again within a minute waits longer each time, so that what cannot live
does not take a processor.

Ray makes the synchroniser again only where it believes in the death of its node, which takes minutes. So the controller's
``SynchroniserKeeper`` makes it again once its machine refuses connections.

Responsible for noticing, for making again, and for the sentence that says so. Refuses to end what is silent: it may be
busy, or stopped with its whole machine. Making is idempotent by the actor's name.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar

import ray
from ray.exceptions import ActorDiedError, ActorUnschedulableError, RayError

from orchestrator.actors import ActorHandle, SynchroniserInterface
from orchestrator.checkpoints.writing import newest_number
from orchestrator.core.vocabulary import Incarnation, IslandId, Life
from orchestrator.errors import Conflict, first_line
from orchestrator.runtime import cluster, worker
from orchestrator.runtime.nodes import NodeWatch
from orchestrator.runtime.settings import CONTROL_GROUP, GROUP_LABEL, SYNCHRONISER_OPTIONS, synchroniser_name
from orchestrator.specification.config import JobSpec
from orchestrator.status import Helper as HelperStatus
from orchestrator.system.roots import AllowedRoots
from orchestrator.system.run_folder import CHECKPOINTS, history_of

log = logging.getLogger(__name__)

LOOK_S = 1.0
SILENCE_S = 30.0
LIVED_S = 60.0
"""A helper that lived so long died of something new: the next one is made at once."""
WAIT_FIRST_S, WAIT_MAX_S = 1.0, 60.0
DOUBLINGS_MAX = 6
SYNCHRONISER_CLASS = "orchestrator.runtime.synchroniser_actor:SynchroniserActor"
MOVE_RETRY_S = 0.1
PROCESS_WITHIN_S = 60.0
READ_WITHIN_S = 600.0
"""A synchroniser of another release replays the whole tape: it cannot use the snapshot of this one."""

ActorT = TypeVar("ActorT")
Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


class Condition(StrEnum):
    RUNNING = "running"
    SILENT = "silent"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Health:
    """The health of one helper. Times are of a monotonic clock.

    ``deaths`` counts deaths in a row, ``restarts`` all of them. ``due_at`` is when a dead helper is to be made again,
    ``made_at`` when the present one was made, ``answered_at`` when it last answered.
    """

    made_at: float
    answered_at: float
    condition: Condition = Condition.RUNNING
    reason: str = ""
    deaths: int = 0
    restarts: int = 0
    due_at: float = 0.0


def died(before: Health, reason: str, now: float) -> Health:
    """Its process is gone, or could not be made: the next one is due now, or later if this one did not live long."""
    had_lived = before.condition is not Condition.DEAD and now - before.made_at >= LIVED_S
    deaths = 1 if had_lived else before.deaths + 1
    wait = 0.0 if deaths == 1 else min(WAIT_FIRST_S * 2.0 ** min(deaths - 2, DOUBLINGS_MAX), WAIT_MAX_S)
    return replace(before, condition=Condition.DEAD, reason=reason, deaths=deaths, due_at=now + wait)


def begun(before: Health, now: float) -> Health:
    return replace(
        before, condition=Condition.RUNNING, made_at=now, answered_at=now, restarts=before.restarts + 1, due_at=0.0
    )


def answered(before: Health, now: float) -> Health:
    return replace(before, condition=Condition.RUNNING, answered_at=now)


def unanswered(before: Health, now: float) -> Health:
    """Silence alone is no death, and no reason to make another."""
    silent = now - before.answered_at >= SILENCE_S
    return replace(before, condition=Condition.SILENT) if silent and before.condition is Condition.RUNNING else before


def sentence(health: Health, now: float) -> str:
    """Return what is wrong with the helper and what happens next; empty if nothing is wrong."""
    if health.condition is Condition.SILENT:
        return f"it has not answered for {now - health.answered_at:.0f} s; it may be stopped, or busy"
    if health.condition is Condition.DEAD:
        wait = max(0.0, health.due_at - now)
        again = f" (death {health.deaths} in a row)" if health.deaths > 1 else ""
        return f"its process died: {health.reason}; it is restarted{f' in {wait:.0f} s' if wait >= 1 else ''}{again}"
    return ""


class Helper(Generic[ActorT]):
    """One helper. Calls go to the process that there is now; one that dies under a call has it fail, as Ray says it.

    ``make`` returns a handle at once, to the actor that has the name already if there is one. ``on_made`` is called, in the
    supervisor's thread, after each process that took a dead one's place. One that is not ``wanted`` is not made again.
    ``ask`` is the call that is always under way; what it answered last is ``said``, None since the process died.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], ActorHandle[ActorT]],
        on_made: Callable[[], None] = lambda: None,
        wanted: Callable[[], bool] = lambda: True,
        ask: Callable[[ActorT], Any] | None = None,
    ) -> None:
        self.name, self._make, self._on_made, self._wanted, self._ask = name, make, on_made, wanted, ask
        self._lock = threading.Condition()
        self._over = False
        self.said: Any = None
        self._handle = make()
        self._ping = self._pinged()
        now = time.monotonic()
        self._health = Health(now, now)

    @property
    def handle(self) -> ActorHandle[ActorT]:
        with self._lock:
            return self._handle

    def call(
        self,
        method: Callable[Concatenate[ActorT, Arguments], Answer],
        *arguments: Arguments.args,
        **named: Arguments.kwargs,
    ) -> ray.ObjectRef[Answer]:
        return self.handle.call(method, *arguments, **named)

    def replaced(self, handle: ActorHandle[ActorT], within_s: float) -> bool:
        """Wait until another process than this one is there. False if there is none in time."""
        with self._lock:
            return self._lock.wait_for(lambda: self._over or self._handle is not handle, within_s) and not self._over

    def exchange(self, handle: ActorHandle[ActorT]) -> None:
        """Supervise this process in the place of the present one, which the caller ends."""
        now = time.monotonic()
        with self._lock:
            self._handle, self._health = handle, replace(begun(self._health, now), restarts=self._health.restarts)
            self._ping = self._pinged()
            self._lock.notify_all()

    def status(self) -> HelperStatus:
        now = time.monotonic()
        with self._lock:
            health = self._health
        return HelperStatus(
            name=self.name, condition=health.condition.value, reason=sentence(health, now), restarts=health.restarts
        )

    def retire(self) -> ActorHandle[ActorT]:
        """Stop supervising: start nothing from now on. Returns the last process, so that the caller can end it."""
        with self._lock:
            self._over = True
            self._lock.notify_all()
            return self._handle

    def look(self) -> bool:
        """Take note of what became of it, and make it again when that is due. False once it is not wanted any more."""
        now = time.monotonic()
        with self._lock:
            if self._over:
                return False
            before, handle = self._health, self._handle
        if before.condition is Condition.DEAD:
            return self._make_again(now) if now >= before.due_at else True
        after = self._seen(before, now)
        with self._lock:
            if self._handle is not handle:
                return True  # another process took its place meanwhile
            self._health = after
        if after.condition is not before.condition:
            words = sentence(after, now) or "it answers again"
            log.warning("the %s: %s", self.name, words)
        return True

    def _seen(self, before: Health, now: float) -> Health:
        if not ray.wait([self._ping], timeout=0)[0]:
            return unanswered(before, now)
        try:
            self.said = ray.get(self._ping)
        except (ActorDiedError, ActorUnschedulableError) as error:
            self.said = None
            return died(before, first_line(error), now)
        except RayError:  # its node cannot be reached, say: no death
            self._ping = self._pinged()
            return unanswered(before, now)
        self._ping = self._pinged()
        return answered(before, now)

    def _make_again(self, now: float) -> bool:
        if not self._wanted():
            return False
        try:
            handle = self._make()
        except Exception as error:  # the cluster itself may be away
            with self._lock:
                self._health = died(self._health, f"{type(error).__name__}: {first_line(error)}", now)
            return True
        with self._lock:
            if self._over:
                return False
            self._handle, self._health = handle, begun(self._health, now)
            self._ping = self._pinged()
            self._lock.notify_all()
        log.warning("the %s is restarted (%d times so far)", self.name, self._health.restarts)
        with suppress(RayError):  # it may die at once; the next look sees that
            self._on_made()
        return True

    def _pinged(self) -> Any:
        """A call that the actor answers behind those that it was given before; without ``ask`` one that every actor has."""
        if self._ask is not None and self._handle.has(self._ask):  # one of an earlier build may not
            return self._handle.call(self._ask)
        return self._handle.ray_handle.__ray_ready__.remote()


class Supervisor:
    """One thread for all helpers of a process."""

    def __init__(self, name: str) -> None:
        self._helpers: list[Helper[Any]] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._name = name

    def begin(self) -> None:
        """Look after what was added, and what will be: once everything is there that is called after a death."""
        own = copy_context()  # with the logbook of the beginner, in a process of several jobs
        threading.Thread(target=own.run, args=(self._supervise,), name=f"supervise-{self._name}", daemon=True).start()

    def add(self, helper: Helper[ActorT]) -> Helper[ActorT]:
        with self._lock:
            self._helpers.append(helper)
        return helper

    def statuses(self) -> list[HelperStatus]:
        with self._lock:
            helpers = list(self._helpers)
        return [helper.status() for helper in helpers]

    def close(self) -> None:
        """Make nothing again from now on. What is there lives on."""
        self._closed.set()
        with self._lock:
            helpers, self._helpers = self._helpers, []
        for helper in helpers:
            helper.retire()

    def _supervise(self) -> None:
        troubles: dict[str, str] = {}
        while not self._closed.wait(LOOK_S):
            with self._lock:
                helpers = list(self._helpers)
            for helper in helpers:
                try:
                    wanted = helper.look()
                    troubles.pop(helper.name, None)
                except Exception as error:  # the cluster may be away, which says nothing of the helper
                    reason = f"{type(error).__name__}: {first_line(error)}"
                    if reason != troubles.get(helper.name):  # it may stay so for hours
                        log.warning("the %s cannot be supervised: %s", helper.name, reason, exc_info=error)
                    troubles[helper.name] = reason
                    continue
                if not wanted:
                    with self._lock:
                        self._helpers = [one for one in self._helpers if one is not helper]


class SynchroniserFacts(NamedTuple):
    """Arguments of a synchroniser besides its job: regions and cordoners of node groups, and the URL of the store.

    ``history`` is the epoch in which its tape begins.
    """

    regions: dict[str, str]
    cordoned: dict[str, str]
    store: str | None
    history: int = 0


@dataclass(frozen=True, slots=True)
class Past:
    """Facts of a job: whether it has had parameters, the actors of the lives that may have processes, and the highest
    incarnation of each island. A life that was given up is in the latter only. ``history`` is the newest that is known, and
    ``checkpoint_count`` the highest number of a checkpoint in the head's run folder.
    """

    had_theta: bool
    names: Mapping[Life, str]
    last_incarnations: Mapping[IslandId, Incarnation]
    history: int = 0
    checkpoint_count: int = 0


class SynchroniserKeeper:
    """Makes a job's synchroniser again: elsewhere once its own node is down, and in another release when it hands over.

    If another node sees the run folder, the job continues from it, and else from what its islands hold (``salvaging``). A
    release that cannot start its synchroniser has changed nothing, and this one goes on.
    """

    def __init__(self, job: str, spec: JobSpec, run_dir: str, roots: AllowedRoots, nodes: NodeWatch) -> None:
        self._job, self._name, self._groups = (
            job,
            synchroniser_name(job),
            spec.synchroniser.node_groups or (CONTROL_GROUP,),
        )
        self._facts, self._roots = (spec, run_dir), roots
        self._nodes = nodes
        self._noted = SynchroniserFacts({}, {}, None)
        self.had_theta = False
        self._node, self._moving = "", False
        self._closed = threading.Event()
        self._making = threading.Lock()  # held from the last look at ``_closed`` until Ray knows the actor

    def note(self, facts: SynchroniserFacts, had_theta: bool) -> None:
        """Keep what a new synchroniser is made with, and whether the job has had parameters."""
        self._noted = facts
        self.had_theta = self.had_theta or had_theta

    @property
    def node(self) -> str:
        """Return the id of the synchroniser's node, as of the last look; empty while it is unknown or is being replaced."""
        return self._node

    def past(self, names: Mapping[Life, str], last_incarnations: Mapping[IslandId, Incarnation]) -> Past:
        """Return the job's past. Of a synchroniser of which this process knows nothing, the head's run folder knows more."""
        noted, run_dir = self._noted.history, Path(self._facts[1])
        history = max(noted, history_of(run_dir))
        had_theta = self.had_theta or (history > 0 and not noted)
        folder = run_dir / CHECKPOINTS
        checkpoint_count = newest_number(os.listdir(folder)) if folder.is_dir() else 0
        return Past(had_theta, names, last_incarnations, history, checkpoint_count)

    def look(self) -> bool:
        """Return whether there is a synchroniser, or one is about to be made.

        Note its node. One whose node went down before it was noted is made again as well.
        """
        actor = cluster.actor_named(self._name)
        process = None if actor is None else cluster.process_of(actor)
        if process is not None and not self._moving:
            self._node = process.node_id
            if self._nodes.is_down(self._node):
                self.nodes_down(frozenset({self._node}))
        return actor is not None or self._moving

    @property
    def is_moving(self) -> bool:
        """Return whether the synchroniser is being made again. It has a name before and after."""
        return self._moving

    def nodes_down(self, nodes: frozenset[str]) -> None:
        """Make the synchroniser again if it was on one of these nodes. Returns at once."""
        if self._node in nodes and not self._moving and not self._closed.is_set():
            self._moving, self._node = True, ""
            threading.Thread(target=copy_context().run, args=(self._move,), name="move", daemon=True).start()

    def replace(self, build: str, python: str) -> None:
        """End the synchroniser, and make one of the release ``build`` on its node. Returns at once."""
        if self._moving or self._closed.is_set():
            raise Conflict(detail="The synchroniser is being made again already.")
        self._moving = True
        threading.Thread(
            target=copy_context().run, args=(self._replace, build, python), name="replace", daemon=True
        ).start()

    def _replace(self, build: str, python: str) -> None:
        log.warning("the synchroniser hands over to one of %s", build)
        began, node, of_release = time.monotonic(), self._node, worker.of_release(build, python)
        try:
            self._insist(self._end)
            self._insist(lambda: self._made_on(node, of_release))
            if why := self._why_not_begun():
                log.warning("the synchroniser of %s does not start, and this release goes on: %s", build, why)
                self._insist(self._end)
                self._insist(lambda: self._made_on(node, {}))
            else:
                log.warning("the synchroniser of %s is there, %.1f s later", build, time.monotonic() - began)
        finally:
            self._moving = False

    def _insist(self, work: Callable[[], object]) -> bool:
        """Do the work until it returns something true. Return whether it has: not if this keeper was closed before.

        The cluster may be away, and the job waits for this.
        """
        trouble = ""
        while not self._closed.is_set():
            try:
                with self._making:
                    if not self._closed.is_set() and work():
                        return True
            except Exception as error:
                reason = f"{type(error).__name__}: {first_line(error)}"
                if reason != trouble:
                    log.warning("the synchroniser cannot be made again yet: %s", reason, exc_info=error)
                trouble = reason
            self._closed.wait(MOVE_RETRY_S)
        return False

    def _made_on(self, node: str, of_release: Mapping[str, Any]) -> ActorHandle[SynchroniserInterface]:
        """Ask for the synchroniser on this node, or where there is no such node any more, on one of its groups."""
        where = cluster.on_groups(self._name, self._groups, node)
        return self._asked_for({**where, **of_release})

    def _why_not_begun(self) -> str:
        """Wait until the synchroniser has read its files. Return why it could not; empty if it has."""
        give_up_at = time.monotonic() + PROCESS_WITHIN_S
        while not self._closed.is_set():
            actor = cluster.actor_named(self._name)
            if actor is None:
                return "its process ended as it started"
            begun = actor.ray_handle.__ray_ready__.remote()
            has_process = cluster.address_of(actor) is not None
            try:
                ray.get(begun, timeout=READ_WITHIN_S if has_process else LOOK_S)
            except (RayError, TimeoutError) as error:
                if has_process or not isinstance(error, TimeoutError):
                    return first_line(error)
                if time.monotonic() > give_up_at:
                    return f"no process of it started within {PROCESS_WITHIN_S:.0f} s"
            else:
                return ""
        return ""

    def close(self) -> None:
        """Make nothing from now on: the job ends, or another controller has it."""
        with self._making:
            self._closed.set()

    def _move(self) -> None:
        began = time.monotonic()
        log.warning("the node of the synchroniser is down: it is made again on another one")
        try:
            if self._insist(self._end) and self._insist(self._make):
                log.warning("the synchroniser is made again, %.1f s later", time.monotonic() - began)
        finally:
            self._moving = False

    def _end(self) -> bool:
        """Have Ray forget the synchroniser whose node is down. Return whether it has."""
        actor = cluster.actor_named(self._name)
        if actor is not None:
            cluster.end_actor(actor)
        return actor is None

    def _make(self) -> bool:
        """Ask for the synchroniser on the first group that has a node. Return whether it has been made."""
        if cluster.actor_named(self._name) is not None:
            return True
        present = {node.group for node in self._nodes.placeable()}
        group = next((group for group in self._groups if group in present), None)
        if group is not None:
            where = {
                **cluster.on_head(self._name),
                "label_selector": {GROUP_LABEL: group, **self._nodes.selector()},
            }
            self._asked_for(where)
            log.warning("the synchroniser is placed on %s", group)
        return False

    def _asked_for(self, where: Mapping[str, Any]) -> ActorHandle[SynchroniserInterface]:
        spec, run_dir = self._facts
        kind: Callable[..., SynchroniserInterface] = cluster.actor_class(SYNCHRONISER_CLASS)
        regions, cordoned, store, _ = self._noted
        # plain data: another release may have other classes
        facts = (
            self._job,
            spec.model_dump(mode="json"),
            regions,
            run_dir,
            cordoned,
            self._roots,
            store,
            self.had_theta,
        )
        return cluster.start_actor(kind, {**where, **SYNCHRONISER_OPTIONS}, *facts)
