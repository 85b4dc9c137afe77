"""A mortal world whose synchroniser's machine is lost with its disk: each next life goes on from what islands hold.

    python -m tests.swarm --lost-machines --first N --count N

Islands keep what was delivered to them and what came with a state from a peer, as live ones do. Some copies are damaged,
and those from a peer have no announcement, so that copies contradict each other. Some islands do not give what they hold.
The live decision chooses among their answers (``core.salvage``). The former synchroniser may only be cut off: what it said
last reaches islands once more, after they have heard of the next one. These sentences are checked by books of their own,
over all tapes of a job:

    no token is merged twice        in the versions that count, however often a machine was lost
    nothing newer was to be had     a newer version than the chosen one is damaged, disputed or in one hand unannounced
    its bits are those published    and versions after it are an undisturbed merge of their inputs
    it goes on if its Θ does        an island keeps its process if it gave what it said, and what it holds goes on
    what is lost is named           each newer version than the chosen one of which an island had heard
    tokens trained are counted once what the job had trained never falls, and is never more than its islands trained
    of two synchronisers           islands act on what the later one says, and on nothing that the former one still says
    tokens add up, invariants hold, the tape replays exactly, and the job ends
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any, cast

from orchestrator.accounting.goodput import Goodput
from orchestrator.accounting.statistics import Statistics
from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core import salvage
from orchestrator.core.messages import Announcement, HeldVersion, IslandHoldings, MergedWork
from orchestrator.core.saving import JobSalvaged
from orchestrator.core.vocabulary import Contribution, Epoch, FragmentId, Life, PayloadId, Version, offer_number
from orchestrator.host.job_files import open_files
from orchestrator.host.retry import Retrier, RetryingSink
from orchestrator.parameters.outer_state import FragmentState, OuterState
from orchestrator.parameters.shard import ParameterShard
from orchestrator.simulation.island import Host
from orchestrator.system.run_folder import TAPE
from orchestrator.tape.driver import Driver
from orchestrator.tape.replay import replay
from tests.swarm.checkers.durability import Theta
from tests.swarm.checkers.violation import require
from tests.swarm.configurations import draw
from tests.swarm.disk import SimulatedDisk
from tests.swarm.mortal_links import unread_reports_of
from tests.swarm.mortal_merge_worker import MortalMergeWorker, retry_until_written
from tests.swarm.mortal_world import FOLDER, MortalWorld, Records
from tests.swarm.mortality import Death, draw_mortality

UNTIL_S = 3600.0
DAMAGE_RATIO, DAMAGE_FROM_PEERS_RATIO, SILENCE_RATIO = 0.1, 0.2, 0.1
LATE_S = 30.0
"""So long after the next synchroniser has begun, something of the former one may still arrive."""


class Unchecked:
    """Stands for the checkers of one tape from a job's beginning, which do not apply here."""

    def apply(self, event: e.Event, effects: tuple[f.Effect, ...]) -> None:
        """Accept everything."""


@dataclass(frozen=True, slots=True)
class Published:
    """A version as it was sent to islands, or as it came from a peer, without an announcement."""

    state: FragmentState
    announcement: Announcement | None


class NotingLinks(MortalLinks):
    """Links that tell when an island took a state."""

    def __init__(self, world: LostMachinesWorld) -> None:
        super().__init__(world)
        self._noting = world

    def _load(self, host: Host, report: CaughtUp) -> None:
        takes = not (host.process.stepping or host.process.replica.flushing)
        super()._load(host, report)
        if takes:
            self._noting.took(host, report.versions)


class LostMachinesWorld(MortalWorld):
    """Every death takes the disk along. ``salvages`` counts the lives that went on from islands."""

    def __init__(self, seed: int, deaths: int) -> None:
        drawn = draw(seed)
        mortality = draw_mortality(seed, deaths, drawn.plan.calm_at)
        mortality = replace(mortality, refusals=(), merges_max=0)
        # rollbacks have books of their own, and a machine that is lost with its checkpoints cannot go back
        policy = replace(drawn.policy, standbys=())
        faults = replace(drawn.event_faults, echo=0.0)
        super().__init__(policy, drawn.plan, seed, faults, mortality, lambda: cast(Any, Unchecked()))
        self.links = NotingLinks(self)
        self._damage = Random(f"atoll swarm {seed} damage")
        self._delays = Random(f"atoll swarm {seed} late words")
        self._last_words: dict[int, Callable[[], None]] = {}
        self._heeded: dict[int, int] = {}
        """By host: the generation of the synchroniser of which it has heard."""
        self._sent: dict[tuple[int, FragmentId, Version], Published] = {}
        """By generation: one that lost a version makes another of its number."""
        self._sent_by: dict[int, tuple[f.PublishFragment, int]] = {}
        self._history = {(FragmentId(p), Version(0)): state for p, state in enumerate(self.durability.first)}
        """Θ as it went on: without the versions that were lost."""
        self._held: dict[int, dict[FragmentId, Published]] = {}
        self._contributions: dict[PayloadId, Contribution] = {}
        self._merged: dict[tuple[FragmentId, Version], list[Contribution]] = {}
        self._orders: dict[tuple[FragmentId, Version], f.MergeFragment] = {}
        self._tokens_known = 0
        self.salvages = 0

    # ── what islands hold, and what was merged ────────────────────────────────────────────────────────────────────

    def publish_fragment(self, effect: f.PublishFragment) -> None:
        assert self.merge_worker.shard is not None
        state = self.merge_worker.shard.state(effect.fragment)
        if state.version == effect.version:
            merged = tuple(
                MergedWork(i.id, i.incarnation, offer_number(i.current.merged_offer[effect.fragment]))
                for i in self.core.state.islands.values()
                if effect.fragment in i.current.merged_offer
            )
            step = self.core.state.rounds[effect.fragment].step
            announcement = Announcement(effect.fragment, effect.version, state.digest, step, merged)
            self._sent[self.generation, effect.fragment, effect.version] = Published(state, announcement)
            self._history[effect.fragment, effect.version] = state
        self._sent_by[id(effect)] = (effect, self.generation)
        super().publish_fragment(effect)

    def delivered(self, host: Host, effect: f.PublishFragment) -> None:
        _, generation = self._sent_by[id(effect)]
        self._now_holds(host, self._sent[generation, effect.fragment, effect.version])
        super().delivered(host, effect)

    def took(self, host: Host, versions: Sequence[Version]) -> None:
        """Note that the island took a state based on these versions. Nothing was announced with it."""
        for p, version in enumerate(versions):
            self._now_holds(host, Published(self._history[FragmentId(p), version], None))

    def _now_holds(self, host: Host, copy: Published) -> None:
        held, fragment = self._held.setdefault(id(host), {}), FragmentId(copy.state.fragment)
        newest = held.get(fragment)
        if newest is None or newest.state.version < copy.state.version:
            held[fragment] = copy

    def addressed(self, host: Host, call: Callable[[], None]) -> Callable[[], None]:
        mine = self.generation

        def heeded() -> None:
            latest = self._heeded.get(id(host), 0)
            require(mine >= latest, "of two synchronisers the later one counts", (host.process.island, mine, latest))
            call()

        deliver = self._last_words[id(host)] = super().addressed(host, heeded)
        return deliver

    def merge_fragment(self, effect: f.MergeFragment) -> None:
        self._orders[effect.fragment, effect.version] = effect
        super().merge_fragment(effect)

    def tell(self, event: e.Event) -> None:
        if self.alive and isinstance(event, e.ContributionArrived):
            self._contributions[event.contribution.payload] = event.contribution
        before = self._version_of(event)
        super().tell(event)
        if self.salvages and self.alive:
            self._check_tokens(event)
        if isinstance(event, e.MergeCompleted) and before is not None and event.version == before + 1:
            self._note_merge(event)

    def _version_of(self, event: e.Event) -> Version | None:
        is_merge = self.alive and isinstance(event, e.MergeCompleted)
        return self.core.state.rounds[event.fragment].version if is_merge else None  # type: ignore[union-attr]

    def _note_merge(self, event: e.MergeCompleted) -> None:
        order = self._orders[event.fragment, event.version]
        inputs = [self._contributions[item.payload] for item in order.inputs]
        for c in inputs:
            for (fragment, version), others in self._merged.items():
                for other in others if fragment == event.fragment and version < event.version else ():
                    same = (other.island, other.incarnation) == (c.island, c.incarnation)
                    starts = c.tokens_total - c.token_count
                    require(not same or other.tokens_total <= starts, "no token is merged twice", (c, other, version))
        self._merged[event.fragment, event.version] = inputs

    # ── the loss, and the next life ───────────────────────────────────────────────────────────────────────────────

    def _strike(self, death: Death) -> None:
        """Strike once islands hold Θ. Until then the job would begin anew, which tests/ray has."""
        if self._sent:
            super()._strike(replace(death, power=False, operation=0))

    def _die(self) -> None:
        super()._die()
        self.disk = SimulatedDisk(self._disk_faults)

    def _take_up(self) -> None:
        if self.disk.files(FOLDER).get(TAPE) or not self.generation > 1:
            super()._take_up()
            return
        self.salvages += 1
        hosts = {
            (host.process.island, host.process.incarnation): host
            for host in self.hosts.values()
            if host.alive and not host.silent(self.now) and host.placed
        }
        epoch = salvage.next_epoch([self.epoch, *(unread_reports_of(h).newest_epoch for h in hosts.values())])
        answers = [self._answer(life, host) for life, host in sorted(hosts.items()) if self._trains(host)]
        answers = list(salvage.latest(answers, salvage.last_incarnations(self.hosts)))
        choice = salvage.choose(answers, self.policy.fragment_count)
        self._check_choice(answers, choice)
        if len(choice.chosen) < self.policy.fragment_count:
            self.alive, self.ended = False, "no island could vouch for a fragment"
            return
        for host in hosts.values():
            if unread_reports_of(host).reports.check_epoch(epoch):
                unread = unread_reports_of(host)
                unread.extend(unread.reports.missing(host.process.standing_offers()))
            self._heeded[id(host)] = self.generation
        for word in self._last_words.values():
            self.later(self._delays.uniform(0.0, LATE_S), word)
        self._last_words.clear()
        self._go_on_from(epoch, answers, choice)

    def _trains(self, host: Host) -> bool:
        replica = host.process.replica
        return replica.started and not replica.drained and not host.process.diverged and not host.process.exploded

    def _answer(self, life: Life, host: Host) -> IslandHoldings:
        position, held = host.process.replica.position, []
        for fragment, published in sorted(self._held.get(id(host), {}).items()):
            damaged = self._damage.random() < DAMAGE_RATIO
            digest = f"damage {life} {fragment}" if damaged else published.state.digest
            held.append(HeldVersion(fragment, published.state.version, digest, published.announcement))
        return IslandHoldings(
            *life,
            tuple(held),
            position.versions,
            position.step,
            position.steps_total,
            position.tokens_total,
            0.0,
            position.token_counts,
            host.process.replica.anchor.tokens,
        )

    def _check_choice(self, answers: list[IslandHoldings], choice: salvage.Choice) -> None:
        """Hold the choice against the bytes themselves: the newest sound ones go on."""
        chosen = {one.fragment: one for one in choice.chosen}
        for p in map(FragmentId, range(self.policy.fragment_count)):
            sound = [
                held.version
                for answer in answers
                for held in answer.held
                if held.fragment == p and held.digest == self._sent[p, held.version].state.digest
            ]
            if sound:
                require(p in chosen and chosen[p].version == max(sound), "nothing newer was to be had", (p, sound))
                state = self._sent[p, chosen[p].version].state
                require(chosen[p].digest == state.digest, "its bits are those published", (p, state.version))

    def _go_on_from(self, epoch: Epoch, answers: list[IslandHoldings], choice: salvage.Choice) -> None:
        surviving = salvage.survivors(answers, choice)
        outer_step = self.durability.outer_step
        blank = OuterState.restored(dict(enumerate(self.durability.first)), outer_step)  # type: ignore[arg-type]
        states = {
            one.fragment: replace(
                self._sent[one.fragment, one.version].state, momentum=blank.state(one.fragment).momentum, residue={}
            )
            for one in choice.chosen
        }
        for key in [key for key in self._merged if key[1] > states[key[0]].version]:
            del self._merged[key]
        self.durability.forget_after({p: state.version for p, state in states.items()})
        self.durability.first = tuple(states[p] for p in sorted(states))
        self.sink, theta = Records(), Theta(self.durability)
        self.goodput, self.statistics = Goodput(self.policy), Statistics(self.policy)
        folds = (self.sink, theta, self.goodput, self.statistics)
        files = self._files = open_files(FOLDER, "job", self._spec, self.policy, 0.0, folds, self.disk)
        self.epoch, self.core = epoch, files.core
        self._driver = Driver(
            files.core, folds, RetryingSink(files.tape, Retrier(retry_s=0.0), files.journal.settle), 0
        )
        self.held = set()
        self.merge_worker = MortalMergeWorker(self)
        own = sum(one.tokens_total for one in surviving)
        event = JobSalvaged(
            self.now,
            f"epoch {epoch - 1}",
            epoch,
            tuple(one.version for one in choice.chosen),
            tuple(one.step for one in choice.chosen),
            tuple(one.digest for one in choice.chosen),
            choice.lost,
            "zeros",
            max([own, *(answer.job_tokens for answer in answers)]),
            surviving,
            tuple(salvage.last_incarnations(self.hosts).items()),
            0,
            tuple(sorted(choice.doubted)),
        )
        going_on = {(one.island, one.incarnation) for one in surviving}
        for life, host in self.hosts.items():
            if host.alive and life not in going_on:
                self.while_alive(self.draw(self.plan.detect_s), partial(self.die, host, "a stray", announced=False))
        self.tell(event)
        self.tell(e.JobStarted(self.now))
        shard = ParameterShard(files.journal, epoch, retry_until_written, lambda: self.now)
        steps = {one.fragment: one.step for one in choice.chosen}
        shard.seed(OuterState.restored(states, outer_step), steps)
        self.merge_worker.shard = shard
        self.merge_worker.outer = [(states[p].version, steps[p]) for p in sorted(states)]
        for p, state in states.items():
            self.merge_worker.versions[p, state.version] = (state, steps[p])
        seeded = e.OuterStateSeeded(self.now, 1000, "0" * 32)
        self.while_alive(self.plan.seed_s, lambda: self.tell(replace(seeded, at=self.now)))
        unheard, self._unheard = self._unheard, []
        for command in unheard:
            self.tell(replace(command, at=self.now))
        self.while_alive(0.5, self._sync)


def run(seed: int, deaths: int = 3) -> LostMachinesWorld:
    """Run one seed to its end. Raises Violation, or whatever breaks."""
    world = LostMachinesWorld(seed, deaths)
    world.run(until=UNTIL_S)
    if not world.ended:
        world.goodput.check()
        again = replay(world.tape)
        require(again.exact, "a tape replays exactly", again.divergence)
    return world
