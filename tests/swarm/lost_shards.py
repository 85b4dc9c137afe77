"""A mortal world with several shards: each may die, lose its disk, come back elsewhere, or be drained to another node.

    python -m tests.swarm --lost-shards --first N --count N

The synchroniser lives. Each shard has the live journal on disks of its own, and dies at an instant or at an operation of its
disk: before a merge is journalled, half way, or between its journal entry and its announcement. What a shard goes on from is
decided by the live code (``journal.continues``, ``shard.is_journalled``), and what it takes from islands takes the place of
what its journal has (``journaled_store.replace_fragment``). These sentences are checked:

    a shard goes on from its own disk           sync durability loses nothing with a process, or with power
    a merge is made once                        what the journal has is answered from there, however often it is ordered
    a published version is one for ever         in every life of its shard
    Θ, μ and residues are an undisturbed run's  bit for bit, except for the momentum of what was taken from islands
    a version is lost only with all its copies  and no token is merged twice, tokens add up, and the tape replays exactly
    a job ends                                  unless operators keep its islands away
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any, cast

from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.saving import FragmentRestored, FromJournal, LostVersion, ShardMoved
from orchestrator.core.vocabulary import Duration, FragmentId, Instant, MergedOffer, PayloadId, Version
from orchestrator.errors import DataError
from orchestrator.host.job_files import versions_kept
from orchestrator.parameters.fragment_map import dealt
from orchestrator.parameters.journal import Facts, Journal, continues, set_back
from orchestrator.parameters.journaled_store import MergeLog, momentum_at_last, recovered, replace_fragment, state_at
from orchestrator.parameters.outer_state import FragmentState, OuterState, initial_state
from orchestrator.parameters.pieces import from_rows
from orchestrator.parameters.shard import InputsLost, ParameterShard, is_journalled
from orchestrator.simulation.island import Host
from orchestrator.tape.replay import replay
from tests.swarm.checkers import Checkers
from tests.swarm.checkers.violation import require
from tests.swarm.configurations import draw
from tests.swarm.disk import Died, DiskFault, SimulatedDisk
from tests.swarm.lost_machines import UNTIL_S, LostMachinesWorld, NotingLinks
from tests.swarm.mortal_merge_worker import MortalMergeWorker, retry_until_written
from tests.swarm.mortal_world import FOLDER
from tests.swarm.mortality import AWAY_MAX_S, OPERATIONS_MAX, Death, DiskFaults
from tests.swarm.trial import check_end

SHARDS_MAX, STRIKES_MAX = 3, 6
ASK_AGAIN_S, SETTLE_S, PATIENCE_S = 0.2, 2.0, 20.0
"""A shard without its journal asks islands again, gives the last version up, and gives the job up."""
HAND_OVER_S, BACK_S = 0.1, 1.0
SAME_DISK, NO_DISK, ELSEWHERE, DRAIN = "same disk", "no disk", "elsewhere", "drain"


class Away(Exception):
    """The shard's process is not there, or does nothing with this fragment any more."""


@dataclass(frozen=True, slots=True)
class Strike:
    """A death of a shard, after which it comes back with a ``fate``, or its drain. ``announces`` says that it dies right
    after its next announcement, before an island has the version.
    """

    at: Instant
    shard: int
    fate: str
    announces: bool
    death: Death


def draw_strikes(seed: int, shard_count: int, until: Instant) -> tuple[Strike, ...]:
    """Draw what befalls the shards, the same in every build."""
    random, strikes = Random(f"atoll swarm {seed} shards"), []
    for _ in range(random.randint(1, STRIKES_MAX)):
        at, shard = random.uniform(0.0, until), random.randrange(shard_count)
        fate = random.choice((SAME_DISK, NO_DISK, ELSEWHERE, DRAIN))
        fault = random.choice((DiskFault.BEFORE, DiskFault.TORN, DiskFault.AFTER, DiskFault.AFTER))
        operation = random.choice((0, random.randint(1, OPERATIONS_MAX)))
        power, away_s = random.random() < 0.5, random.uniform(0.0, AWAY_MAX_S)
        announces = random.random() < 0.3
        strikes.append(Strike(at, shard, fate, announces, Death(at, power, operation, fault, away_s)))
        if fate == ELSEWHERE and random.random() < 0.7:  # and back, where the journal of the stay before is
            back_at = at + away_s + random.uniform(0.0, BACK_S)
            death = Death(back_at, False, random.randint(0, 2), DiskFault.BEFORE, 0.0)
            strikes.append(Strike(back_at, shard, fate, False, death))
    return tuple(sorted(strikes, key=lambda strike: strike.at))


class SimulatedShard:
    """A shard's processes, one after another, on the disks of its nodes.

    ``noted`` is the node that has its journal. ``intact`` is that node as long as its disk was not lost.
    """

    def __init__(self, world: LostShardsWorld, number: int) -> None:
        self._world, self._number = world, number
        self._faults, self._fate = DiskFaults(), SAME_DISK
        self._at_announcement: Death | None = None
        self._disks: dict[str, SimulatedDisk] = {}
        self._node = self._noted = "node-0"
        self._intact: str | None = self._node
        self._waiting: list[Callable[[], None]] = []
        self._handed_over: dict[FragmentId, tuple[Facts, FragmentState]] = {}
        self._is_moving, self._journal = False, self._opened(self._node)
        self.serving: ParameterShard | None = None
        self.life = 0
        self.newest: dict[FragmentId, Facts] = {}
        self.announced: dict[FragmentId, tuple[Facts, ...]] = {}

    def _opened(self, node: str) -> Journal:
        disk = self._disks.setdefault(node, SimulatedDisk(self._faults))
        count = versions_kept(self._world.durability.outer_step.staleness_max)
        return Journal(FOLDER / "shards" / str(self._number), versions_kept=count, disk=disk)

    # ── orders ────────────────────────────────────────────────────────────────────────────────────────────────────

    def seed(self, states: Mapping[FragmentId, FragmentState]) -> None:
        shard = ParameterShard(self._journal, self._world.epoch, retry_until_written, lambda: self._world.now)
        new = shard.seed(OuterState.restored(states, self._world.durability.outer_step), {})
        self.serving = shard
        for one in new:
            self.announce(one.facts)

    def is_away(self, fragment: FragmentId) -> bool:
        return self.serving is None or fragment in self._handed_over

    def when_back(self, fragment: FragmentId, work: Callable[[], None]) -> None:
        if self.is_away(fragment):
            self._waiting.append(work)
        else:
            work()

    def merge(self, order: f.MergeFragment) -> Facts:
        """Raises Away if the process dies before it answers, and InputsLost."""
        shard = self.serving
        if shard is None or self.is_away(order.fragment):
            raise Away
        if not is_journalled(self.newest[order.fragment], order, shard.holds):
            self.mortally(lambda: self._merge(shard, order))
        return self.newest[order.fragment]

    def _merge(self, shard: ParameterShard, order: f.MergeFragment) -> None:
        self.newest[order.fragment] = shard.merge(order).facts

    def announce(self, facts: Facts) -> None:
        fragment = FragmentId(facts.fragment)
        before = [one for one in self.announced.get(fragment, ()) if one.version < facts.version]
        self.newest[fragment], self.announced[fragment] = facts, (*before[-1:], facts)

    # ── deaths and drains ─────────────────────────────────────────────────────────────────────────────────────────

    def strike(self, strike: Strike) -> None:
        if self.serving is None or self._world.finished is not None:
            return
        if strike.fate == DRAIN:
            self._leave()
            return
        self._fate = strike.fate
        if strike.announces:
            self._at_announcement = replace(strike.death, operation=0)
        elif self._faults.arm(strike.death):
            self._die()

    def has_announced(self) -> None:
        """Die if a death waits for an announcement."""
        death, self._at_announcement = self._at_announcement, None
        if death is not None and self.serving is not None:
            self._faults.arm(death)
            self._die()

    def mortally(self, work: Callable[[], None]) -> None:
        """Do the work. Raises Away if the process dies of it."""
        try:
            work()
        except Died:
            self._die()
            raise Away from None

    def _die(self) -> None:
        death, disk = self._faults.take_death(), self._disks[self._node]
        self.serving, self.life, self._is_moving = None, self.life + 1, False
        self._handed_over.clear()
        if death.power:
            disk.lose_power(self._world.shard_power)
        disk.lose_process()
        if self._fate == NO_DISK:
            self._disks[self._node] = SimulatedDisk(self._faults)
            self._intact = None if self._intact == self._node else self._intact
        elif self._fate == ELSEWHERE:  # where it may have been before, with the journal of that stay
            self._node = "node-1" if self._node == "node-0" else "node-0"
        self._world.later(death.away_s, partial(self._continue, self._world.now))

    def _continue(self, since: Instant) -> None:
        """Continue as ``runtime.remote_shard`` has a new process continue."""
        if self._world.finished is not None or self._world.ended:
            return
        life = self.life
        try:
            self.mortally(lambda: self._go_on(since))
        except Away:
            return
        if self.serving is None and self.life == life:
            self._world.later(ASK_AGAIN_S, partial(self._continue, since))

    def _go_on(self, since: Instant) -> None:
        world, node = self._world, self._node
        journal = self._journal = self._opened(node)
        retry_until_written("the journal cannot be written", journal.settle)
        facts = {p: {version: journal.facts(p, version) for version in journal.versions(p)} for p in journal.fragments}
        is_last = node == self._noted
        lacking = [
            p
            for p, announced in sorted(self.announced.items())
            if not continues(announced[-1], facts.get(p, {}), with_next=is_last)
        ]
        require(not lacking or node != self._intact, "a shard goes on from its own disk", (node, lacking, facts))
        own = {p: announced[-1] for p, announced in sorted(self.announced.items()) if p not in lacking}
        foreign = [one for p, one in own.items() if facts[p][one.version].digest != one.digest]
        require(not foreign, "a shard goes on from the version that it announced", (node, foreign, facts))
        of_stay_before = () if is_last else own
        if not lacking:
            self._serve(node)
            self._go_on_with(of_stay_before)
            if not is_last:
                world.tell(ShardMoved(world.now, self._number, node, (), "its journal", "kept", (), "its node is gone"))
            self._resume()
            return
        taken, waited_s = {p: self._taken(p, world.now - since) for p in lacking}, world.now - since
        if None in taken.values():
            if waited_s > PATIENCE_S:
                world.end("no island had the versions of a lost shard")
            return
        lost = []
        for p, (version, state) in cast(dict[FragmentId, tuple[Facts, FragmentState]], taken).items():
            newest = self.announced[p][-1]
            if version.version < newest.version:
                lost.append(LostVersion(p, newest.version, "no island had its bytes"))
                version = set_back(version, newest.version, world.epoch)
            replace_fragment(journal, version, state, retry_until_written)
        retry_until_written("the journal cannot be written", journal.settle)
        self._serve(node)
        self._go_on_with(of_stay_before)
        momentum = {p: state for p, (_, state) in taken.items()}  # type: ignore[misc]
        for p, state in momentum.items():
            world.theta.continue_with(p, state)
        world.tell(ShardMoved(world.now, self._number, node, tuple(lacking), "islands", "zeros", tuple(lost), "lost"))
        for p in (one.fragment for one in lost):
            world.version_lost(p, self.announced[p][-1].version)
            facts_now = self.newest[p]
            self.announced[p] = self.announced[p][:1]
            world.merge_worker.announce(self, facts_now)
            digests = (facts_now.digest, facts_now.base_digest)
            world.tell(FragmentRestored(world.now, p, facts_now.version, FromJournal(), *digests))
        self._resume()

    def _go_on_with(self, fragments: Iterable[FragmentId]) -> None:
        """Take the momentum, and the versions before, that the journal of an earlier stay on this node has."""
        assert self.serving is not None
        for p in fragments:
            self._world.theta.continue_with(p, self.serving.state(p))
            self._world.theta.forget_older(p, min(self._journal.versions(p)))

    def _taken(self, fragment: FragmentId, waited_s: Duration) -> tuple[Facts, FragmentState] | None:
        """Return the newest announced version of which there is a copy, as ``salvaging.salvage_shard`` finds it."""
        versions, step = self.announced[fragment], self._world.durability.outer_step
        for wanted in reversed(versions if waited_s > SETTLE_S else versions[-1:]):
            try:
                if self._journal.facts(fragment, wanted.version).digest == wanted.digest:
                    return wanted, state_at(self._journal, fragment, wanted.version, step)
            except DataError:
                pass
            if (arrays := self._world.held_by_islands(fragment, wanted.version)) is not None:
                first = initial_state(arrays, step, from_rows(wanted.roles))
                own = momentum_at_last(self._journal, fragment, step)
                momentum = own if own.keys() == first.momentum.keys() else first.momentum
                return wanted, replace(first, version=wanted.version, momentum=momentum)
        return None

    def _leave(self) -> None:
        """Hand one fragment after another over to a process on another node, as ``RemoteShard`` does."""
        if self._is_moving:
            return
        self._is_moving = True
        self._hand_over(sorted(self.announced), self.life)

    def _hand_over(self, left: list[FragmentId], life: int) -> None:
        if self.life != life or self.serving is None or self._world.finished is not None:
            return
        if left:
            fragment = left[0]
            self._handed_over[fragment] = (self.newest[fragment], self.serving.state(fragment))
            self._world.later(HAND_OVER_S, partial(self._hand_over, left[1:], life))
            return
        try:
            self.mortally(self._take_over)
        except Away:
            return

    def _take_over(self) -> None:
        world, node = self._world, "node-1" if self._node == "node-0" else "node-0"
        self._disks[node] = SimulatedDisk(self._faults)
        journal = self._opened(node)
        for facts, state in self._handed_over.values():
            replace_fragment(journal, facts, state, retry_until_written)
        retry_until_written("the journal cannot be written", journal.settle)
        for p, (facts, _) in self._handed_over.items():
            world.theta.forget_older(p, facts.version)
        self._node, self._journal, self._is_moving, self.life = node, journal, False, self.life + 1
        self._handed_over.clear()
        self._serve(node)
        fragments = tuple(sorted(self.announced))
        world.tell(ShardMoved(world.now, self._number, node, fragments, "the process before", "kept", (), "a drain"))
        self._resume()

    def _serve(self, node: str) -> None:
        """Go on from the journal, which this node has from now on."""
        world = self._world
        outer, merges = recovered(self._journal, sorted(self.announced), world.durability.outer_step)
        shard = ParameterShard(self._journal, world.epoch, retry_until_written, lambda: world.now)
        shard.recover(outer, merges)
        self.newest = {FragmentId(one.fragment): one for one in merges}
        self.serving, self._noted, self._intact = shard, node, node

    def _resume(self) -> None:
        waiting, self._waiting = self._waiting, []
        for work in waiting:
            work()


class AllShards:
    """The shards of a job where a world asks for its one."""

    def __init__(self, owners: Mapping[FragmentId, SimulatedShard], states: Mapping[FragmentId, FragmentState]) -> None:
        self._owners, self._states = owners, states

    def state(self, fragment: FragmentId) -> FragmentState:
        return self._states[fragment]

    def receive(self, payload: PayloadId, fragment: FragmentId, content: memoryview) -> Any:
        shard = self._owners[fragment].serving
        assert shard is not None
        return shard.receive(payload, fragment, content)

    def release(self, payload: PayloadId) -> None:
        for owner in self._owners.values():
            if owner.serving is not None:
                owner.serving.release(payload)


class ShardedMergeWorker(MortalMergeWorker):
    """Hands each order to the shard that owns the fragment, again once that is back if it died before it answered."""

    def __init__(self, world: LostShardsWorld) -> None:
        super().__init__(world)
        self._sharded = world
        self.shards: tuple[SimulatedShard, ...] = ()
        self.owners: dict[FragmentId, SimulatedShard] = {}
        self._states: dict[FragmentId, FragmentState] = {}

    def seed(self, outer: OuterState, journal: MergeLog) -> None:
        world, fragments = self._sharded, outer.fragments
        hands = dealt([1] * len(fragments), min(world.shard_count, len(fragments)))
        self.shards = tuple(SimulatedShard(world, number) for number in range(len(hands)))
        self.shard = cast(Any, AllShards(self.owners, self._states))
        for shard, own in zip(self.shards, hands, strict=True):
            shard.seed({p: outer.state(p) for p in own})
            self.owners |= dict.fromkeys(own, shard)
            for p in own:
                self.announce(shard, shard.newest[p])
        world.tell(e.OuterStateSeeded(world.now, len(fragments), "0" * 32))

    def announce(self, shard: SimulatedShard, facts: Facts) -> None:
        fragment = FragmentId(facts.fragment)
        shard.announce(facts)
        assert shard.serving is not None
        self._states[fragment] = shard.serving.state(fragment)
        self._stands(fragment, facts.version, facts.step)

    def _complete(self, effect: f.MergeFragment, fails: bool) -> None:
        world, shard = self._sharded, self.owners[effect.fragment]
        again = partial(self._complete, effect, fails)
        if world.finished is not None:
            return
        if fails:
            super()._complete(effect, fails)
            return
        try:
            facts = shard.merge(effect)
        except Away:
            shard.when_back(effect.fragment, again)
        except InputsLost as error:
            newest, inputs = shard.newest[effect.fragment], {str(item.island): item.weight for item in effect.inputs}
            is_there = newest.version == effect.version and dict(newest.contributors) == inputs
            require(not is_there, "a merge that the journal has is answered from there", effect)
            del self.under_way[effect.fragment]
            merged = tuple(item.payload for item in effect.inputs)
            world.tell(e.MergeFailed(world.now, effect.fragment, effect.version, merged, error.detail))
        else:
            answered = partial(self._answered, shard, shard.life, effect, facts)
            world.while_alive(world.draw(world.plan.letter_s), answered)

    def _answered(self, shard: SimulatedShard, life: int, effect: f.MergeFragment, facts: Facts) -> None:
        world = self._sharded
        if world.finished is not None:
            return
        if shard.life != life or shard.is_away(effect.fragment):  # the answer is lost with its process
            shard.when_back(effect.fragment, partial(self._complete, effect, False))
            return
        del self.under_way[effect.fragment]
        self.announce(shard, facts)
        self.completed.add(effect)
        world.tell(e.MergeCompleted(world.now, effect.fragment, effect.version, facts.digest, 0.0, facts.base_digest))
        shard.has_announced()


class ShardLinks(NotingLinks):
    """A publication, pulled from its shard as it arrives, waits for a shard that is away and ends with a lost version."""

    def __init__(self, world: LostShardsWorld) -> None:
        super().__init__(world)
        self._sharded = world

    def _deliver(self, host: Host, effect: f.PublishFragment, merged_offer: MergedOffer) -> None:
        owner = self._sharded.merge_worker.owners[effect.fragment]
        if not host.alive:
            return
        if owner.is_away(effect.fragment):
            again = partial(self._deliver, host, effect, merged_offer)
            owner.when_back(effect.fragment, self._sharded.addressed(host, again))
        elif effect.version in {facts.version for facts in owner.announced[effect.fragment]}:
            super()._deliver(host, effect, merged_offer)


class LostShardsWorld(LostMachinesWorld):
    """A world whose synchroniser lives, and whose shards do not. ``lost`` are the versions that ended with all copies."""

    merge_worker: ShardedMergeWorker

    def __init__(self, seed: int) -> None:
        super().__init__(seed, deaths=0)
        drawn = draw(seed)
        calm_at, patience = drawn.plan.calm_at + PATIENCE_S, drawn.patience + PATIENCE_S
        self._checkers_of = lambda: Checkers(self.policy, calm_at, patience)
        self.shard_count = Random(f"atoll swarm {seed} shard count").randint(2, SHARDS_MAX)
        self.shard_power = Random(f"atoll swarm {seed} shard power")
        self.links = ShardLinks(self)
        self.lost: list[tuple[FragmentId, Version]] = []
        self.moves = 0
        for strike in draw_strikes(seed, self.shard_count, self.plan.calm_at):
            self.later(strike.at, partial(self._befall, strike))

    def make_merge_worker(self) -> MortalMergeWorker:
        return ShardedMergeWorker(self)

    def _befall(self, strike: Strike) -> None:
        if shards := self.merge_worker.shards:
            shards[strike.shard % len(shards)].strike(strike)

    def tell(self, event: e.Event) -> None:
        if isinstance(event, e.ContributionArrived) and event.displacement is not None:
            owner, fragment = self.merge_worker.owners[event.contribution.fragment], event.contribution.fragment
            if owner.is_away(fragment):
                owner.when_back(fragment, lambda: self.tell(replace(event, at=self.now)))
                return
        self.moves += isinstance(event, ShardMoved)
        super().tell(event)

    def held_by_islands(self, fragment: FragmentId, version: Version) -> Any:
        """Return the parameters of a version that an island has, unless none can be reached or all copies are damaged."""
        for _, host in sorted(self.hosts.items()):
            published = self._held.get(id(host), {}).get(fragment)
            if not host.alive or host.silent(self.now) or published is None or published.state.version != version:
                continue
            if self._damage.random() >= 0.1:
                return published.state.parameters
        return None

    def version_lost(self, fragment: FragmentId, version: Version) -> None:
        """Note that a version ended with all its copies. Its contributions count as discarded."""
        self.lost.append((fragment, version))
        self._merged.pop((fragment, version), None)


def run(seed: int) -> LostShardsWorld:
    """Run one seed to its end. Raises Violation, or whatever breaks."""
    world = LostShardsWorld(seed)
    world.run(until=UNTIL_S)
    if world.ended:
        return world
    for p, shard in world.merge_worker.owners.items():
        if not shard.is_away(p) and shard.newest[p].version == world.core.state.rounds[p].version:
            assert shard.serving is not None
            world.theta.compare_fragment(p, shard.serving.state(p))
    check_end(world, world.checkers)
    world.goodput.check()
    again = replay(world.tape)
    require(again.exact, "a tape replays exactly", again.divergence)
    return world
