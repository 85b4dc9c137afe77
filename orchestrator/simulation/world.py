"""The simulated world: a seeded heap of future events, around the same core, driver and folds as in a live job.

    world = World(policy, plan, seed);  world.run();  world.tape, world.goodput, world.statistics

The world carries out each effect of the core and checks the system from outside: a merged payload must be held, and the
invariants of the core and the folds must hold after every event. Everything follows from policy, plan and seed. There are
no clocks, no Ray and no arrays here.

``MergeWorker`` is also the evaluator. Here Θ is a list of versions and steps, without tensors. It does what
``runtime.shard_worker`` and ``runtime.evaluation`` do live. A merge of payloads that are not held is a bug of the core and
raises at once. An evaluation that runs when the islands stop stepping speeds up, if the plan says by how much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from hashlib import blake2b
from heapq import heappop, heappush
from operator import lt
from random import Random
from typing import Protocol

from orchestrator.accounting.goodput import Goodput
from orchestrator.accounting.statistics import Statistics
from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core import invariants, saving
from orchestrator.core.messages import Evaluated, LeftState, Ready
from orchestrator.core.synchroniser import Synchroniser
from orchestrator.core.vocabulary import (
    Duration,
    Incarnation,
    Instant,
    IslandId,
    JobPhase,
    JobPolicy,
    PayloadId,
    ReleaseReason,
    Version,
)
from orchestrator.errors import InternalError
from orchestrator.simulation.faults import inject
from orchestrator.simulation.island import Clock, Host, Listener, Odds, SimulatedIsland, Stepping
from orchestrator.simulation.links import Links
from orchestrator.simulation.plan import Capacity, IncarnationStart, Latency, WorldPlan
from orchestrator.tape.driver import Driver, Fold, MemorySink
from orchestrator.tape.schema import Header, Tape

EVENTS_MAX = 2_000_000
"""No simulated job is longer. A world that does not end by then is a bug and raises InternalError."""


class World:
    """One job in a simulated world."""

    def __init__(
        self, policy: JobPolicy, plan: WorldPlan, seed: int, *, checked: bool = True, folds: tuple[Fold, ...] = ()
    ) -> None:
        self.policy, self.plan, self.seed = policy, plan, seed
        self.random = Random(seed)
        self.now: Instant = 0.0
        self.core = Synchroniser(policy)
        self.goodput, self.statistics = Goodput(policy), Statistics(policy)
        self.sink = MemorySink()
        self.hosts: dict[tuple[IslandId, Incarnation], Host] = {}
        self.held: set[PayloadId] = set()
        self.finished: f.FinishJob | None = None
        self.links, self.merge_worker = Links(self), MergeWorker(self)
        self._driver = Driver(self.core, (*folds, self.goodput, self.statistics), self.sink)
        self.stepping = Stepping(policy, plan, self.random)
        everybody = (*policy.islands, *policy.standbys)
        self.tokens_per_step = {island.island: plan.tokens_per_step for island in everybody}
        self._lives = {(life.island, life.incarnation): life for life in plan.lives}
        self._heap: list[tuple[Instant, int, Callable[[], None]]] = []
        self._count = 0
        self._checked = checked

    # ── running ───────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, until: Instant = float("inf")) -> World:
        """Run up to ``until``, or until nothing is left to happen."""
        for _ in self.passing(until):
            pass
        return self

    def passing(self, until: Instant = float("inf"), at_once: int = 2_000) -> Iterator[Instant]:
        """Run, and yield the present instant after every ``at_once`` events. Stop iterating to stop it."""
        self._begin()
        while self._go_on(until, at_once):
            yield self.now

    def resume(self, until: Instant = float("inf")) -> World:
        """Continue a world that was run up to an earlier instant."""
        while self._go_on(until, EVENTS_MAX):
            pass
        return self

    def _begin(self) -> None:
        self._start_job()
        for fault in self.plan.faults:
            self.later(fault.at, partial(inject, self, fault))
        for change in self.plan.capacity:
            self.later(change.at, partial(self._change_capacity, change))

    def _start_job(self) -> None:
        self.later(0.0, lambda: self.tell(e.JobStarted(self.now)))
        plan = self.plan
        seeded = e.OuterStateSeeded(plan.seed_s, plan.parameter_count, "0" * 32, plan.router_parameter_count)
        self.later(plan.seed_s, lambda: self.tell(seeded))

    def _go_on(self, until: Instant, at_most: int) -> bool:
        """Run up to ``at_most`` events. Return whether more are left before ``until``."""
        for _ in range(at_most):
            if not self._heap or self._heap[0][0] > until:
                return False
            self.now, _, thunk = heappop(self._heap)
            thunk()
        return True

    @property
    def tape(self) -> Tape:
        return self.sink.tape(Header(f"simulated-{self.seed}", self.policy))

    def later(self, seconds: float, thunk: Callable[[], None]) -> None:
        """Schedule ``thunk`` for ``seconds`` from now. At the same instant, what was scheduled first happens first."""
        self._count += 1
        if self._count > EVENTS_MAX:
            raise InternalError(detail=f"The simulated job (seed {self.seed}) does not end.")
        heappush(self._heap, (self.now + seconds, self._count, thunk))

    def while_alive(self, seconds: float, thunk: Callable[[], None]) -> None:
        """Schedule like ``later``: the synchroniser's process never dies in this world."""
        self.later(seconds, thunk)

    def addressed(self, host: Host, call: Callable[[], None]) -> Callable[[], None]:
        """Return the call unchanged: the synchroniser that makes it never dies in this world."""
        return call

    def host_of(self, process: SimulatedIsland) -> Host:
        return Host(process)

    def answer(self, host: Host, event: e.Event) -> None:
        """Tell the synchroniser the result of a placement."""
        self.unless_over(event)

    def latest(self, island: IslandId) -> Host | None:
        """Return the island's latest process, dead or alive."""
        lives = [incarnation for name, incarnation in self.hosts if name == island]
        return self.hosts[island, max(lives)] if lives else None

    def draw(self, latency: Latency) -> float:
        """Draw a duration. A latency of 0 uses no random number."""
        if not isinstance(latency, tuple):
            return latency.draw(self.random)
        low, high = latency
        return self.random.uniform(low, high) if high > 0.0 else 0.0

    def life(self, host: Host) -> IncarnationStart:
        """Return the plan's record of how this incarnation starts."""
        key = (host.process.island, host.process.incarnation)
        return self._lives.get(key) or IncarnationStart(*key)

    def left_by(self, host: Host) -> LeftState | None:
        """Return the state that the last incarnation to train left on the machine, if it is dead and did."""
        if not self.plan.states_left:
            return None
        island = host.process.island
        earlier = (self.hosts.get((island, Incarnation(n))) for n in range(host.process.incarnation - 1, 0, -1))
        former = next((one for one in earlier if one is not None and one.process.replica.tokens_total), None)
        if former is None or former.alive or former.process.diverged:
            return None
        leaves = Random(f"{self.seed} {island} {former.process.incarnation} leaves").random() < self.plan.states_left
        return former.process.left() if leaves else None

    def chance(self, probability: float) -> bool:
        """Draw whether a random fault occurs. None does once the plan is calm."""
        return probability > 0.0 and self.now < self.plan.calm_at and self.random.random() < probability

    def tell(self, event: e.Event) -> None:
        """Give an event to the core and carry out its effects."""
        if isinstance(event, e.ContributionArrived) and event.displacement is not None:  # it came with its bytes
            self.held.add(event.contribution.payload)
        effects = self._driver.step(event)
        for effect in effects:
            f.carry_out(effect, self)
        if self._checked:
            invariants.check(self.core.state)
            self.goodput.check()

    # ── core.effects.Shell ──────────────────────────────────────────────────────────────────────────────────────────────

    def set_timer(self, effect: f.SetTimer) -> None:
        self.while_alive(max(0.0, effect.due_at - self.now), partial(self._tell_timer, effect))

    def merge_fragment(self, effect: f.MergeFragment) -> None:
        self.merge_worker.merge(effect)

    def publish_fragment(self, effect: f.PublishFragment) -> None:
        for recipient in effect.recipients:
            host = self.hosts.get((recipient.island, recipient.incarnation))
            if host is not None:
                lost = self.chance(self.plan.publication_loss)
                self.links.publish(host, effect, recipient.merged_offer, lost=lost)

    def release_payload(self, effect: f.ReleasePayload) -> None:
        if effect.payload not in self.held and effect.reason is not ReleaseReason.REFUSED:
            raise InternalError(detail=f"Payload {effect.payload} was released, but is not held.")
        self.held.discard(effect.payload)

    def place_island(self, effect: f.PlaceIsland) -> None:
        _place(self, effect)

    def begin_catch_up(self, effect: f.BeginCatchUp) -> None:
        self.links.catch_up(effect, self.merge_worker.outer)

    def start_training(self, effect: f.StartTraining) -> None:
        host = self.hosts[effect.island, effect.incarnation]
        self.reach(host, self.addressed(host, partial(self._start, host)))

    def adjust_island(self, effect: f.AdjustIsland) -> None:
        host = self.hosts[effect.island, effect.incarnation]
        adjust = partial(host.process.replica.adjust, effect.lr_ratio, effect.interval_steps)
        self.reach(host, self.addressed(host, adjust))

    def flush_island(self, effect: f.FlushIsland) -> None:
        host = self.hosts[effect.island, effect.incarnation]
        self.merge_worker.finish_evaluation_alone()
        self.reach(host, self.addressed(host, partial(self._flush, host)))

    def drain_island(self, effect: f.DrainIsland) -> None:
        host = self.hosts[effect.island, effect.incarnation]
        self.reach(host, self.addressed(host, partial(self.drain, host)))

    def kill_island(self, effect: f.KillIsland) -> None:
        _end(self, effect)

    def stop_island(self, effect: f.StopIsland) -> None:
        _end(self, effect)

    def evaluate(self, effect: f.Evaluate) -> None:
        host = None if effect.island is None else self.hosts[effect.island, effect.incarnation]
        if host is None:
            self.merge_worker.evaluate(effect.global_version)
        else:
            self.reach(host, self.addressed(host, partial(self._measure_at_boundary, host, effect)))

    def resolve_command(self, effect: f.ResolveCommand) -> None:
        """Do nothing: the result of a command is on the tape, and no operator waits for it here."""

    def begin_checkpoint(self, effect: saving.BeginCheckpoint) -> None:
        """Do nothing: this world saves no checkpoints. The one of ``tests/swarm/checkpointing_world.py`` does."""

    def seal_checkpoint(self, effect: saving.SealCheckpoint) -> None:
        """Do nothing, see ``begin_checkpoint``."""

    def drop_checkpoint(self, effect: saving.DropCheckpoint) -> None:
        """Do nothing, see ``begin_checkpoint``."""

    def restore_fragments(self, effect: saving.RestoreFragments) -> None:
        """Do nothing: a job without checkpoints cannot roll back."""

    def hand_over(self, effect: saving.HandOver) -> None:
        """Do nothing: this world has one release, and no checkpoints."""

    def finish_job(self, effect: f.FinishJob) -> None:
        self.finished = effect

    # ── reaching processes ────────────────────────────────────────────────────────────────────────────────────────

    def _tell_timer(self, effect: f.SetTimer) -> None:
        self.unless_over(e.TimerFired(self.now, effect.timer, effect.serial))

    def unless_over(self, event: e.Event) -> None:
        if self.finished is None:
            self.tell(event)

    def reach(self, host: Host, call: Callable[[], None]) -> None:
        """Call into the process now, or once it can be reached. Never if it is dead."""
        if host.silent(self.now):
            host.waiting.append(call)
        elif host.alive:
            call()

    def die(self, host: Host, reason: str, *, announced: bool) -> None:
        """End the process at once. If ``announced``, the core detects the broken connection a little later."""
        if not host.alive:
            return
        host.alive = host.process.stepping = False
        host.outbox.clear()
        lost = e.ConnectionLost(0.0, host.process.island, host.process.incarnation, True, reason)
        if announced:
            self.links.say(lost, self.draw(self.plan.detect_s))

    def _measure_at_boundary(self, host: Host, effect: f.Evaluate) -> None:
        """Evaluate instead of stepping once the process holds Θ at these versions, or at once if it does not step."""
        host.evaluation = effect
        if not host.process.stepping:
            self._measure(host)

    def _measure(self, host: Host) -> Duration:
        """Begin the evaluation that waits here, and return its duration, after which it reports. 0 if none can begin."""
        effect, versions = host.evaluation, host.process.replica.versions
        if effect is None or (host.process.stepping and any(map(lt, versions, effect.versions))):
            return 0.0
        host.evaluation = None
        takes = self.draw(self.plan.evaluate_s)
        takes = takes if effect.limit_s is None else min(takes, effect.limit_s)
        version, count = effect.global_version, self.policy.evaluation.sequences
        report = Evaluated(version, held_out_loss(version), count, takes)
        self.later(takes, lambda: self._report(host, report))
        return takes

    def _report(self, host: Host, report: Evaluated) -> None:
        if host.alive:
            host.post([report])
            self.links.carry(host)

    # ── stepping ──────────────────────────────────────────────────────────────────────────────────────────────

    def _start(self, host: Host) -> None:
        host.process.replica.start()
        if host.process.stepping or host.process.replica.drained:
            return  # repeated, or too late
        host.process.stepping = True
        life = self.life(host)
        begins_in = self.draw(self.plan.begin_s) if life.begin_s is None else life.begin_s
        host.last_step_end = host.reported_at = self.now + begins_in
        if begins_in > 0.0:
            self.later(begins_in, lambda: self._begin_step(host))
        else:
            self._begin_step(host)

    def _begin_step(self, host: Host) -> None:
        island = host.process.island
        pause = self.stepping.pause(island, self.now) + self._measure(host)
        host.began_at, host.step_s = self.now + pause, self.stepping.draw(island, self.now)
        host.owed = 0.0  # a standstill before this step does not lengthen it
        self.later(pause + host.step_s, lambda: self._end_step(host))

    def _end_step(self, host: Host) -> None:
        if not (host.alive and host.process.stepping):
            return
        if self.now < host.frozen_until:
            self.later(host.frozen_until - self.now, lambda: self._end_step(host))
            return
        if self.now < host.hung_until:
            self.later(host.hung_until - self.now, lambda: self._end_step(host))
            return
        left = self.stepping.held(host, self.now)
        if left != 0.0:
            if left is not None:
                self.later(left, lambda: self._end_step(host))
            return
        reports = host.process.end_step(host.step_s, self.now - host.last_step_end)
        host.last_step_end = self.now
        if not reports and self.now - host.reported_at >= self.plan.report_every_s:
            reports = [host.process.progress()]
        if reports:
            host.reported_at = self.now
            host.post(reports)
            self.links.carry(host)
        if host.process.stepping:
            self._begin_step(host)
        else:
            self._measure(host)

    def _change_capacity(self, change: Capacity) -> None:
        self.tokens_per_step[change.island] = round(change.ratio * self.plan.tokens_per_step)
        host = self.latest(change.island)
        if host is not None:
            host.process.tokens_per_step = self.tokens_per_step[change.island]
        left = self.stepping.change(host, change.island, change.ratio, self.now)
        if host is not None and left is not None:
            self.later(left, lambda: self._end_step(host))

    def _flush(self, host: Host) -> None:
        """Flush the island, after the step in progress unless it stands still."""
        host.process.replica.flush()
        if not host.process.stepping or self.stepping.still(host.process.island):
            host.post(host.process.flush())
            self.links.carry(host)
            self._measure(host)

    def delivered(self, host: Host, effect: f.PublishFragment) -> None:
        """Note that a published version has arrived in the island's mailbox."""
        if host.process.replica.draining and not host.process.stepping:
            self.drain(host)  # it does not step, so it would never reach the boundary at which it adopts

    def drain(self, host: Host) -> None:
        """Drain the island after the step in progress, even if it stands still: it may be told to continue training."""
        host.process.replica.drain()
        if not host.process.stepping:
            host.post(host.process.hand_over())
            self.links.carry(host)


# ── placement ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _place(world: World, effect: f.PlaceIsland) -> None:
    """Create a process after a delay, or fail for lack of room, or take a standby's process."""
    if effect.standby is not None:
        _take_standby(world, effect, effect.standby)
        return
    tokens_per_step = world.tokens_per_step[effect.island]
    process = SimulatedIsland(
        effect.island,
        effect.incarnation,
        world.policy,
        tokens_per_step,
        world.plan.adoption,
        median_over=world.plan.median_over,
    )
    host = world.hosts[effect.island, effect.incarnation] = world.host_of(process)
    life = world.life(host)
    fails = world.chance(world.plan.placement_failure) or life.placement_fails

    def answer() -> None:
        if not host.alive:
            return
        if world.plan.absence_s is not None and world.chance(world.plan.absent):
            reason = f"{effect.node_group} has no node"
            world.answer(host, e.PlacementDelayed(world.now, effect.island, effect.incarnation, reason))
            world.later(world.draw(world.plan.absence_s), answer)
            return
        if fails:
            host.alive = False
            reason = f"{effect.node_group} has no room"
            world.answer(host, e.PlacementFailed(world.now, effect.island, effect.incarnation, reason))
            return
        host.placed = True
        pid = 1000 + len(world.hosts)
        world.answer(host, e.IslandPlaced(world.now, effect.island, effect.incarnation, effect.node_group, pid))
        world.links.make_ready(host)

    place_s = world.draw(world.plan.place_s) if life.place_s is None else life.place_s
    world.later(effect.wait_s + place_s, answer)


def _take_standby(world: World, effect: f.PlaceIsland, standby: tuple[IslandId, Incarnation]) -> None:
    """Rename a standby's process at once. It answers once it can be reached. The standby's unsent reports are lost."""
    host = world.hosts[effect.island, effect.incarnation] = world.hosts.pop(standby)
    host.process.island, host.process.incarnation = effect.island, effect.incarnation
    host.process.tokens_per_step = world.tokens_per_step[effect.island]
    host.outbox.clear()
    host.suspected = False
    alive = host.alive

    def answer() -> None:
        pid = 1000 + len(world.hosts)
        world.unless_over(e.IslandPlaced(world.now, effect.island, effect.incarnation, effect.node_group, pid))
        host.post([Ready(1, 0.0)])
        world.links.carry(host)

    def gone() -> None:
        reason = f"the standby {standby[0]} is gone"
        world.unless_over(e.PlacementFailed(world.now, effect.island, effect.incarnation, reason))

    takes = world.draw(world.plan.letter_s)
    world.later(takes, (lambda: world.reach(host, answer)) if alive else gone)


def _end(world: World, effect: f.KillIsland | f.StopIsland) -> None:
    """End a process once it can be reached. Only a killed process announces its end."""
    host = world.hosts.get((effect.island, effect.incarnation))
    if host is None:
        return
    if isinstance(effect, f.StopIsland):
        world.reach(host, lambda: world.die(host, effect.reason, announced=False))
    elif (takes := world.draw(world.plan.kill_s)) > 0.0:
        world.later(takes, lambda: world.reach(host, lambda: world.die(host, effect.reason, announced=True)))
    else:
        world.reach(host, lambda: world.die(host, effect.reason, announced=True))


class MergeWorld(Clock, Odds, Listener, Protocol):
    """The parts of the world that merging needs. ``held`` are the payloads whose bytes are present."""

    policy: JobPolicy
    core: Synchroniser
    held: set[PayloadId]


class MergeWorker:
    """Merges and evaluates. ``outer[p]`` is fragment p's version and the highest logical step in it."""

    def __init__(self, world: MergeWorld) -> None:
        self._world = world
        self._evaluating: int | None = None
        self._hurried = False
        self.outer = [(Version(0), 0)] * world.policy.fragment_count

    def merge(self, effect: f.MergeFragment) -> None:
        world = self._world
        self.check_held(effect)
        inputs = sorted((item.payload, item.weight) for item in effect.inputs)
        digest = blake2b(repr((effect.fragment, effect.version, inputs)).encode(), digest_size=8).hexdigest()
        took = world.draw(world.plan.merge_s)

        fails = world.chance(world.plan.merge_failure)

        def completed() -> None:
            if fails:
                merged = tuple(item.payload for item in effect.inputs)
                why = "a value is not finite"
                world.unless_over(e.MergeFailed(world.now, effect.fragment, effect.version, merged, why))
                return
            self.outer[effect.fragment] = (effect.version, effect.step)
            world.unless_over(e.MergeCompleted(world.now, effect.fragment, effect.version, digest, took))

        world.while_alive(took, completed)

    def check_held(self, effect: f.MergeFragment) -> None:
        """Raise InternalError unless all inputs of the merge are held."""
        missing = [item.payload for item in effect.inputs if item.payload not in self._world.held]
        if missing:
            raise InternalError(detail=f"Fragment {effect.fragment} is to merge {missing}, which are not held.")

    def evaluate(self, global_version: int) -> None:
        world = self._world
        self._evaluating = global_version
        alone = world.plan.evaluate_alone_s
        is_alone = alone is not None and world.core.state.phase is not JobPhase.RUNNING
        takes = world.draw(alone if alone is not None and is_alone else world.plan.evaluate_s)
        world.while_alive(takes, lambda: self._answer(global_version))

    def finish_evaluation_alone(self) -> None:
        """Speed up the running evaluation: the islands stop stepping and leave the machine to it."""
        alone = self._world.plan.evaluate_alone_s
        if self._hurried or alone is None or self._evaluating is None:
            return
        self._hurried, version = True, self._evaluating
        self._world.while_alive(self._world.draw(alone), lambda: self._answer(version))

    def _answer(self, global_version: int) -> None:
        if self._evaluating != global_version:
            return  # answered already
        self._evaluating = None
        count = self._world.policy.evaluation.sequences
        loss = held_out_loss(global_version)
        self._world.unless_over(e.EvaluationCompleted(self._world.now, global_version, loss, count))


def held_out_loss(global_version: int) -> float:
    """Return a made-up loss that falls from version to version."""
    return 1.4 + 4.0 / (1.0 + global_version / 40.0)
