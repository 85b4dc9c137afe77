"""A world whose synchroniser dies and recovers from its files: real tape, journal and recovery code, on a simulated disk.

The process takes with it the held payloads, merges and evaluations in progress, timers, and everything on its way to it.
Calls on their way to islands arrive unless an island has heard of a newer epoch. Islands keep their reports until these
are acknowledged. The next life starts like ``runtime.synchroniser_actor`` and ``runtime.restart``: files, timers, links,
first events, orphans. ``checkers`` say what must hold, and ``mortality`` when to die.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

from orchestrator.accounting.goodput import Goodput
from orchestrator.accounting.statistics import Statistics
from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.island_record import PLACED, WITH_PROCESS
from orchestrator.core.saving import HandOver
from orchestrator.core.vocabulary import FragmentId, IslandState, JobPhase, JobPolicy, ReleaseReason
from orchestrator.errors import DataError, Fenced
from orchestrator.host.job_files import JobFiles, open_files
from orchestrator.host.retry import Retrier, RetryingSink
from orchestrator.parameters.journal import Journal
from orchestrator.parameters.outer_state import OuterStep
from orchestrator.simulation.island import Host, SimulatedIsland
from orchestrator.simulation.plan import WorldPlan
from orchestrator.system.disk import Disk
from orchestrator.system.run_folder import TAPE
from orchestrator.tape.driver import Driver, Fold, MemorySink
from orchestrator.tape.schema import Record, Tape
from orchestrator.tape.storage import read_tape
from tests.swarm.checkers import Checkers
from tests.swarm.checkers.durability import DurabilityChecker, Theta
from tests.swarm.checkers.violation import require
from tests.swarm.disk import Died, DiskFault, SimulatedDisk
from tests.swarm.mortal_links import MortalLinks, UnreadReports, unread_reports_of
from tests.swarm.mortal_merge_worker import (
    MortalMergeWorker,
    displacement_of,
    first_outer_state,
    job_spec,
    retry_until_written,
)
from tests.swarm.mortality import Death, DiskFaults, Mortality, Refusal
from tests.swarm.rough_world import EventFaults, RoughWorld

FOLDER = Path("/job")
SYNC_EVERY_S = 0.5
HANDED_OVER_S = 0.2


class Records(MemorySink):
    """A fold that keeps the records of the tape."""

    def apply(self, event: e.Event, effects: tuple[f.Effect, ...]) -> None:
        self.append(Record(len(self.records) + 1, event, effects))


class MortalWorld(RoughWorld):
    """A world with mortal synchronisers. ``generation`` counts them from 1; ``ended`` says why none can continue, if that
    is allowed.
    """

    links: MortalLinks
    merge_worker: MortalMergeWorker

    def __init__(
        self,
        policy: JobPolicy,
        plan: WorldPlan,
        seed: int,
        event_faults: EventFaults,
        mortality: Mortality,
        checkers: Callable[[], Checkers],
    ) -> None:
        super().__init__(policy, plan, seed, event_faults)
        self.alive, self.generation, self.ended = False, 0, ""
        self._has_files = False
        self._disk_faults = DiskFaults()
        self.disk = SimulatedDisk(self._disk_faults)
        self._spec, self._checkers_of = job_spec(mortality.merges_max, policy.staleness_max, seed), checkers
        self.up_codec = self._spec.synchroniser.wire.up
        self._merges_max, self._power_was_lost = mortality.merges_max, False
        self._power = Random(f"atoll swarm {seed} power")
        self._unheard: list[e.CommandRequested] = []
        self._placing_generations: dict[int, int] = {}
        self.links, self.merge_worker = MortalLinks(self), self.make_merge_worker()
        outer_step = OuterStep.of(self._spec.synchroniser)
        first = first_outer_state(policy.fragment_count, outer_step)
        fragments = [first.state(FragmentId(p)) for p in range(policy.fragment_count)]
        self.durability = DurabilityChecker(fragments, outer_step, partial(displacement_of, codec_name=self.up_codec))
        for death in mortality.deaths:
            self.later(death.at, partial(self._strike, death))
        for refusal in mortality.refusals:
            self.later(refusal.at, partial(self._refuse, refusal))

    def _refuse(self, refusal: Refusal) -> None:
        self._disk_faults.refuse(refusal)

    # ── what the process does ─────────────────────────────────────────────────────────────────────────────────────

    @property
    def count(self) -> int:
        return self._driver.count

    @property
    def tape(self) -> Tape:
        """The tape in the file. What a power loss left of an ``ended`` job need not be readable."""
        return super().tape if self.ended else read_tape(FOLDER / TAPE, self.disk)

    def ours(self, thunk: Callable[[], None]) -> Callable[[], None]:
        """Return a ``thunk`` that does nothing once this life of the synchroniser has ended. The life may end in it."""
        mine = self.generation

        def here() -> None:
            if self.alive and self.generation == mine and self.finished is None:
                self._mortally(thunk)

        return here

    def while_alive(self, seconds: float, thunk: Callable[[], None]) -> None:
        self.later(seconds, self.ours(thunk))

    def tell(self, event: e.Event) -> None:
        if self.finished is not None:
            return  # the process has let everything go
        if self.alive:
            if isinstance(event, e.ContributionArrived) and event.displacement is not None:
                self.merge_worker.receive(event.contribution)
            self._mortally(lambda: super(MortalWorld, self).tell(event))
        elif isinstance(event, e.CommandRequested):
            self._unheard.append(event)  # who asked for it asks again

    def addressed(self, host: Host, call: Callable[[], None]) -> Callable[[], None]:
        epoch, unread = self.epoch, unread_reports_of(host)

        def deliver() -> None:
            if not host.alive:
                return
            newest = unread.newest_epoch
            try:
                replaced = unread.reports.check_epoch(epoch)
            except Fenced:
                return
            require(epoch >= newest, "no message of an older epoch is acted on", (host.process.island, epoch, newest))
            unread.newest_epoch = epoch
            if replaced:
                unread.extend(unread.reports.missing(host.process.standing_offers()))
            call()

        return deliver

    def host_of(self, process: SimulatedIsland) -> Host:
        host = super().host_of(process)
        host.outbox = UnreadReports()  # type: ignore[assignment]
        self._placing_generations[id(host)] = self.generation
        return host

    def answer(self, host: Host, event: e.Event) -> None:
        """Answer as the controller, which lives elsewhere, to the synchroniser that asked, if that still lives."""
        if not self.alive or self._placing_generations[id(host)] != self.generation or self.finished is not None:
            return
        self.tell(replace(event, at=self.now))
        if isinstance(event, e.IslandPlaced) and self.alive:
            self.links.connect(host, lost=False)

    def _mortally(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Died:
            self._die()

    def place_island(self, effect: f.PlaceIsland) -> None:
        if (effect.island, effect.incarnation) in self.hosts:
            self._place_again(effect)
        else:
            super().place_island(effect)

    def release_payload(self, effect: f.ReleasePayload) -> None:
        if effect.reason is ReleaseReason.LOST:
            self.held.discard(effect.payload)
        else:
            super().release_payload(effect)
            self.merge_worker.release(effect.payload)

    def publish_fragment(self, effect: f.PublishFragment) -> None:
        assert self.merge_worker.shard is not None
        state = self.merge_worker.shard.state(effect.fragment)
        if state.version == effect.version and effect.recipients:
            self.durability.published(effect.fragment, state)
        super().publish_fragment(effect)

    def _place_again(self, effect: f.PlaceIsland) -> None:
        """Create one process of an incarnation, and repeat the same answer on a repeated request."""
        host = self.hosts[effect.island, effect.incarnation]
        self._placing_generations[id(host)] = self.generation
        if host.placed:
            placed = e.IslandPlaced(self.now, effect.island, effect.incarnation, effect.node_group, 1)
            self.while_alive(self.draw(self.plan.place_s), lambda: self.answer(host, placed))
        elif not host.alive:
            failed = e.PlacementFailed(self.now, effect.island, effect.incarnation, "no room, or ended")
            self.while_alive(self.draw(self.plan.place_s), lambda: self.answer(host, failed))

    def hand_over(self, effect: HandOver) -> None:
        """End the process once all that it decided is durable. The next one decides as it did, as another release must."""
        retry_until_written("the tape cannot be written", self._files.tape.sync)
        self._disk_faults.arm(Death(self.now, False, 0, DiskFault.BEFORE, HANDED_OVER_S))
        raise Died

    def finish_job(self, effect: f.FinishJob) -> None:
        """Finish the job. A synchroniser that dies here repeats it in its next life."""
        retry_until_written("the tape cannot be written", self._files.tape.close)
        self._files.journal.clear()
        self.finished = effect
        for host in self.hosts.values():
            self.die(host, "the job is over", announced=False)

    # ── death, and the next life ──────────────────────────────────────────────────────────────────────────────────

    def _strike(self, death: Death) -> None:
        if self.alive and self.finished is None and self._disk_faults.arm(death):
            self._die()

    def _die(self) -> None:
        death, self.alive = self._disk_faults.take_death(), False
        if self._has_files:
            self._files.tape.let_go()
        if death.power:
            self._power_was_lost = True
            self.disk.lose_power(self._power)
        self.disk.lose_process()
        self.held.clear()
        for host in self.hosts.values():
            host.carrying = False
            unread_reports_of(host).hang_up()
        self.later(death.away_s, self._live)

    def _start_job(self) -> None:
        self.later(0.0, self._live)

    def _live(self) -> None:
        self.generation, self.alive, self._has_files = self.generation + 1, True, False
        self._mortally(self._take_up)

    def _take_up(self) -> None:
        self.sink, self.checkers, theta = Records(), self._checkers_of(), Theta(self.durability)
        self.theta = theta
        self.goodput, self.statistics = Goodput(self.policy), Statistics(self.policy)
        folds = (self.sink, self.checkers, theta, self.goodput, self.statistics)
        try:
            files = self._files = self._opened(folds)
        except DataError as error:
            self._give_up(error)
            return
        self._has_files = True
        self.epoch, past = files.epoch, files.past
        self.core = files.core
        sink = RetryingSink(files.tape, Retrier(retry_s=0.0), files.journal.settle)
        self._driver = Driver(files.core, folds, sink, past.count if past is not None else 0)
        if files.core.state.phase is JobPhase.FINISHED:
            self.finish_job(
                next(x for r in reversed(self.sink.records) for x in r.effects if isinstance(x, f.FinishJob))
            )
            return
        self.held = {c.payload for r in files.core.state.rounds for c in r.offered.values()}
        self.merge_worker = self.make_merge_worker()
        if files.outer is not None:
            self.durability.recovered(files.outer)
            self.merge_worker.recover(files.outer, files.merges, files.journal)
        self._reconnect(files)
        for make in files.first_events:
            self.tell(make(self.now))
        if not self.alive:
            return
        if files.outer is not None:
            theta.compare(files.outer)
        else:
            outer = first_outer_state(self.policy.fragment_count, OuterStep.of(self._spec.synchroniser))
            self.while_alive(self.plan.seed_s, lambda: self.merge_worker.seed(outer, files.journal))
        if not files.started:
            self.tell(e.JobStarted(self.now))
        unheard, self._unheard = self._unheard, []
        for command in unheard:
            self.tell(replace(command, at=self.now))
        self.while_alive(SYNC_EVERY_S, self._sync)

    def make_merge_worker(self) -> MortalMergeWorker:
        return MortalMergeWorker(self)

    def _opened(self, folds: tuple[Fold, ...], disk: Disk | None = None) -> JobFiles:
        return open_files(FOLDER, "job", self._spec, self.policy, 0.0, folds, disk or self.disk)

    def _reconnect(self, files: JobFiles) -> None:
        """Keep the pending deadlines, listen to all living processes, and end those that are over."""
        for timer in files.past.pending.timers if files.past is not None else ():
            self.while_alive(max(0.0, timer.due_at - self.now), partial(self._tell_timer, timer))
        islands = files.core.state.islands
        for (name, incarnation), host in self.hosts.items():
            now = islands[name]
            is_current = incarnation == now.incarnation
            if is_current and now.state in PLACED:
                self.links.connect(host, lost=now.state is IslandState.SUSPECT)
            elif not (is_current and now.state in WITH_PROCESS) and incarnation <= now.incarnation:
                self.while_alive(self.draw(self.plan.detect_s), partial(self.die, host, "a stray", announced=False))

    def _give_up(self, error: DataError) -> None:
        """End the job because its files cannot be recovered, which is only allowed after a power loss with async
        durability.
        """
        may = bool(self._merges_max) and self._power_was_lost
        require(may, "a synchroniser goes on from its files", error)
        newest_journalled = Journal(FOLDER / "journal", disk=self.disk).newest
        self.durability.gave_up(newest_journalled, self._merges_max)
        self.end(str(error))

    def end(self, reason: str) -> None:
        """End the world with a job that no synchroniser can continue. Its islands would step until the last instant."""
        self.alive, self.ended = False, reason
        self._heap.clear()

    def _sync(self) -> None:
        """Make the tape durable from time to time, and let islands forget durable reports."""
        tape = self._files.tape
        if self.finished is not None:
            return
        if not self._merges_max and tape.synced_count < tape.count:
            retry_until_written("the tape cannot be written", tape.sync)
        durable_count = tape.count if self._merges_max else tape.synced_count
        for host in self.hosts.values():
            if host.alive and not host.silent(self.now) and unread_reports_of(host).connected:
                unread_reports_of(host).acknowledge(durable_count, carrying=host.carrying)
        self.while_alive(SYNC_EVERY_S, self._sync)
