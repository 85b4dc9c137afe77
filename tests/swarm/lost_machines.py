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
    it goes on if its Θ does        an island that trains keeps its process if it gave what it said and that goes on
    what is lost is named           each newer version than the chosen one of which an island had heard
    tokens trained are counted once what the job had trained never falls, and never exceeds what its islands trained
    of two synchronisers           islands act on what the later one says, and on nothing that the former one still says
    tokens add up, invariants hold, the tape replays exactly, and the job ends
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any, cast

from orchestrator.accounting.goodput import Goodput
from orchestrator.accounting.statistics import Statistics
from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core import salvage
from orchestrator.core.messages import Announcement, CaughtUp, HeldVersion, IslandHoldings, MergedWork
from orchestrator.core.saving import JobSalvaged, SurvivingIsland
from orchestrator.core.vocabulary import (
    Contribution,
    Epoch,
    FragmentId,
    IslandId,
    IslandState,
    Life,
    PayloadId,
    Version,
    offer_number,
)
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
from tests.swarm.mortal_links import MortalLinks, unread_reports_of
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

    fragment: FragmentId
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
        self._sent: dict[int, tuple[f.PublishFragment, Published]] = {}
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
        fragment, version = effect.fragment, effect.version
        state = self.merge_worker.shard.state(fragment)
        if state.version == version:
            self._history[fragment, version] = state
        state = self._history[fragment, version]
        merged = tuple(
            MergedWork(i.id, i.incarnation, offer_number(i.current.merged_offer[fragment]))
            for i in self.core.state.islands.values()
            if fragment in i.current.merged_offer
        )
        announcement = Announcement(fragment, version, state.digest, self.core.state.rounds[fragment].step, merged)
        self._sent[id(effect)] = (effect, Published(fragment, state, announcement))
        super().publish_fragment(effect)

    def delivered(self, host: Host, effect: f.PublishFragment) -> None:
        self._now_holds(host, self._sent[id(effect)][1])
        super().delivered(host, effect)

    def took(self, host: Host, versions: Sequence[Version]) -> None:
        """Note that the island took a state based on these versions. Nothing was announced with it."""
        for p, version in enumerate(versions):
            self._now_holds(host, Published(FragmentId(p), self._history[FragmentId(p), version], None))

    def _now_holds(self, host: Host, copy: Published) -> None:
        held = self._held.setdefault(id(host), {})
        newest = held.get(copy.fragment)
        if newest is None or newest.state.version < copy.state.version:
            held[copy.fragment] = copy

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
        answers = [self._answer(life, host) for life, host in sorted(hosts.items()) if self._vouches(host)]
        answers = list(salvage.latest(answers, salvage.last_incarnations(self.hosts)))
        silent = {answer.island for answer in answers if self._damage.random() < SILENCE_RATIO}
        refused: set[IslandId] = set()
        pulled: dict[FragmentId, FragmentState] = {}

        def pull(one: salvage.ChosenVersion, island: IslandId) -> str:
            if island in silent:
                refused.add(island)
                return "it is silent"
            life = next(answer.life for answer in answers if answer.island == island)
            copy = self._held[id(hosts[life])][one.fragment]
            require(copy.state.version == one.version, "a version is asked of those that hold it", one)
            pulled[one.fragment] = copy.state
            return ""

        choice = salvage.settled(answers, self.policy.fragment_count, pull)
        giving = [answer for answer in answers if answer.island not in refused]
        self._check_choice(answers, giving, choice, pulled)
        if len(choice.chosen) < self.policy.fragment_count:
            self.end("no island could vouch for a fragment")
            return
        for host in hosts.values():
            if unread_reports_of(host).reports.check_epoch(epoch):
                unread = unread_reports_of(host)
                unread.extend(unread.reports.missing(host.process.standing_offers()))
            self._heeded[id(host)] = self.generation
        for word in self._last_words.values():
            self.later(self._delays.uniform(0.0, LATE_S), word)
        self._last_words.clear()
        surviving = salvage.survivors(answers, choice)
        fit = sorted(answer.island for answer in giving if self._is_fit(answer, choice))
        going_on = sorted(one.island for one in surviving)
        require(going_on == fit, "it goes on if its Θ does", (going_on, fit, choice.doubted))
        self._go_on_from(epoch, answers, choice, surviving, pulled)

    def _vouches(self, host: Host) -> bool:
        return host.process.replica.started and not host.process.diverged and not host.process.exploded

    def _answer(self, life: Life, host: Host) -> IslandHoldings:
        position, held = host.process.replica.position, []
        for fragment, published in sorted(self._held.get(id(host), {}).items()):
            from_peer = published.announcement is None
            damaged = self._damage.random() < (DAMAGE_FROM_PEERS_RATIO if from_peer else DAMAGE_RATIO)
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
            trains=not host.process.replica.drained,
        )

    def _check_choice(
        self,
        answers: list[IslandHoldings],
        giving: list[IslandHoldings],
        choice: salvage.Choice,
        pulled: Mapping[FragmentId, FragmentState],
    ) -> None:
        """Hold the choice against the bytes themselves, and against every newer copy of those that give theirs."""
        chosen = {one.fragment: one for one in choice.chosen}
        for p in map(FragmentId, range(self.policy.fragment_count)):
            best = chosen[p].version if p in chosen else -1
            if p in chosen:
                state = pulled[p]
                same = (chosen[p].version, chosen[p].digest) == (state.version, state.digest)
                require(same, "its bits are those published", (chosen[p], state.version, state.digest))
            newer = [held for answer in giving for held in answer.held if held.fragment == p and held.version > best]
            for version in {held.version for held in newer}:
                copies = [held for held in newer if held.version == version and _is_as_announced(held)]
                require(not _is_confirmed(copies), "nothing newer was to be had", (p, best, version, copies))
            named = {one.version for one in choice.lost if one.fragment == p}
            held_versions = {h.version for a in answers for h in a.held if h.fragment == p and h.version > best}
            require(named == held_versions, "what is lost is named", (p, named, held_versions))

    def _is_fit(self, answer: IslandHoldings, choice: salvage.Choice) -> bool:
        """Return whether all that the island holds and builds on is Θ as it goes on, or was before."""
        chosen = {one.fragment: one for one in choice.chosen}
        same = all(
            _is_as_announced(held)
            and held.version <= chosen[held.fragment].version
            and (held.version < chosen[held.fragment].version or held.digest == chosen[held.fragment].digest)
            for held in answer.held
        )
        return answer.trains and same and all(answer.versions[p] <= one.version for p, one in chosen.items())

    def _check_tokens(self, event: e.Event) -> None:
        trained = self.core.state.tokens_trained
        there_are = sum(host.process.replica.tokens_total for host in self.hosts.values())
        within = self._tokens_known <= trained <= there_are
        require(within, "tokens trained are counted once", (event, self._tokens_known, trained, there_are))
        self._tokens_known = trained

    def _go_on_from(
        self,
        epoch: Epoch,
        answers: list[IslandHoldings],
        choice: salvage.Choice,
        surviving: tuple[SurvivingIsland, ...],
        pulled: Mapping[FragmentId, FragmentState],
    ) -> None:
        outer_step = self.durability.outer_step
        blank = OuterState.restored(dict(enumerate(self.durability.first)), outer_step)  # type: ignore[arg-type]
        states = {p: replace(pulled[p], momentum=blank.state(p).momentum, residue={}) for p in sorted(pulled)}
        for p, version in [key for key in self._history if key[1] > states[key[0]].version]:
            del self._history[p, version]
        self._history.update({(p, state.version): state for p, state in states.items()})
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
        event = JobSalvaged(
            self.now,
            f"epoch {epoch - 1}",
            epoch,
            tuple(one.version for one in choice.chosen),
            tuple(one.step for one in choice.chosen),
            tuple(one.digest for one in choice.chosen),
            choice.lost,
            "zeros",
            salvage.tokens_trained(answers),
            surviving,
            tuple(salvage.last_incarnations(self.hosts).items()),
            0,
            tuple(sorted(choice.doubted)),
        )
        going_on = {(one.island, one.incarnation) for one in surviving}
        for life, host in self.hosts.items():
            if host.alive and life not in going_on:
                self.while_alive(self.draw(self.plan.detect_s), partial(self.die, host, "a stray", announced=False))
        self._tokens_known = max(one.tokens_total for one in answers)
        for host in self.hosts.values():
            if any(answer.life == (host.process.island, host.process.incarnation) for answer in answers):
                self._tokens_known = max(self._tokens_known, host.process.replica.anchor.tokens)
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


def _is_as_announced(held: HeldVersion) -> bool:
    return held.announced is None or held.announced.digest == held.digest


def _is_confirmed(copies: list[HeldVersion]) -> bool:
    """Return whether more of these copies of one version agree than on anything else: two, or one that was announced."""
    counts = Counter(held.digest for held in copies)
    for digest, count in counts.items():
        leads = all(count > others for other, others in counts.items() if other != digest)
        if leads and (count > 1 or any(held.announced for held in copies if held.digest == digest)):
            return True
    return False


def run(seed: int, deaths: int = 3) -> LostMachinesWorld:
    """Run one seed to its end. Raises Violation, or whatever breaks."""
    world = LostMachinesWorld(seed, deaths)
    world.run(until=UNTIL_S)
    if not world.ended:
        islands = world.core.state.islands.values()
        waits = not any(i.wanted and i.state not in (IslandState.FAILED, IslandState.CORDONED) for i in islands)
        require(world.finished is not None or waits, "the job ends", [(i.id, i.state, i.wanted) for i in islands])
        world.goodput.check()
        again = replay(world.tape)
        require(again.exact, "a tape replays exactly", again.divergence)
    return world
