"""A job with a real shell but without Ray, which dies at given points: tape, journal, merges, and the loops of the
islands.

Everything happens in one thread and in one order. In a *quiet* job nothing is in flight: the islands then take a given
number of steps, and the synchroniser works until the job is quiet again. Every round needs all islands, so the merged
bits do not depend on when the synchroniser dies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from learners import checkpointing, synthetic
from learners.island_spec import IslandSpec
from learners.loop import IslandLoop, LoopPlan
from learners.outbox import Outbox
from orchestrator.accounting.goodput import Goodput
from orchestrator.checkpoints.folder import Folder
from orchestrator.checkpoints.manifest import part_digest
from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core import saving
from orchestrator.core.events import event_of
from orchestrator.core.messages import CaughtUp, Offer, Ready, Saved, contribution_of
from orchestrator.core.vocabulary import Incarnation, IslandId, Version
from orchestrator.host.job_files import JobFiles, mirror, open_files
from orchestrator.host.retry import Retrier, RetryingSink, SnapshotWriter
from orchestrator.parameters import fragment_map, tensors
from orchestrator.parameters.holding import EVERYTHING
from orchestrator.parameters.outer_state import OuterState, OuterStep
from orchestrator.parameters.shard import Held, ParameterShard, Publication
from orchestrator.replica.replica import Publication as Arrived
from orchestrator.specification.config import JobSpec, parse_job
from orchestrator.system.disk import Disk, LocalDisk
from orchestrator.system.object_store import ObjectStore
from orchestrator.system.run_folder import SNAPSHOT
from orchestrator.tape.sealing import SEAL_BYTES
from tests.harness.job import Job
from tests.harness.saver import Saver
from tests.swarm.disk import AtOnce, Died, SimulatedDisk

ISLANDS = ("a", "b", "c")
FRAGMENTS, INTERVAL = 3, 6
FIRST = Incarnation(1)
TICK_S = 0.001
POINTS = (
    "before pull", "after pull", "before tape", "after tape", "before merge", "after merge", "after keep",
    "before publish", "after publish", "before acknowledge", "after acknowledge",
)  # fmt: skip


def spec(**synchroniser: Any) -> JobSpec:
    return parse_job(
        {
            "islands": [{"node_group": name} for name in ISLANDS],
            "budget": {"steps": 100_000},
            "trainer": "learners.synthetic:create",
            "synthetic": {"parameters": 210, "step_s": 1e-6},
            "evaluation": {"every_merges": 0},
            "checkpoints": {"keep": 1},
            "synchroniser": {
                "fragments": FRAGMENTS,
                "interval_steps": INTERVAL,
                "quorum": len(ISLANDS),
                "grace_cap_steps": None,  # every merge waits for all islands, so no clock depends on how long something took
                **synchroniser,
            },
        }
    )


class ScriptedIsland:
    """An island's real loop, stepped by hand, and its reports."""

    def __init__(self, job: JobSpec, index: int) -> None:
        self.name = IslandId(ISLANDS[index])
        document = job.model_dump(mode="json")
        self.trainer = synthetic.create(document, index, len(ISLANDS))
        shapes = self.trainer.tensor_shapes()
        job = IslandSpec.of(document).job
        plan = LoopPlan(
            fragment_map.build(shapes, FRAGMENTS),
            INTERVAL,
            job.synchroniser.adoption,
            codec=job.synchroniser.wire.up,
            tokens_per_schedule_step=job.tokens_per_schedule_step,
        )
        self.outbox = Outbox(lambda: self.loop.standing_offers())
        self.loop = IslandLoop(self.trainer, plan, self.outbox)
        self.outbox.put(Ready(1, 0.1))
        self.holds = self.trains = False

    def load(self, arrays: dict[str, Any], versions: tuple[Version, ...], cursor: int) -> None:
        if not self.holds:
            self.loop.load(arrays, versions, 0, cursor)
            self.holds = True
        self.outbox.put(CaughtUp(None, versions, 0, 0.1))

    def save(self, checkpoint: int, folder: str) -> None:
        """Write the island's part of a checkpoint at its next boundary."""

        def write(asked: Future[checkpointing.Cut]) -> None:
            cut = asked.result()
            part = checkpointing.write(cut, Folder.own(Path(folder)), self.name, Incarnation(1))
            self.outbox.put(Saved(checkpoint, part_digest(part), cut.position.tokens_total, 0.0))

        self.loop.request_cut().add_done_callback(write)


class Shell(Job):
    """One life of the synchroniser. ``reached`` is called at every labelled point, and may raise Died.

    The clock moves with every event, and the effects of an event are carried out before the next.
    """

    seal_bytes = SEAL_BYTES

    def __init__(
        self,
        folder: Path,
        job: JobSpec,
        islands: dict[str, ScriptedIsland],
        reached: Callable[[str], None],
        disk: Disk | None = None,
        store: ObjectStore | None = None,
    ) -> None:
        self.spec, self.islands, self.reached, self.below = job, islands, reached, disk
        self.disk = disk
        if store is not None:
            self._retry("the store cannot be used", partial(self._take_over, folder, store))
            disk = self.disk
        policy = job.policy()
        self.files: JobFiles

        def open_here() -> None:
            self.files = open_files(folder, "job", job, policy, 0.0, (Goodput(policy),), disk)

        if store is not None:
            self._retry("the store cannot be used", open_here)
        else:
            open_here()
        (goodput,) = self.files.folds  # ours, or a snapshot's
        assert isinstance(goodput, Goodput)
        self.goodput = goodput
        past = self.files.past
        self._sink = RetryingSink(self.files.tape, Retrier(retry_s=0.0), self.files.journal.settle)
        super().__init__(self.files.core, (self.files.pending, goodput), self, past.count if past else 0)
        self.now = past.at if past else 0.0
        every = job.synchroniser.durability.snapshot_every_records
        self.snapshots = SnapshotWriter(
            folder / SNAPSHOT, self.files.tape, past.before if past else 0, every, disk, self.seal_bytes
        )
        self.shard = ParameterShard(self.files.journal, self.files.epoch, self._keep)
        self.published: dict[int, Publication] = {}
        self.read = dict.fromkeys(islands, 0)
        self.unsynced: dict[str, list[tuple[int, int]]] = {name: [] for name in islands}
        self.saver = Saver(self, folder)
        if self.files.outer is not None:
            recovered = self.shard.recover(self.files.outer, self.files.merges)
            self.published = {publication.fragment: publication for publication in recovered}

    def _take_over(self, folder: Path, store: ObjectStore) -> None:
        self.disk = mirror(folder, store, self.below or LocalDisk(), AtOnce(), lambda work: work())

    def begin(self) -> None:
        """Tell the first events of this life."""
        for make in (*self.files.first_events, *(() if self.files.started else (e.JobStarted,))):
            self.happen(make)
        if not self.core.state.seeded:
            self._seed()

    def die(self) -> None:
        """Leave what a killed process leaves: its files, unlocked."""
        self.snapshots.let_go()
        self.files.tape.let_go()
        if isinstance(self.below, SimulatedDisk):
            self.below.lose_process()

    def append(self, record: Any) -> None:
        self.reached("before tape")
        self._sink.append(record)
        self.reached("after tape")

    def happen(self, kind: Callable[..., e.Event], *facts: Any) -> tuple[f.Effect, ...]:
        self.now += TICK_S
        return super().happen(kind, *facts)

    def tell(self, event: e.Event) -> tuple[f.Effect, ...]:
        effects = super().tell(event)
        self.snapshots.consider(self.driver, self.now)
        for effect in effects:
            f.carry_out(effect, self)
        return effects

    # ── core.effects.Shell ────────────────────────────────────────────────────────────────────────────────────────

    def set_timer(self, effect: f.SetTimer) -> None:
        """Do nothing: every round needs all islands, and no deadline ever passes."""

    def merge_fragment(self, effect: f.MergeFragment) -> None:
        self.reached("before merge")
        merged = self.shard.merge(effect)
        self.reached("after keep")
        self.published[effect.fragment] = merged.publication
        facts = merged.facts
        self.happen(e.MergeCompleted, effect.fragment, effect.version, facts.digest, 0.0, facts.base_digest)

    def publish_fragment(self, effect: f.PublishFragment) -> None:
        self.reached("before publish")
        if self.shard.state(effect.fragment).version == effect.version:
            for to in effect.recipients:
                island = self.islands[to.island]
                island.outbox.check_epoch(self.files.epoch)
                self._deliver(island.loop, effect, to)
        self.reached("after publish")

    def _deliver(self, loop: IslandLoop, effect: f.PublishFragment, to: f.Recipient) -> None:
        """Deliver the update if the island has the version before it, else the values."""
        new = self.published[effect.fragment]
        arrived = Arrived(effect.fragment, effect.version, effect.step, to.merged_offer, effect.fix)
        since = Version(new.version - 1)
        if (
            new.update is None
            or loop.receive(arrived, since, new.digest, [new.update.payload(EVERYTHING)]) < new.version
        ):
            loop.receive(arrived, None, new.digest, [new.values(EVERYTHING)])

    def release_payload(self, effect: f.ReleasePayload) -> None:
        self.shard.release(effect.payload)

    def place_island(self, effect: f.PlaceIsland) -> None:
        self.happen(e.IslandPlaced, effect.island, effect.incarnation, "node", 1)

    def begin_catch_up(self, effect: f.BeginCatchUp) -> None:
        assert effect.source == f.FromSynchroniser(), "all begin at once, and none of them is ever lost"
        versions = tuple(state.version for state, _ in self.shard.states().values())
        self.islands[effect.island].load(self.shard.parameters(), versions, effect.cursor)

    def start_training(self, effect: f.StartTraining) -> None:
        self.islands[effect.island].trains = True
        self.islands[effect.island].loop.open(effect.fix)

    def flush_island(self, effect: f.FlushIsland) -> None:
        """Do nothing: the job's budget is never used up."""

    def adjust_island(self, effect: f.AdjustIsland) -> None:
        """Do nothing, see ``drain_island``."""

    def drain_island(self, effect: f.DrainIsland) -> None:
        """Do nothing: operators ask only for checkpoints, rollbacks and an end here."""

    def kill_island(self, effect: f.KillIsland) -> None:
        """Do nothing, see ``drain_island``."""

    def stop_island(self, effect: f.StopIsland) -> None:
        """Do nothing: the islands outlive the shell and the job."""

    def evaluate(self, effect: f.Evaluate) -> None:
        """Do nothing: ``evaluation.every_merges`` is 0."""

    def resolve_command(self, effect: f.ResolveCommand) -> None:
        """Do nothing: the result is on the tape, where tests look for it."""

    def begin_checkpoint(self, effect: saving.BeginCheckpoint) -> None:
        self.saver.act(effect)

    def seal_checkpoint(self, effect: saving.SealCheckpoint) -> None:
        self.saver.act(effect)

    def drop_checkpoint(self, effect: saving.DropCheckpoint) -> None:
        self.saver.act(effect)

    def restore_fragments(self, effect: saving.RestoreFragments) -> None:
        self.saver.act(effect)

    def hand_over(self, effect: saving.HandOver) -> None:
        """Do nothing: ``tests/harness/lives.py`` has the next life."""

    def finish_job(self, effect: f.FinishJob) -> None:
        """Do nothing: tests look at the core."""

    # ── reports ───────────────────────────────────────────────────────────────────────────────────────────────────

    def work_until_quiet(self) -> None:
        """Read reports until there are none."""
        heard = [True]
        while any(heard):
            heard = [self._hear(name) for name in self.islands]

    def _hear(self, name: str) -> bool:
        island = self.islands[name]
        reports = island.outbox.read(self.files.epoch, self.read[name], 0, 0.0)
        for number, report in reports:
            if isinstance(report, Offer):
                self._take(name, report)
            else:
                self.now += TICK_S
                self.tell(event_of(report, self.now, IslandId(name), FIRST))
            self.read[name] = number
            self.unsynced[name].append((self.files.tape.count, number))
            break  # reports written meanwhile come next
        self._acknowledge(name)
        return bool(reports)

    def _acknowledge(self, name: str) -> None:
        """Acknowledge reports whose events would survive a power loss, so that the island forgets them."""
        synced = [number for count, number in self.unsynced[name] if count <= self.files.tape.synced_count]
        if synced:
            self.reached("before acknowledge")
            self.islands[name].outbox.read(self.files.epoch, self.read[name], max(synced), 0.0)
            self.unsynced[name] = self.unsynced[name][len(synced) :]
            self.reached("after acknowledge")

    def _take(self, name: str, offer: Offer) -> None:
        self.reached("before pull")
        content = self.islands[name].loop.take(offer.fragment, offer.offer)
        if content is None:
            return
        contribution = contribution_of(offer, IslandId(name), FIRST)
        assert isinstance(self.shard.receive(contribution.payload, offer.fragment, content), Held)
        self.reached("after pull")
        self.happen(e.ContributionArrived, contribution)

    def _seed(self) -> None:
        trainer = next(iter(self.islands.values())).trainer
        fragments = fragment_map.build(trainer.tensor_shapes(), FRAGMENTS)
        initial = fragment_map.pieces_of(trainer.initial_parameters(), fragments)
        outer = OuterState(initial, fragments, OuterStep.of(self.spec.synchroniser))
        seeded = self.shard.seed(outer, {})
        self.published = {new.publication.fragment: new.publication for new in seeded}
        self.happen(e.OuterStateSeeded, 210, tensors.digest(outer.parameters()))

    def _keep(self, what: str, work: Callable[[], None]) -> None:
        self.reached("after merge")
        self._retry(what, work)

    def _retry(self, what: str, work: Callable[[], None]) -> None:
        Retrier(retry_s=0.0).until_done(what, work)


class Fate:
    """A script that dies at the ``number``-th time, from 1, that ``point`` is reached. It counts all points."""

    def __init__(self, point: str = "", number: int = 0) -> None:
        self.counts: Counter[str] = Counter()
        self._point, self._number = point, number

    def __call__(self, point: str) -> None:
        self.counts[point] += 1
        if point == self._point and self.counts[point] == self._number:
            raise Died
