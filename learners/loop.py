"""The loop of an island: a replica with a trainer and a thread, which takes inner steps back to back.

At each boundary between two steps the loop asks its ``Replica`` what is to be done and does it: it loads what was
published, takes snapshots, and puts reports into the outbox. An offer starts a copy and leaves a report; the bytes are
fetched by other threads while steps go on. The loop waits for nobody. It knows the trainer by its contract only, and
nothing of Ray or JAX: calls come in from any thread, reports go out through the outbox.

A state is taken whole or not at all, and only by an island that has none, or has not trained on it. What is decided, and in
which order, is ``orchestrator.replica.replica``'s business.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from types import MappingProxyType
from typing import Protocol, assert_never, cast

import numpy as np

from learners.checkpointing import Cut, Restored
from learners.contract import Arrays, Trainer, broken_by
from learners.island_arrays import ArraysPlan, Arrival, HeldPieces, IslandArrays, State, StateRequest
from learners.outbox import Outbox
from learners.state_transfer import Exports, FetchedState
from learners.step_watch import StepWatch
from orchestrator.core.messages import Evaluated, Flushed, IslandReport, NotEvaluated, Offer
from orchestrator.core.vocabulary import NO_ANCHOR, FragmentId, MergedOffer, ScheduleAnchor, StepLimits, Version
from orchestrator.errors import InternalError, in_words
from orchestrator.parameters.codec.registry import EXACT, CodecName
from orchestrator.replica.replica import (
    Action,
    AdoptVersion,
    BoundaryPlan,
    Continuation,
    CutState,
    ExportState,
    OfferFragment,
    Position,
    Publication,
    Replica,
    ReplicaPolicy,
    SendReport,
)
from orchestrator.replica.work import SNAPSHOTS_MAX, AdoptionRule, Odometer

LAST_PUBLICATIONS_S = 10.0
"""So long an island that steps no more waits for the versions that it is to measure; one from a peer may never get them."""
DRAINING_POLL_S = 0.1
"""How soon an island that drains, and waits for publications, notices anything else."""
WHOLE = StateRequest()
UNWATCHED = StepLimits(limit_s=None)
NOTHING_ARRIVED: Mapping[FragmentId, Arrival] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """``fragments[p]`` names the pieces of fragment p; ``interval_steps`` is H; ``mix_alpha`` α weighs one's own.

    ``rank`` is this process's in an island of many hosts; None: it is alone.
    ``step_limits`` are those of a loop that has a thread of its own.
    ``tokens_per_schedule_step`` are those of an inner step of all islands together. Offers travel in ``codec``.
    """

    fragments: tuple[tuple[str, ...], ...]
    interval_steps: int
    adoption: AdoptionRule = "replace"
    mix_alpha: float = 0.5
    report_every_s: float = 0.5
    codec: CodecName = EXACT
    rank: int | None = None
    step_limits: StepLimits = UNWATCHED
    tokens_per_schedule_step: int = field(kw_only=True)

    @property
    def arrays(self) -> ArraysPlan:
        return ArraysPlan(self.fragments, self.adoption, self.mix_alpha, self.codec, self.rank)

    @property
    def policy(self) -> ReplicaPolicy:
        return ReplicaPolicy(
            fragment_count=len(self.fragments),
            interval_steps=self.interval_steps,
            adoption=self.adoption,
            tokens_per_schedule_step=self.tokens_per_schedule_step,
            snapshots_max=SNAPSHOTS_MAX[self.adoption],
            exact=self.codec == EXACT,
        )


@dataclass(frozen=True, slots=True)
class EvaluationRequest:
    """Measure Θ at these versions, or later ones. One of more than ``limit_s`` measures fewer sequences."""

    global_version: int
    versions: tuple[Version, ...]
    limit_s: float


@dataclass(frozen=True, slots=True)
class Decided:
    """A boundary as it was decided: its plan, what it adopts, whose cuts it makes, and the schedule step behind it."""

    plan: BoundaryPlan
    arrived: Mapping[FragmentId, Arrival]
    cuts: tuple[Hashable, ...]
    schedule_step: int


class Group(Protocol):
    """The other processes of an island of many hosts, as its loop sees them (``learners.group.leader``)."""

    tokens_per_step: int
    """Of an inner step of the island: a boundary is decided while the step before it goes on."""

    def order(self, decided: Decided) -> None:
        """Have every process carry this out at the next boundary, and take the step behind it."""
        ...

    def refresh(self) -> None:
        """Learn what lies ready everywhere, while nobody steps."""
        ...

    def common_version(self, fragment: FragmentId) -> int:
        """The version of the fragment that lies ready in every other process; −1 where it is not the same in all."""
        ...

    def promote(self, adoptions: Sequence[AdoptVersion], shard_index: int, cursor: int) -> None:
        """Have the others begin as an island, from what they hold and these versions. Raises what fails there."""
        ...


class IslandLoop:
    """One incarnation's training. ``load`` or its like once, then ``start``; all else at any time, from any thread.

    Whoever wants the steps taken in its own thread calls ``open`` in the place of ``start``, and then ``advance``.
    """

    def __init__(self, trainer: Trainer, plan: LoopPlan, outbox: Outbox, group: Group | None = None) -> None:
        self._trainer, self._plan, self._outbox, self._group = trainer, plan, outbox, group
        self._changed = threading.Condition()
        """Guards the replica and the arrays that are named to it, for moments only."""
        self._replica = Replica(plan.policy)
        self._arrays = IslandArrays(trainer, plan.arrays, self._changed)
        self._waiting: dict[FragmentId, Publication] = {}
        """Of an island of many hosts: what has come here, and perhaps not yet everywhere."""
        self._decided: Decided | None = None
        self._evaluation: EvaluationRequest | None = None
        self._evaluation_report: tuple[int, Evaluated | NotEvaluated | None] = (-1, None)
        self._loading = threading.Lock()
        self._stopping, self._ended = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._exports: Exports[StateRequest, State] = Exports()
        self._cuts: Exports[Hashable, Cut] = Exports()
        self._odometer = Odometer()
        self._watch = StepWatch(plan.step_limits, outbox.put)
        self._reported_at = monotonic()
        self._last_step_end: float | None = None

    @property
    def fragment_count(self) -> int:
        return len(self._plan.fragments)

    @property
    def held(self) -> HeldPieces:
        """What this process has of the model."""
        return self._arrays.held

    # ── a state to begin from ─────────────────────────────────────────────────────────────────────────────────────

    def load(self, arrays: Mapping[str, np.ndarray], versions: Sequence[Version], step: int, cursor: int) -> None:
        """Begin from the synchroniser's parameters, of what is here, with a fresh inner optimizer."""
        with self._loading:
            self._require_idle(versions)
            self._arrays.load(arrays, versions, cursor)
            with self._changed:
                self._replica.hold(versions, step)

    def load_peer(self, state: FetchedState, cursor: int) -> None:
        """Begin from what peers gave. Their uncontributed work is not ours to count, or to keep."""
        with self._loading:
            self._require_idle(state.versions)
            self._arrays.load_peer(state, cursor)
            with self._changed:
                self._replica.hold(state.versions, state.step)

    def load_saved(self, saved: Restored, cursor: int) -> None:
        """Begin where the checkpoint cut this island. Work that Θ has moved past is overwritten, the rest goes on."""
        with self._loading:
            self._require_idle(saved.versions)
            self._arrays.load_saved(saved, cursor)
            with self._changed:
                self._replica.hold_saved(saved.position, saved.versions)

    def promote(self, shard_index: int, cursor: int) -> tuple[tuple[Version, ...], int]:
        """Make a standby's process an island's; return the versions and the logical step that it begins from.

        It begins from the state that was loaded and what was published since. Asked again before ``start``, it returns the
        same.
        """
        with self._loading:
            if self._group is not None:
                self._group.refresh()
            with self._changed:
                self._note_common()
                adoptions = self._replica.promote()
                arrived = self._arrays.take_arrived(adoptions)
                versions, step = self._replica.versions, self._replica.step
            if self._group is not None:
                self._group.promote(adoptions, shard_index, cursor)
            self._arrays.promote(adoptions, arrived, shard_index, cursor)
            return versions, step

    def outer_values(self, payloads: Sequence[bytes | memoryview]) -> Arrays:
        """What is here of Θ, whose fragments these payloads are. Raises InvalidPayload."""
        return self._arrays.outer_values(payloads)

    def _require_idle(self, versions: Sequence[Version]) -> None:
        """Before anything is changed: a catch-up may be asked twice, and the second must not touch who trains already."""
        if self._replica.holds_state:
            raise InternalError(detail="an island was given a state while it has one: it keeps the first that came.")
        self._replica.require_count(versions)

    # ── asked by other threads ────────────────────────────────────────────────────────────────────────────────────

    def start(self, anchor: ScheduleAnchor = NO_ANCHOR) -> None:
        """Train until flushed, drained or stopped. Asked again, it calls a drain off, or changes nothing."""
        self.open(anchor)
        self._run_in_thread()

    def open(self, anchor: ScheduleAnchor = NO_ANCHOR) -> None:
        """As ``start``, but steps are taken by whoever calls ``advance``."""
        with self._changed:
            begins = not self._replica.started
            self._replica.start(anchor)
        if begins:
            self._give_states()

    def drain(self) -> None:
        """Finish the step and step no more; offer all work, again what a version lacks, then say ``Drained``."""
        with self._changed:
            self._replica.drain()
        self._run_in_thread()

    def flush(self) -> None:
        """Finish the step, offer all work not yet offered, say ``Flushed`` (whenever asked) and step no more. Returns."""
        with self._changed:
            self._replica.flush()
        if not self._replica.holds_state or self._ended.is_set():
            self._outbox.put(Flushed())
        else:
            self._run_in_thread()

    def stop(self) -> None:
        """End after the present step, offering nothing; returns when the loop has ended. Offers stay takeable."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def receive(
        self,
        publication: Publication,
        since: Version | None,
        checked_digest: str,
        payloads: Sequence[bytes | memoryview],
    ) -> int:
        """Take a publication's bytes (``PublishedFragments.take``) and have it adopted at the next boundary.

        Returns the version that is here now, −1 for none: below the publication's if the bytes did not lead to it.
        """
        fragment, version = publication.fragment, publication.version
        arrays = self._arrays.published.take(fragment, version, since, checked_digest, payloads)
        if arrays is not None:
            self._deliver(publication, arrays)
        return self._arrays.published.version(fragment)

    def published_version(self, fragment: FragmentId) -> int:
        """The version of Θ's fragment that is here, adopted yet or not; −1 for none."""
        return self._arrays.published.version(fragment)

    def deliver(
        self,
        fragment: FragmentId,
        version: Version,
        step: int,
        arrays: Arrays,
        merged_offer: MergedOffer = 0,
        anchor: ScheduleAnchor = NO_ANCHOR,
    ) -> None:
        """Have a published value adopted at the next boundary, unless it is no news (``Publication``)."""
        self._arrays.published.hold(fragment, version, arrays)
        self._deliver(Publication(fragment, version, step, merged_offer, anchor), arrays)

    def _deliver(self, publication: Publication, arrays: Arrays) -> None:
        fragment = publication.fragment
        with self._changed:
            mode = self._replica.fragments[fragment].load_mode(publication.merged_offer, self._plan.adoption)
            likely = mode if self._replica.started else None
        self._arrays.arrive(fragment, publication.version, arrays, likely)
        with self._changed:
            if self._group is not None:
                self._waiting[fragment] = publication
            elif self._replica.publication_arrived(publication):
                self._changed.notify_all()
                self._arrays.forget_older(fragment)

    def _note_common(self) -> None:
        """Under the lock: what has come to every process of the island may be adopted."""
        if self._group is not None:
            for fragment, publication in list(self._waiting.items()):
                if self._group.common_version(fragment) == publication.version:
                    self._replica.publication_arrived(publication)
                    del self._waiting[fragment]

    def take(self, fragment: FragmentId, offer: int) -> memoryview | None:
        """The offer's payload, once it is on the host; ``None`` if a newer offer replaced it, or it was merged."""
        with self._changed:
            fetched = self._replica.fetched(fragment, offer)
            offered = self._arrays.offered(fragment, offer) if fetched else None
        return None if offered is None else offered.payload()

    def standing_offers(self) -> list[Offer]:
        """The latest offer of each fragment, but for those whose work is in a version that was adopted."""
        with self._changed:
            standing = self._replica.standing_offers()
            return [offer for offer in standing if self._arrays.offered(offer.fragment, offer.offer) is not None]

    def export_state(self, timeout_s: float, request: StateRequest = WHOLE) -> State:
        """The state that a peer needs to begin from here, or the part of it that this process gives.

        Taken at one boundary, so it is consistent, and in an island of many hosts the same in all of its processes; the
        copy to the host happens in the calling thread. Versions are always those of all fragments.
        Raises InfrastructureError when this island does not train, or reaches no boundary in time.
        """
        return self._exports.ask(request, timeout_s)

    def export_fragments(self, timeout_s: float, cut: str = "") -> list[State]:
        """What ``export_state`` gives of each fragment, all at the same boundary. Raises as that one."""
        requests = self._exports.request_all([StateRequest((p,), cut) for p in range(self.fragment_count)])
        return [self._exports.wait(request, timeout_s) for request in requests]

    def request_evaluation(self, request: EvaluationRequest) -> None:
        """Measure Θ at the next boundary at which it is here; ``Evaluated`` or ``NotEvaluated`` follows.

        A later request takes the place of one that waits; one that was answered gets its answer again.
        """
        with self._changed:
            begun, report = self._evaluation_report
            if request.global_version != begun:
                self._evaluation = request
        if request.global_version == begun and report is not None:
            self._outbox.put(report)
        elif self._ended.is_set():
            self._evaluate_in_thread()

    def request_cut(self, of: Hashable = None) -> Future[Cut]:
        """The state at the next boundary, before what is delivered from now on is adopted; raises as ``export_state``.

        ``of`` is what the cut is for, which the other processes of the island learn.
        """
        return self._cuts.request(of)

    # ── the loop's own thread ─────────────────────────────────────────────────────────────────────────────────────

    def _run_in_thread(self) -> None:
        """At most one thread in the loop's life."""
        with self._changed:
            if self._thread is not None:
                return
            self._give_states()
            self._watch.begin()
            self._thread = threading.Thread(target=self._run, name="island-loop", daemon=True)
            self._thread.start()

    def _give_states(self) -> None:
        self._exports.open()
        self._cuts.open()

    def _run(self) -> None:
        try:
            continuation = Continuation.STEP
            while not self._stopping.is_set() and continuation is not Continuation.END:
                continuation = self.advance()
                if continuation is Continuation.AWAIT_PUBLICATION:
                    with self._changed:
                        self._changed.wait_for(lambda: self._replica.has_publications, DRAINING_POLL_S)
        except (Exception, SystemExit) as error:  # it must be reported: nothing catches what this thread raises
            logging.getLogger(__name__).exception("the island's loop failed")
            self._outbox.put(broken_by(error, self._replica.step))
        finally:
            self._watch.end()
            self._exports.close()
            self._cuts.close()
            self._evaluate_in_thread()

    def advance(self) -> Continuation:
        """One boundary, and the inner step after it if one follows, in the calling thread."""
        with self._watch.other_work():
            decided = self._decided or self._decide()
            self._decided = None
            self._carry_out(decided.plan.actions, decided.arrived, decided.cuts)
            if self._evaluation is not None:
                self._evaluate()
            steps = decided.plan.continuation is Continuation.STEP
            if steps and self._group is not None:
                # the next boundary is decided here, as if the step were done, and the others learn of it meanwhile
                with self._changed:
                    self._replica.step_taken(self._group.tokens_per_step)
                self._decided = self._decide()
        if steps:
            self._step(decided.schedule_step)
        return decided.plan.continuation

    def _decide(self) -> Decided:
        """The next boundary, of which every process of the island hears."""
        with self._changed:
            self._note_common()
            # the cuts are looked at under the lock: a marker that came before any publication here is seen before it
            cuts = self._cuts.waiting()
            plan = self._replica.boundary(cut=bool(cuts), requests=self._exports.waiting())
            decided = Decided(plan, self._arrays.take_arrived(plan.actions), cuts, self._replica.schedule_step)
        if self._group is not None:
            self._group.order(decided)
        return decided

    def give_all(self) -> None:
        """The last boundary: adopt, offer all work not yet offered, and say ``Flushed``."""
        with self._changed:
            self._replica.flush()
        self.advance()

    def adopt_mail(self) -> None:
        """Adopt the publications that have arrived."""
        with self._changed:
            cuts = self._cuts.waiting()
            actions = self._replica.adopt(cut=bool(cuts))
            arrived = self._arrays.take_arrived(actions)
        self._carry_out(actions, arrived, cuts)

    def offer_due(self) -> None:
        """Offer the fragments whose due point the logical clock has passed."""
        with self._changed:
            actions = self._replica.offer_due()
        self._carry_out(actions)

    def train(self) -> None:
        """One inner step, measured and counted."""
        self._step(self._replica.schedule_step)

    def _step(self, schedule_step: int) -> None:
        began = monotonic()
        with self._watch.step():
            result = self._trainer.step(schedule_step)
        ended = monotonic()
        if self._group is None:
            with self._changed:
                self._replica.step_taken(result.token_count)
        elif result.token_count != self._group.tokens_per_step:
            raise InternalError(detail=f"a step of {self._group.tokens_per_step} tokens was {result.token_count}.")
        gap = 0.0 if self._last_step_end is None else ended - self._last_step_end
        self._last_step_end = ended
        self._odometer.count(ended - began, gap)
        self._odometer.loss, self._odometer.flaws = result.loss, result.flaws
        if ended - self._reported_at >= self._plan.report_every_s:
            self._report_progress(self._replica.step)

    # ── Θ on held-out data ────────────────────────────────────────────────────────────────────────────────────────

    def _evaluate(self) -> None:
        """Measure Θ if it is here as it is wanted. The time counts as no gap between steps: it is reported as what it is."""
        with self._changed:
            request = self._evaluation
            arrays = None if request is None else self._arrays.published.values_at(request.versions)
            if request is None or arrays is None:
                return
            self._evaluation, self._evaluation_report = None, (request.global_version, None)
        began = monotonic()
        report: Evaluated | NotEvaluated
        try:
            measured = self._trainer.evaluate(arrays, request.limit_s)
            seconds = monotonic() - began
            by_byte = (measured.bits_per_byte, measured.sources)
            report = Evaluated(request.global_version, measured.loss, measured.sequence_count, seconds, *by_byte)
        except (Exception, SystemExit) as error:  # training does not depend on being watched
            logging.getLogger(__name__).exception("Θ cannot be measured here")
            report = NotEvaluated(request.global_version, in_words(error))
        if self._last_step_end is not None:
            self._last_step_end += monotonic() - began
        with self._changed:
            self._evaluation_report = (request.global_version, report)
        self._say(report, self._replica.step)

    def _evaluate_in_thread(self) -> None:
        """No boundary follows: what waits to be measured is measured once it is here."""
        if self._evaluation is not None and not self._stopping.is_set():
            threading.Thread(target=self._evaluate_after_end, name="evaluate", daemon=True).start()

    def _evaluate_after_end(self) -> None:
        if self._thread is not None:
            self._thread.join()
        until = monotonic() + LAST_PUBLICATIONS_S
        with self._changed:
            while (request := self._evaluation) is not None and self._arrays.published.values_at(
                request.versions
            ) is None:
                if self._stopping.is_set():
                    return
                if monotonic() > until:
                    self._evaluation = None
                    self._outbox.put(NotEvaluated(request.global_version, "Θ is not here as it is"))
                    return
                self._changed.wait(DRAINING_POLL_S)
        with self._loading:
            self._evaluate()

    # ── what a boundary asks for ──────────────────────────────────────────────────────────────────────────────────

    def _carry_out(
        self,
        actions: Sequence[Action],
        arrived: Mapping[FragmentId, Arrival] = NOTHING_ARRIVED,
        cuts: tuple[Hashable, ...] = (),
    ) -> None:
        for action in actions:
            match action:
                case CutState():
                    self._cuts.answer(partial(self._cut, action.position), cuts)
                case AdoptVersion():
                    self._arrays.adopt(action, arrived[action.report.fragment])
                    self._say(action.report, action.report.step)
                case OfferFragment():
                    self._arrays.offer(action)
                    self._say(action.report, action.report.step)
                case ExportState():
                    requests = cast(tuple[StateRequest, ...], action.requests)
                    self._exports.answer(partial(self._arrays.state, at=action), requests)
                case SendReport():
                    self._ended.set()  # first: from now on it is ``flush`` that reports to whoever flushes again
                    self._say(action.report, self._replica.step)
                case _:
                    assert_never(action)

    def _cut(self, position: Position, _: Hashable) -> Cut:
        return self._arrays.cut(position)

    def _say(self, report: IslandReport, step: int) -> None:
        """Report it, and before it the progress so far, unless that was reported already."""
        self._report_progress(step)
        self._outbox.put(report)

    def _report_progress(self, step: int) -> None:
        replica = self._replica
        if self._odometer.is_news(replica.steps_total):
            self._reported_at = monotonic()
            self._outbox.put(self._odometer.report(step, replica.steps_total, replica.tokens_total))
