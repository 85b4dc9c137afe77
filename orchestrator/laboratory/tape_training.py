"""Trains by a tape: real inner steps, adoptions and merges in the order of the tape, without any new decision.

It works on demand. Each merge, in the order of the tape, needs its contributions. A contribution needs its island to train
up to it and to adopt on the way what the tape says. An island that started later needs the state of its donor. Everything
that is needed lies earlier on the tape. There is one thread, no clock and no chance, so the parameters are a function of
specification, tape and seed.

A version of a fragment is kept until its last adopter has it, and a contribution until its merge.

Source: arXiv:2604.21428, "event tapes".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field

from learners.contract import Arrays
from learners.island_arrays import mixed, update
from learners.outbox import OfferedFragment, PublishedVersion
from orchestrator.core.effects import MergeFragment
from orchestrator.core.vocabulary import FIRST_EPOCH, CloseReason, FragmentId, PayloadId, ScheduleAnchor, Version
from orchestrator.errors import DataError
from orchestrator.laboratory.multiplex import InProcessTrainers, MakeTrainer
from orchestrator.laboratory.trace_reader import (
    Adopted,
    Evaluated,
    Exported,
    IncarnationTrace,
    LifeId,
    Merged,
    Offered,
    TrainingTrace,
)
from orchestrator.parameters.codec.registry import EXACT
from orchestrator.parameters.pieces import joined
from orchestrator.replica.replica import schedule_step
from orchestrator.specification.config import JobSpec

Published = tuple[FragmentId, Version]


@dataclass(slots=True)
class Trained:
    """The result. ``curve`` is (tokens trained, held-out loss); ``as_recorded_count`` merges gave the tape's digest."""

    parameters: Arrays
    digest: str
    curve: list[tuple[int, float]]
    merge_count: int
    as_recorded_count: int

    @property
    def loss(self) -> float:
        return self.curve[-1][1]


class TapeTraining:
    """The training of one job by its trace. ``run`` yields after every inner step. ``trained`` is set at the end."""

    def __init__(self, spec: JobSpec, trace: TrainingTrace, make_trainer: MakeTrainer) -> None:
        self._trace, self._sync = trace, spec.synchroniser
        self._tokens_ratio = spec.tokens_per_step / trace.tokens_per_step
        self._tokens_per_schedule_step = spec.tokens_per_schedule_step
        self._in_process = InProcessTrainers(spec, make_trainer)
        self._outer = self._in_process.outer
        self._fresh = self._in_process.trainers[0].export_state().arrays()
        self._replicas: dict[LifeId, _Replica] = {}
        self._exported: dict[LifeId, Arrays] = {}
        self._held: set[PayloadId] = set()
        self._wanted = _uses(trace)
        self._authors = _authors(trace)
        self._published: dict[Published, Arrays] = {}
        for fragment in range(len(self._in_process.fragments)):
            self._publish(FragmentId(fragment), Version(0))
        self.trained: Trained | None = None

    def run(self) -> Iterator[None]:
        curve: list[tuple[int, float]] = []
        merge_count = as_recorded_count = 0
        act: Merged | Evaluated | None = None
        for act in self._trace.acts:
            if isinstance(act, Merged):
                digest = yield from self._merge(act)
                merge_count += 1
                as_recorded_count += digest == act.digest
            else:
                curve.append((round(act.tokens * self._tokens_ratio), self._in_process.evaluate()))
        if not isinstance(act, Evaluated):  # the tape ends before its job
            curve.append((round(self._trace.tokens_trained * self._tokens_ratio), self._in_process.evaluate()))
        self.trained = Trained(
            joined(self._outer.parameters()), self._in_process.digest(), curve, merge_count, as_recorded_count
        )

    # ── Θ ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _merge(self, act: Merged) -> Generator[None, None, str]:
        """Take an outer step of the tape, with its contributors and weights."""
        for item in act.inputs:
            if item.payload not in self._held:
                yield from self._train_to(item.payload)
        because = (CloseReason.EVERYONE_IN, "")
        order = MergeFragment(
            FIRST_EPOCH, act.fragment, act.version, 0, act.inputs, *because, outer_lr_ratio=act.outer_lr_ratio
        )
        digest = self._in_process.merge(order).digest
        for item in act.inputs:
            self._in_process.shard.release(item.payload)
            self._held.discard(item.payload)
        self._publish(act.fragment, act.version)
        return digest

    def _publish(self, fragment: FragmentId, version: Version) -> None:
        """Keep the value for the islands that will adopt it or begin from it."""
        if self._wanted[fragment, version]:
            self._published[fragment, version] = self._in_process.published(fragment)

    def _take(self, fragment: FragmentId, version: Version) -> Arrays:
        """Return the published value, and release it after its last use."""
        if (fragment, version) not in self._published:
            raise DataError(detail=f"version {version} of fragment {fragment} is used on the tape before its merge.")
        self._wanted[fragment, version] -= 1
        if self._wanted[fragment, version]:
            return self._published[fragment, version]
        return self._published.pop((fragment, version))

    # ── islands ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _train_to(self, payload: PayloadId) -> Iterator[None]:
        """Train the contribution's island until it offers it."""
        replica = yield from self._begun(self._authors[payload])
        while payload not in self._held:
            yield from self._next(replica)

    def _begun(self, life_id: LifeId) -> Generator[None, None, _Replica]:
        """Return the incarnation with its state, which it gets now if it has none yet.

        An island has one trainer for all its incarnations, so the earlier ones first run to their ends.
        """
        if life_id in self._replicas:
            return self._replicas[life_id]
        life = self._trace.lives[life_id]
        for earlier in sorted(other for other in self._trace.lives if other[0] == life_id[0] and other < life_id):
            over = yield from self._begun(earlier)
            while over.done < len(over.life.moments):
                yield from self._next(over)
        if life.donor is not None:
            donor = yield from self._begun(life.donor)
            while life_id not in self._exported:
                yield from self._next(donor)
        self._replicas[life_id] = replica = _Replica(life, life.logical_step, self._here(life.fix))
        self._load(replica)
        return replica

    def _load(self, replica: _Replica) -> None:
        """Give the island the state it began from, as ``learners.loop`` does."""
        life, trainer = replica.life, self._in_process.trainers[replica.life.shard]
        if life.donor is None:
            trainer.import_state(self._fresh)
            for fragment, version in enumerate(life.versions):
                published = self._take(FragmentId(fragment), version)
                trainer.load(published)
                self._stand_on(replica, FragmentId(fragment), version, published)
        else:
            trainer.import_state(self._exported.pop(life.id))
            for fragment in map(FragmentId, range(len(life.versions))):
                replica.base[fragment] = self._in_process.snapshot(life.shard, fragment) if self._rebases else {}
        trainer.seek(life.cursor)

    def _next(self, replica: _Replica) -> Iterator[None]:
        """Train up to the island's next moment and repeat what it did there."""
        life, moment = replica.life, replica.life.moments[replica.done]
        trainer = self._in_process.trainers[life.shard]
        while replica.step_count < moment.steps:
            trainer.step(schedule_step(replica.fix, replica.logical_step, self._tokens_per_schedule_step))
            replica.step_count += 1
            replica.logical_step += 1
            yield
        match moment:
            case Offered(_, fragment, payload):
                self._offer(replica, fragment, payload)
            case Exported(_, receiver):
                self._exported[receiver] = trainer.export_state().arrays()
            case Adopted():
                self._adopt(replica, moment)
        replica.done += 1

    def _offer(self, replica: _Replica, fragment: FragmentId, payload: PayloadId) -> None:
        snapshot = self._in_process.trainers[replica.life.shard].snapshot(self._in_process.fragments[fragment])
        base, codec_name = replica.adopted.get(fragment), self._in_process.codec
        offered = OfferedFragment(snapshot, base, codec_name, residue_wanted=not self._rebases)
        self._in_process.receive(payload, fragment, offered.payload())
        self._held.add(payload)
        replica.sent.setdefault(fragment, {})[payload] = offered

    def _adopt(self, replica: _Replica, moment: Adopted) -> None:
        """Load the version, as ``learners.loop`` does."""
        fragment, sync = moment.fragment, self._sync
        published, trainer = self._take(fragment, moment.version), self._in_process.trainers[replica.life.shard]
        sent = replica.sent.pop(fragment, {})
        if self._rebases and moment.keeps and (moment.has_work or self._in_process.codec != EXACT):
            since = replica.base[fragment] if moment.since is None else sent[moment.since].arrays()
            trainer.add(update(published, since))
        elif not self._rebases and moment.keeps:
            own = self._in_process.snapshot(replica.life.shard, fragment)
            trainer.load(mixed(self._with_residue(replica, moment, published, sent), own, sync.mix_alpha))
        else:
            trainer.load(self._with_residue(replica, moment, published, sent))
        self._stand_on(replica, fragment, moment.version, published)
        replica.logical_step = max(replica.logical_step, moment.logical_step)
        replica.fix = max(replica.fix, self._here(moment.fix))

    def _with_residue(
        self, replica: _Replica, moment: Adopted, published: Arrays, sent: Mapping[PayloadId, OfferedFragment]
    ) -> Arrays:
        """Return Θ plus the coding residue of the island's work in it, if the island's own parameters do not contain it."""
        merged = None if moment.since is None else sent.get(moment.since)
        if merged is not None and (own := merged.residue()) is not None:
            replica.residues[moment.fragment] = own
        residue = replica.residues.get(moment.fragment)
        return published if residue is None else {name: array + residue[name] for name, array in published.items()}

    def _here(self, fix: ScheduleAnchor) -> ScheduleAnchor:
        """Convert an anchor of the tape to tokens of this specification."""
        return ScheduleAnchor(round(fix.tokens * self._tokens_ratio), fix.step)

    def _stand_on(self, replica: _Replica, fragment: FragmentId, version: Version, published: Arrays) -> None:
        replica.adopted[fragment] = PublishedVersion(version, published)
        replica.base[fragment] = published if self._rebases else {}

    @property
    def _rebases(self) -> bool:
        """True if adoption needs the island's previous base and its offers since."""
        return self._sync.adoption == "rebase"


@dataclass(slots=True)
class _Replica:
    """The state of one incarnation: moments done, inner steps, clock, and by fragment its base and its offers."""

    life: IncarnationTrace
    logical_step: int
    fix: ScheduleAnchor
    done: int = 0
    step_count: int = 0
    base: dict[FragmentId, Arrays] = field(default_factory=dict)
    adopted: dict[FragmentId, PublishedVersion] = field(default_factory=dict)
    residues: dict[FragmentId, Arrays] = field(default_factory=dict)
    sent: dict[FragmentId, dict[PayloadId, OfferedFragment]] = field(default_factory=dict)


def _uses(trace: TrainingTrace) -> Counter[Published]:
    """Return how often each published value will be used."""
    uses: Counter[Published] = Counter()
    for life in trace.lives.values():
        if life.donor is None:
            uses.update((FragmentId(fragment), version) for fragment, version in enumerate(life.versions))
        uses.update((moment.fragment, moment.version) for moment in life.moments if isinstance(moment, Adopted))
    return uses


def _authors(trace: TrainingTrace) -> dict[PayloadId, LifeId]:
    offers = ((moment, life.id) for life in trace.lives.values() for moment in life.moments)
    return {moment.payload: life for moment, life in offers if isinstance(moment, Offered)}
