"""The simulated world: a seeded heap of things to come, and the same core, driver and folds as a live job.

    world = World(policy, plan, seed);  world.run();  world.tape, world.goodput, world.statistics

Responsible for: what a shell would do with each effect, and for checkers that stand outside the system (a payload that is
merged must be held; what the core and the folds call an invariant holds after every event). Everything follows from
policy, plan and seed. Refuses to know: clocks, Ray, arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from heapq import heappop, heappush
from random import Random

from orchestrator.accounting.goodput import Goodput
from orchestrator.accounting.statistics import Statistics
from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core import invariants
from orchestrator.core.synchroniser import Synchroniser
from orchestrator.core.vocabulary import (
    FragmentId,
    Incarnation,
    Instant,
    IslandId,
    JobPolicy,
    PayloadId,
    ReleaseReason,
    Version,
)
from orchestrator.errors import InternalError
from orchestrator.simulation.faults import strike
from orchestrator.simulation.host import Host
from orchestrator.simulation.island import SimulatedIsland
from orchestrator.simulation.links import Links
from orchestrator.simulation.plan import Range, WorldPlan
from orchestrator.tape.driver import Driver, MemorySink
from orchestrator.tape.schema import Header, Tape

EVENTS_MAX = 2_000_000
"""No simulated job of ours is longer; a world that does not end is a bug, and says so."""


class World:
    """One job in a simulated world."""

    def __init__(self, policy: JobPolicy, plan: WorldPlan, seed: int, *, checked: bool = True) -> None:
        self.policy, self.plan, self.seed = policy, plan, seed
        self.random = Random(seed)
        self.now: Instant = 0.0
        self.core = Synchroniser(policy)
        self.goodput, self.statistics = Goodput(policy), Statistics(policy)
        self.sink = MemorySink()
        self.hosts: dict[tuple[IslandId, Incarnation], Host] = {}
        self.held: set[PayloadId] = set()
        self.finished: f.FinishJob | None = None
        self.links = Links(self)
        self._driver = Driver(self.core, (self.goodput, self.statistics), self.sink)
        self._step_s = {island.island: s for island, s in zip(policy.islands, plan.step_s, strict=True)}
        self._outer = [(Version(0), 0)] * policy.fragment_count
        self._merged: dict[tuple[FragmentId, Version], str] = {}
        self._heap: list[tuple[Instant, int, Callable[[], None]]] = []
        self._count = 0
        self._checked = checked

    # ── running ───────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, until: Instant = float("inf")) -> World:
        """Let everything happen, up to ``until`` or until nothing is left to happen."""
        self.later(0.0, lambda: self.tell(e.JobStarted(self.now)))
        seeded = e.OuterStateSeeded(0.1, 1000, "0" * 32)
        self.later(0.1, lambda: self.tell(seeded))
        for fault in self.plan.faults:
            self.later(fault.at, lambda fault=fault: strike(self, fault))
        return self.resume(until)

    def resume(self, until: Instant = float("inf")) -> World:
        """Go on with a world that was run up to some instant before."""
        while self._heap and self._heap[0][0] <= until:
            self.now, _, thunk = heappop(self._heap)
            thunk()
        return self

    @property
    def tape(self) -> Tape:
        return self.sink.tape(Header(f"simulated-{self.seed}", self.policy))

    def later(self, seconds: float, thunk: Callable[[], None]) -> None:
        """Ask for ``thunk`` to happen ``seconds`` from now; what is asked first happens first at the same instant."""
        self._count += 1
        if self._count > EVENTS_MAX:
            raise InternalError(detail=f"The simulated job (seed {self.seed}) does not end.")
        heappush(self._heap, (self.now + seconds, self._count, thunk))

    def draw(self, latency: Range) -> float:
        return self.random.uniform(*latency)

    def chance(self, probability: float) -> bool:
        """Whether a random fault strikes here; none does once the plan is calm."""
        return probability > 0.0 and self.now < self.plan.calm_at and self.random.random() < probability

    def tell(self, event: e.Event) -> None:
        """The core hears of an event, and what it asks for is begun."""
        if isinstance(event, e.ContributionArrived):
            self.held.add(event.contribution.payload)
        effects = self._driver.step(event)
        for effect in effects:
            self._act(effect)
        if self._checked:
            invariants.check(self.core.state)
            self.goodput.check()

    # ── acting ────────────────────────────────────────────────────────────────────────────────────────────────

    def _act(self, effect: f.Effect) -> None:
        match effect:
            case f.SetTimer():
                due_in = max(0.0, effect.due_at - self.now)
                self.later(due_in, lambda: self._tell_timer(effect))
            case f.MergeFragment():
                self._merge(effect)
            case f.PublishFragment():
                for recipient in effect.recipients:
                    host = self.hosts.get((recipient.island, recipient.incarnation))
                    if host is not None and not self.chance(self.plan.publication_loss):
                        self._publish(host, effect, recipient.merged_offer)
            case f.ReleasePayload():
                if effect.payload not in self.held and effect.reason is not ReleaseReason.REFUSED:
                    raise InternalError(detail=f"Payload {effect.payload} was released, but is not held.")
                self.held.discard(effect.payload)
            case f.PlaceIsland():
                self._place(effect)
            case f.BeginCatchUp():
                self.links.catch_up(effect, self._outer)
            case f.StartTraining():
                host = self.hosts[effect.island, effect.incarnation]
                self._reach(host, lambda: self._start(host))
            case f.FlushIsland():
                host = self.hosts[effect.island, effect.incarnation]
                self._reach(host, lambda: self._flush(host))
            case f.KillIsland() | f.StopIsland():
                self._end(effect)
            case f.Evaluate():
                loss = 1.4 + 4.0 / (1.0 + effect.global_version / 40.0)
                answer_in = self.draw(self.plan.evaluate_s)
                version = effect.global_version
                self.later(answer_in, lambda: self._unless_over(e.EvaluationCompleted(self.now, version, loss)))
            case f.FinishJob():
                self.finished = effect

    def _tell_timer(self, effect: f.SetTimer) -> None:
        self._unless_over(e.TimerFired(self.now, effect.timer, effect.serial))

    def _unless_over(self, event: e.Event) -> None:
        if self.finished is None:
            self.tell(event)

    def _merge(self, effect: f.MergeFragment) -> None:
        missing = [item.payload for item in effect.inputs if item.payload not in self.held]
        if missing:
            raise InternalError(detail=f"Fragment {effect.fragment} is to merge {missing}, which are not held.")
        inputs = sorted((item.payload, item.weight) for item in effect.inputs)
        digest = blake2b(repr((effect.fragment, effect.version, inputs)).encode(), digest_size=8).hexdigest()
        took = self.draw(self.plan.merge_s)

        def completed() -> None:
            self._outer[effect.fragment] = (effect.version, effect.step)
            self._unless_over(e.MergeCompleted(self.now, effect.fragment, effect.version, digest, took))

        self.later(took, completed)

    def _publish(self, host: Host, effect: f.PublishFragment, merged_offer: int) -> None:
        def deliver() -> None:
            host.process.deliver(effect.fragment, effect.version, effect.step, merged_offer)

        self.later(self.draw(self.plan.delivery_s), lambda: self._reach(host, deliver))

    def _reach(self, host: Host, call: Callable[[], None]) -> None:
        """Call into the process, now or once it can be reached; never if it is dead."""
        if host.silent(self.now):
            host.waiting.append(call)
        elif host.alive:
            call()

    def _place(self, effect: f.PlaceIsland) -> None:
        process = SimulatedIsland(
            effect.island, effect.incarnation, self.policy, self.plan.tokens_per_step, self.plan.adoption
        )
        host = self.hosts[effect.island, effect.incarnation] = Host(process)
        fails = self.chance(self.plan.placement_failure)

        def answer() -> None:
            if not host.alive:
                return
            if fails:
                host.alive = False
                reason = f"{effect.node_group} has no room"
                self._unless_over(e.PlacementFailed(self.now, effect.island, effect.incarnation, reason))
                return
            host.placed = True
            pid = 1000 + len(self.hosts)
            self._unless_over(e.IslandPlaced(self.now, effect.island, effect.incarnation, effect.node_group, pid))
            self.links.make_ready(host)

        self.later(self.draw(self.plan.place_s), answer)

    def _end(self, effect: f.KillIsland | f.StopIsland) -> None:
        host = self.hosts.get((effect.island, effect.incarnation))
        if host is None:
            return
        said = isinstance(effect, f.KillIsland)
        self._reach(host, lambda: self.die(host, effect.reason, said=said))

    def die(self, host: Host, reason: str, *, said: bool) -> None:
        """The process is gone at once; if anybody listens, its connection breaks a moment later."""
        if not host.alive:
            return
        host.alive = host.process.stepping = False
        host.outbox.clear()
        lost = e.ConnectionLost(0.0, host.process.island, host.process.incarnation, True, reason)
        if said:
            self.links.say(lost, self.draw(self.plan.detect_s))

    # ── stepping ──────────────────────────────────────────────────────────────────────────────────────────────

    def _start(self, host: Host) -> None:
        if host.process.stepping:
            return  # asked twice
        host.process.stepping = True
        host.last_step_end = host.reported_at = self.now
        self._begin_step(host)

    def _begin_step(self, host: Host) -> None:
        usual = self._step_s[host.process.island]
        seconds = usual * (1.0 + self.plan.step_jitter_ratio * self.random.uniform(-1.0, 1.0))
        self.later(seconds, lambda: self._end_step(host, seconds))

    def _end_step(self, host: Host, seconds: float) -> None:
        if not (host.alive and host.process.stepping):
            return
        if self.now < host.frozen_until:
            self.later(host.frozen_until - self.now, lambda: self._end_step(host, seconds))
            return
        letters = host.process.end_step(seconds, self.now - host.last_step_end)
        host.last_step_end = self.now
        if not letters and self.now - host.reported_at >= self.plan.report_every_s:
            letters = [host.process.progress()]
        if letters:
            host.reported_at = self.now
            host.post(letters)
            self.links.carry(host)
        if host.process.stepping:
            self._begin_step(host)

    def _flush(self, host: Host) -> None:
        """A step in progress is finished first."""
        host.process.flushing = True
        if not host.process.stepping:
            host.post(host.process.flush())
            self.links.carry(host)
