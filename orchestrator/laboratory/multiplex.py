"""Runs all islands of a job in one process and in virtual time, with the core that decides live.

Inner steps and merges are real. Only time and the network are simulated, by a heap of things to do. One unit of virtual time
is one inner step of an island at full speed:

    at T     deliveries due by T are in the mailboxes. Islands at a boundary adopt what has arrived and offer what is due.
             Contributions arrive, rounds close, merges are applied. Then the islands step
    T + x    the merged fragments arrive, where x is ``transfer_steps`` (with x = 0, before those steps)
    T + d    the step has ended: the next boundary

A run is therefore a function of specification and seed, without a clock, threads or Ray. It measures the effect of the
method on the model (``compare``), not the speed of the service.

Source: arXiv:2604.21428, "event tapes" (real training driven by simulated timing).
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from typing import Any

from learners.contract import Arrays, Trainer
from learners.loop import IslandLoop, LoopPlan
from learners.outbox import Outbox
from orchestrator.accounting.goodput import Goodput
from orchestrator.accounting.statistics import Statistics
from orchestrator.core import effects, events, saving
from orchestrator.core.effects import MergeFragment
from orchestrator.core.events import event_of
from orchestrator.core.messages import CaughtUp, IslandReport, Offer, Progress, Ready, contribution_of
from orchestrator.core.synchroniser import Synchroniser
from orchestrator.core.vocabulary import FIRST_EPOCH, FragmentId, Incarnation, Instant, IslandId, PayloadId
from orchestrator.errors import DataError, InternalError
from orchestrator.parameters import fragment_map, tensors
from orchestrator.parameters.journal import Content, Facts
from orchestrator.parameters.outer_state import OuterState, OuterStep
from orchestrator.parameters.pieces import joined
from orchestrator.parameters.shard import ParameterShard, Unusable
from orchestrator.specification.config import JobSpec
from orchestrator.system.roots import EVERYTHING
from orchestrator.tape.driver import DigestSink, Driver, Sink
from orchestrator.tape.schema import Header, Record

FIRST = Incarnation(1)
MakeTrainer = Callable[[dict[str, Any], int, int], Trainer]
"""The ``create`` function of a trainer module. Arguments: specification as plain data, shard, number of shards."""
Channel = Callable[[IslandId, FragmentId, memoryview], memoryview]
"""What becomes of a contribution on its way to the synchroniser."""


def exact_channel(island: IslandId, fragment: FragmentId, content: memoryview) -> memoryview:
    return content


class Turn(IntEnum):
    """The order of things due at the same instant."""

    EVENT = 0
    DELIVERY = 1
    BOUNDARY = 2
    STEP = 3


@dataclass(slots=True)
class Outcome:
    """The result of a run. ``curve`` holds (tokens trained, held-out loss) of every evaluation, the final one last."""

    parameters: Arrays
    digest: str
    tape_digest: str
    curve: list[tuple[int, float]] = field(default_factory=list)
    goodput: dict[str, Any] = field(default_factory=dict)
    statistics: dict[str, Any] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        return self.curve[-1][1]


class MultiplexedJob:
    """One job, from its first placement to its last merge. ``run`` yields the tokens trained, for progress.

    ``step_durations`` are the inner step times by island, 1 by default. Single steps vary by the ratio ``speed_spread``
    either way. ``recorder``, if given, receives every record of the job's tape. ``cut`` and ``channel`` replace how the
    product cuts models and sends contributions.
    """

    def __init__(
        self,
        spec: JobSpec,
        make_trainer: MakeTrainer,
        *,
        transfer_steps: float,
        step_durations: Sequence[float] = (),
        speed_spread: float = 0.0,
        recorder: Sink | None = None,
        cut: fragment_map.CutModel = fragment_map.build,
        channel: Channel = exact_channel,
    ) -> None:
        self._transfer = transfer_steps
        self._spread = speed_spread
        policy = spec.policy()
        self._held_out_sequence_count = spec.evaluation.sequences
        self._in_process = InProcessTrainers(spec, make_trainer, cut)
        self._channel = channel
        self._outer = self._in_process.outer
        plan = LoopPlan(
            fragments=self._in_process.fragments,
            interval_steps=policy.sync_interval_steps,
            router_interval_steps=policy.router_interval_steps,
            adoption=spec.synchroniser.adoption,
            mix_alpha=spec.synchroniser.mix_alpha,
            report_every_s=0.0,
            tokens_per_schedule_step=spec.tokens_per_schedule_step,
            ramp=spec.batch_ramp,
            codec=spec.synchroniser.wire.up,
        )
        self._islands: dict[IslandId, _Island] = {}
        for index, (island, trainer) in enumerate(zip(policy.islands, self._in_process.trainers, strict=True)):
            outbox = Outbox()
            loop = IslandLoop(trainer, plan, outbox)
            chance = random.Random(f"{spec.seed} {index}")
            duration = step_durations[index] if step_durations else 1.0
            self._islands[island.island] = _Island(island.island, loop, outbox, chance, duration)
        self._goodput, self._statistics = Goodput(policy), Statistics(policy)
        self._sink = DigestSink(Header(spec.name, policy))
        sink = self._sink if recorder is None else _Both(self._sink, recorder)
        self._driver = Driver(Synchroniser(policy), (self._goodput, self._statistics), sink)
        self._heap: list[tuple[Instant, Turn, int, Callable[[], None]]] = []
        self._serial = 0
        self._now: Instant = 0.0
        self._outcome: Outcome | None = None
        self._curve: list[tuple[int, float]] = []

    def run(self) -> Iterator[int]:
        """Train to the end of the budget. ``outcome`` is set afterwards."""
        parameters, last = self._outer.parameters(), self._in_process.fragments[-1]
        of_routers = sum(parameters[name].size for name in last) if self._goodput.policy.router_interval_steps else 0
        self._happen(events.OuterStateSeeded(0.0, sum(a.size for a in parameters.values()), "", of_routers))
        self._happen(events.JobStarted(0.0))
        while self._heap and self._outcome is None:
            self._now, turn, _, act = heapq.heappop(self._heap)
            act()
            if turn is Turn.STEP:
                yield sum(i.tokens for i in self._islands.values())
        if self._outcome is None:
            raise InternalError(detail="The multiplexed job has nothing left to do but has not ended.")

    @property
    def outcome(self) -> Outcome:
        assert self._outcome is not None
        return self._outcome

    # ── time ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _later(self, delay: float, turn: Turn, act: Callable[[], None]) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (self._now + delay, turn, self._serial, act))

    def _happen(self, event: events.Event) -> None:
        for effect in self._driver.step(event):
            effects.carry_out(effect, self)

    def _soon(self, event_at: Callable[[Instant], events.Event], delay: float = 0.0) -> None:
        self._later(delay, Turn.EVENT, lambda: self._happen(event_at(self._now)))

    # ── islands ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _boundary(self, island: _Island) -> None:
        if island.running:
            island.loop.adopt_mail()
            island.loop.offer_due()
            self._read(island)
            self._later(0.0, Turn.STEP, lambda: self._step(island))

    def _step(self, island: _Island) -> None:
        if island.running:
            island.loop.adopt_mail()
            self._read(island)
            island.loop.train()
            duration = island.step_duration * (1.0 + self._spread * island.chance.uniform(-1.0, 1.0))
            island.stepping_seconds += duration
            self._later(duration, Turn.BOUNDARY, lambda: self._boundary(island))

    def _read(self, island: _Island) -> None:
        """Receive the island's reports at once: reports and payloads take no virtual time on their way in."""
        for report in island.outbox.take(0.0):
            self._happen(self._event_of(island, report))

    def _event_of(self, island: _Island, report: IslandReport) -> events.Event:
        """Return the event of a report as in a live job, except that time is virtual and an offer's bytes arrive at once."""
        if isinstance(report, Offer):
            content = island.loop.take(report.fragment, report.offer)
            assert content is not None
            contribution = contribution_of(report, island.id, FIRST)
            content = self._channel(island.id, report.fragment, content)
            self._in_process.receive(contribution.payload, report.fragment, content)
            return events.ContributionArrived(self._now, contribution)
        if isinstance(report, Progress):
            island.tokens = report.tokens_total
            report = replace(
                report,
                stepping_seconds=island.stepping_seconds,
                step_seconds_median=island.step_duration,
                gap_max_seconds=island.step_duration * (1.0 + self._spread),
            )
        return event_of(report, self._now, island.id, FIRST)

    # ── core.effects.Shell ────────────────────────────────────────────────────────────────────────────────────────

    def set_timer(self, effect: effects.SetTimer) -> None:
        fired = (effect.timer, effect.serial)
        self._soon(lambda at: events.TimerFired(at, *fired), effect.due_at - self._now)

    def merge_fragment(self, effect: effects.MergeFragment) -> None:
        facts = self._in_process.merge(effect)
        self._soon(
            lambda at: events.MergeCompleted(
                at,
                effect.fragment,
                effect.version,
                facts.digest,
                0.0,
                router_distance=facts.router_distance,
                router_travel=facts.router_travel,
            )
        )

    def publish_fragment(self, effect: effects.PublishFragment) -> None:
        arrays = self._in_process.published(effect.fragment)

        def deliver(recipient: effects.Recipient) -> None:
            loop = self._islands[recipient.island].loop
            terms = (recipient.merged_offer, effect.fix)
            loop.deliver(effect.fragment, effect.version, effect.step, arrays, *terms)

        for recipient in effect.recipients:
            self._later(self._transfer, Turn.DELIVERY, partial(deliver, recipient))

    def release_payload(self, effect: effects.ReleasePayload) -> None:
        self._in_process.shard.release(effect.payload)

    def place_island(self, effect: effects.PlaceIsland) -> None:
        life = (effect.island, effect.incarnation)
        self._soon(lambda at: events.IslandPlaced(at, *life, "here", 0))
        self._soon(lambda at: events.IslandReported(at, *life, Ready(1, 0.0)))

    def begin_catch_up(self, effect: effects.BeginCatchUp) -> None:
        island = self._islands[effect.island]
        island.loop.load(self._in_process.whole_state(), self._outer.versions, 0, effect.cursor)
        report = CaughtUp(None, self._outer.versions, 0, 0.0)
        self._soon(lambda at: events.IslandReported(at, island.id, FIRST, report))

    def start_training(self, effect: effects.StartTraining) -> None:
        island = self._islands[effect.island]
        island.running = True
        self._later(0.0, Turn.BOUNDARY, lambda: self._boundary(island))

    def flush_island(self, effect: effects.FlushIsland) -> None:
        self._later(0.0, Turn.BOUNDARY, lambda: self._flush(self._islands[effect.island]))

    def adjust_island(self, effect: effects.AdjustIsland) -> None:
        """See ``drain_island``."""

    def drain_island(self, effect: effects.DrainIsland) -> None:
        """Do nothing: there are no operators who could ask for it."""

    def kill_island(self, effect: effects.KillIsland) -> None:
        """See ``drain_island``."""

    def resolve_command(self, effect: effects.ResolveCommand) -> None:
        """See ``drain_island``."""

    def stop_island(self, effect: effects.StopIsland) -> None:
        """Do nothing: an island is its loop, which ends with the job and continues as its next incarnation."""

    def evaluate(self, effect: effects.Evaluate) -> None:
        loss = self._in_process.evaluate()
        self._curve.append((sum(i.tokens for i in self._islands.values()), loss))
        self._soon(
            lambda at: events.EvaluationCompleted(at, effect.global_version, loss, self._held_out_sequence_count)
        )

    def begin_checkpoint(self, effect: saving.BeginCheckpoint) -> None:
        """Do nothing: a run is repeated from its seed instead of resumed, so nothing is saved."""

    def seal_checkpoint(self, effect: saving.SealCheckpoint) -> None:
        """See ``begin_checkpoint``."""

    def drop_checkpoint(self, effect: saving.DropCheckpoint) -> None:
        """See ``begin_checkpoint``."""

    def restore_fragments(self, effect: saving.RestoreFragments) -> None:
        """See ``begin_checkpoint``."""

    def hand_over(self, effect: saving.HandOver) -> None:
        """See ``begin_checkpoint``."""

    def finish_job(self, effect: effects.FinishJob) -> None:
        self._goodput.check()
        self._outcome = Outcome(
            parameters=joined(self._outer.parameters()),
            digest=self._in_process.digest(),
            tape_digest=self._sink.digest.hex(),
            curve=self._curve,
            goodput=self._goodput.summary(self._now),
            statistics=self._statistics.summary(self._now),
        )

    def _flush(self, island: _Island) -> None:
        """Stop stepping and offer what is left, at the boundary."""
        if island.running:
            island.running = False
            island.loop.give_all()
            self._read(island)


@dataclass(frozen=True, slots=True)
class _Both:
    """A sink that passes each record to two others."""

    first: Sink
    second: Sink

    def append(self, record: Record) -> None:
        self.first.append(record)
        self.second.append(record)


@dataclass(slots=True)
class _Island:
    id: IslandId
    loop: IslandLoop
    outbox: Outbox
    chance: random.Random
    step_duration: float
    running: bool = False
    tokens: int = 0
    stepping_seconds: float = 0.0


class InProcessTrainers:
    """The trainers of all islands, and Θ, built as in the live service, so that a merge gives the same bits.

    ``MultiplexedJob`` (with the core) or ``TapeTraining`` (with a tape) decides who trains when and what is merged.
    ``trainers[m]`` trains on data shard m, ``fragments[p]`` are fragment p's tensors, and ``shard`` merges.

    ``outer`` is Θ, at version 0 at first. Nothing is journalled: an interrupted run starts again.
    """

    def __init__(
        self, spec: JobSpec, make_trainer: MakeTrainer, cut: fragment_map.CutModel = fragment_map.build
    ) -> None:
        sync, count = spec.synchroniser, spec.island_count
        self.trainers: Sequence[Trainer] = [
            make_trainer(spec.island_document(section) | {"roots": EVERYTHING}, index, count)
            for index, section in enumerate(spec.island_sections().values())
        ]
        shapes, roles = self.trainers[0].tensor_shapes(), self.trainers[0].roles()
        if sync.routers_apart:
            self.fragments = fragment_map.with_routers_apart(shapes, sync.fragments, roles, cut)
        else:
            self.fragments = cut(shapes, sync.fragments, roles)
        initial = fragment_map.pieces_of(self.trainers[0].initial_parameters(), self.fragments)
        self.outer = OuterState(initial, self.fragments, OuterStep.of(sync), roles)
        self.codec = sync.wire.up
        self.shard = ParameterShard(_Unjournalled(), FIRST_EPOCH, lambda _, work: work())
        self.shard.seed(self.outer, {})

    def receive(self, payload: PayloadId, fragment: FragmentId, content: memoryview) -> None:
        """Receive a contribution. Raises DataError if it is unusable."""
        received = self.shard.receive(payload, fragment, content)
        if isinstance(received, Unusable):
            raise DataError(detail=f"The contribution {payload} is {received.reason}: {received.detail}")

    def merge(self, order: MergeFragment) -> Facts:
        """Take the outer step and return its facts."""
        return self.shard.merge(order).facts

    def published(self, fragment: FragmentId) -> Arrays:
        """Return the fragment's newest version as islands receive it."""
        return self.outer.fragment(fragment)

    def whole_state(self) -> Arrays:
        """Return Θ as an island receives it from the synchroniser."""
        return self.outer.parameters()

    def snapshot(self, island: int, fragment: FragmentId) -> Arrays:
        """Return the island's current parameters of the fragment."""
        return self.trainers[island].snapshot(self.fragments[fragment]).arrays()

    def evaluate(self) -> float:
        """Return Θ's mean loss on the held-out split, in nats per token."""
        return self.trainers[0].evaluate(self.outer.parameters()).loss

    def digest(self) -> str:
        """Return a digest that identifies Θ bit for bit."""
        return tensors.digest(self.outer.parameters())


class _Unjournalled:
    def append(self, facts: Facts, content: Content) -> None:
        """Discard the entry."""
