"""The loop of an island: a replica, a trainer and a thread that takes inner steps back to back.

At each boundary between two steps the loop asks its ``Replica`` what to do, and does it: it loads published versions, takes
snapshots, and puts reports into the outbox. An offer starts a copy and leaves a report; other threads fetch the bytes while
steps continue. The loop waits for nothing. It knows the trainer only by its contract, and nothing of Ray or JAX.

A state is loaded as a whole or not at all, and only by an island that has none or has not trained on it. What happens at a
boundary, and in which order, is decided in ``orchestrator.replica.replica``.
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
from learners.contract import Arrays, Trainer, broken_by, take_step
from learners.handed_over import PublishedFragments
from learners.island_arrays import ArraysPlan, Arrival, HeldPieces, IslandArrays, State, StateRequest
from learners.outbox import Outbox
from learners.profiling import Profiler
from learners.state_transfer import Exports, FetchedState
from learners.step_watch import StepWatch
from orchestrator.core.commands import ChangedSettings
from orchestrator.core.messages import Adopted, Evaluated, Flushed, IslandHoldings, IslandReport, NotEvaluated, Offer
from orchestrator.core.vocabulary import (
    NO_ANCHOR,
    NO_RAMP,
    BatchRamp,
    Epoch,
    FragmentId,
    Incarnation,
    IslandId,
    MergedOffer,
    Schedule,
    ScheduleAnchor,
    StepLimits,
    Version,
)
from orchestrator.errors import InternalError, in_words, is_interrupt
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
"""An island that has stopped stepping waits this long for the versions to measure. Those from a peer may never arrive."""
DRAINING_POLL_S = 0.1
"""An island that drains and waits for publications notices anything else within this time."""
WHOLE = StateRequest()
UNWATCHED = StepLimits(limit_s=None)
NOTHING_ARRIVED: Mapping[FragmentId, Arrival] = MappingProxyType({})
REPORT_EVERY_S = 1.0
"""Longest time between two reports of progress, but for one step. At a kill, as much work is counted as lost time only, for
nobody knows its tokens. Each report is a line of the tape, and twice as many brought decisions nothing."""


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """``fragments[p]`` names the pieces of fragment p; ``interval_steps`` is H, ``router_interval_steps`` the routers' N if
    they are the last fragment; ``mix_alpha`` is α, the weight of the own pieces.
    ``rank`` is this process's rank in an island of several hosts; None for an island of one process.
    ``step_limits`` apply to a loop with a thread of its own.
    ``tokens_per_schedule_step`` are those of an inner step of all islands together. Offers are encoded by ``codec``.
    """

    fragments: tuple[tuple[str, ...], ...]
    interval_steps: int
    adoption: AdoptionRule = "replace"
    mix_alpha: float = 0.5
    report_every_s: float = REPORT_EVERY_S
    codec: CodecName = EXACT
    rank: int | None = None
    step_limits: StepLimits = UNWATCHED
    ramp: BatchRamp = NO_RAMP
    router_interval_steps: int | None = None
    tokens_per_schedule_step: int = field(kw_only=True)

    @property
    def arrays(self) -> ArraysPlan:
        return ArraysPlan(self.fragments, self.adoption, self.mix_alpha, self.codec, self.rank)

    @property
    def policy(self) -> ReplicaPolicy:
        return ReplicaPolicy(
            schedule=Schedule(len(self.fragments), self.interval_steps, self.router_interval_steps),
            adoption=self.adoption,
            tokens_per_schedule_step=self.tokens_per_schedule_step,
            snapshots_max=SNAPSHOTS_MAX[self.adoption],
            exact=self.codec == EXACT,
            ramp=self.ramp,
        )


@dataclass(frozen=True, slots=True)
class EvaluationRequest:
    """Asks to measure Θ at these versions or later ones. Fewer sequences are measured if it would exceed ``limit_s``."""

    global_version: int
    versions: tuple[Version, ...]
    limit_s: float


@dataclass(frozen=True, slots=True)
class Decided:
    """The decisions for a boundary: its plan, what it adopts, the requested cuts, and the step after it."""

    plan: BoundaryPlan
    arrived: Mapping[FragmentId, Arrival]
    cuts: tuple[Hashable, ...]
    schedule_step: int
    lr_ratio: float


class Group(Protocol):
    """The other processes of an island of several hosts, as its loop uses them (``learners.group.ranks``)."""

    def tokens_of(self, schedule_step: int) -> int:
        """Return the tokens of an inner step. They are known before: a boundary is decided during the step before."""
        ...

    def order(self, decided: Decided) -> None:
        """Have every process carry this out at the next boundary, and take the step after it."""
        ...

    def refresh(self) -> None:
        """Find out what every process holds, while none takes steps."""
        ...

    def common_version(self, fragment: FragmentId) -> int:
        """Return the version of the fragment that every other process holds; −1 if they differ."""
        ...

    def promote(self, adoptions: Sequence[AdoptVersion], shard_index: int, cursor: int) -> None:
        """Have the others begin as an island with what they hold and these versions. Raises if that fails in one."""
        ...


class IslandLoop:
    """One incarnation's training. Call one ``load…`` or ``promote``, then ``start``; the rest at any time, from any thread.

    To take the steps in a thread of one's own, call ``open`` instead of ``start``, and then ``advance``.
    """

    def __init__(self, trainer: Trainer, plan: LoopPlan, outbox: Outbox, group: Group | None = None) -> None:
        self._trainer, self._plan, self._outbox, self._group = trainer, plan, outbox, group
        self._changed = threading.Condition()
        """Guards the replica and the arrays that it refers to, for short times only."""
        self._replica = Replica(plan.policy)
        self._arrays = IslandArrays(trainer, plan.arrays, self._changed)
        self._waiting: dict[FragmentId, Publication] = {}
        """In an island of several hosts: publications that have arrived here but perhaps not yet in every process."""
        self._decided: Decided | None = None
        self._evaluation: EvaluationRequest | None = None
        self._evaluation_report: tuple[int, Evaluated | NotEvaluated | None] = (-1, None)
        self._loading = threading.Lock()
        self._stopping, self._ended = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._exports: Exports[StateRequest, State] = Exports()
        self._cuts: Exports[Hashable, Cut] = Exports()
        self._watch, self.profiler = StepWatch(plan.step_limits, outbox.put), Profiler(trainer)
        self._odometer, self._reported_at = Odometer(), monotonic()
        self._last_step_end: float | None = None

    @property
    def fragment_count(self) -> int:
        return len(self._plan.fragments)

    @property
    def held(self) -> HeldPieces:
        """The part of the model that this process holds."""
        return self._arrays.held

    # ── loading a state ───────────────────────────────────────────────────────────────────────────────────────────

    def load(self, arrays: Mapping[str, np.ndarray], versions: Sequence[Version], step: int, cursor: int) -> None:
        """Begin with this process's part of the synchroniser's parameters and a fresh inner optimizer."""
        with self._loading:
            self._require_idle(versions)
            self._arrays.load(arrays, versions, cursor)
            with self._changed:
                self._replica.hold(versions, step)

    def load_peer(self, state: FetchedState, cursor: int) -> None:
        """Begin with a peer's state. Its work that was not contributed is neither counted nor offered by this island."""
        with self._loading:
            self._require_idle(state.versions)
            self._arrays.load_peer(state, cursor)
            with self._changed:
                self._replica.hold(state.versions, state.step)

    def load_saved(self, saved: Restored, cursor: int) -> None:
        """Begin where the checkpoint cut this island. Work that Θ already contains is overwritten; the rest is kept."""
        with self._loading:
            self._require_idle(saved.versions)
            self._arrays.load_saved(saved, cursor)
            with self._changed:
                self._replica.hold_saved(saved.position, saved.versions)

    def promote(self, shard_index: int, cursor: int) -> tuple[tuple[Version, ...], int]:
        """Turn a standby's process into an island's. Returns the versions and the logical step at which it begins.

        It begins with the state that was loaded and what was published since. A second call before ``start`` returns the
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
        """Decode what this process holds of Θ from the fragments' payloads. Raises InvalidPayload."""
        return self._arrays.outer_values(payloads)

    def _require_idle(self, versions: Sequence[Version]) -> None:
        """Refuse before anything changes: a catch-up may be requested twice, and the second must not disturb training."""
        if self._replica.holds_state:
            raise InternalError(detail="an island that has a state was given another one; it keeps the first.")
        self._replica.require_count(versions)

    # ── called by other threads ───────────────────────────────────────────────────────────────────────────────────

    def start(self, anchor: ScheduleAnchor = NO_ANCHOR) -> None:
        """Train until flushed, drained or stopped. A later call cancels a drain, or has no effect."""
        self.open(anchor)
        self._run_in_thread()

    def open(self, anchor: ScheduleAnchor = NO_ANCHOR) -> None:
        """Do the same as ``start``, but the caller takes the steps with ``advance``."""
        with self._changed:
            begins = not self._replica.started
            self._replica.start(anchor)
        if begins:
            self._give_states()

    def adjust(self, lr_ratio: float, interval_steps: int, changed: ChangedSettings) -> None:
        """Offer every so many steps, and step at this ratio of the learning rate, from the next boundary on."""
        with self._changed:
            self._replica.adjust(lr_ratio, interval_steps, changed)

    def drain(self) -> None:
        """Finish the step and take no more; offer all work, again if a version lacks it, then report ``Drained``."""
        with self._changed:
            self._replica.drain()
        self._run_in_thread()

    def flush(self) -> None:
        """Finish the step, offer all work not yet offered, report ``Flushed`` (after every call) and take no more steps."""
        with self._changed:
            self._replica.flush()
        if not self._replica.holds_state or self._ended.is_set():
            self._outbox.put(Flushed())
        else:
            self._run_in_thread()

    def stop(self) -> None:
        """End after the current step without an offer, and wait for the loop's end. Offers can still be fetched."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def receive(
        self,
        publication: Publication,
        since: Version | None,
        checked_digest: str,
        payloads: Sequence[bytes | memoryview],
        epoch: Epoch | None = None,
    ) -> int:
        """Take a publication's bytes (``PublishedFragments.take``) and queue it for adoption at the next boundary.

        Returns the version that is then here, −1 for none. It is below the publication's if the bytes did not lead to it.
        """
        fragment, version = publication.fragment, publication.version
        arrays = self._arrays.published.take(fragment, version, since, checked_digest, payloads, epoch)
        if arrays is not None:
            self._deliver(publication, arrays)
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
        """Queue a published value for adoption at the next boundary, unless it is not newer (``Publication``)."""
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
        """Queue publications that have arrived in every process of the island. Requires ``_changed`` to be held."""
        if self._group is not None:
            for fragment, publication in list(self._waiting.items()):
                if self._group.common_version(fragment) == publication.version:
                    self._replica.publication_arrived(publication)
                    del self._waiting[fragment]

    def take(self, fragment: FragmentId, offer: int) -> memoryview | None:
        """Return the offer's payload, once it is on the host; ``None`` if it was replaced by a newer offer or merged."""
        with self._changed:
            offered = self._arrays.offered(fragment, offer) if self._replica.fetched(fragment, offer) else None
        return None if offered is None else offered.payload()

    def standing_offers(self) -> list[Offer]:
        """Return the latest offer of each fragment, except those whose work is in a version that was adopted."""
        with self._changed:
            return [o for o in self._replica.standing_offers() if self._arrays.offered(o.fragment, o.offer) is not None]

    @property
    def published(self) -> PublishedFragments:
        """The versions of Θ that have arrived in this process."""
        return self._arrays.published

    def holdings(self, island: IslandId, incarnation: Incarnation, epoch: Epoch = Epoch(0)) -> IslandHoldings | None:
        """Return what this island holds of Θ and of its own work; None if it never trained. Fence earlier epochs."""
        self.published.fence(epoch)
        held = self.published.held_versions()
        with self._changed:
            own = (self._replica.position, self._replica.anchor.tokens, self._odometer.stepping_seconds)
            now = (not self._replica.drained and not self._ended.is_set(), self._replica.changed)
            return self.published.holdings((island, incarnation), held, *own, *now) if self._replica.started else None

    def export_state(self, timeout_s: float, request: StateRequest = WHOLE) -> State:
        """Copy the state that a peer needs to begin from here, or this process's part of it.

        The state is from one boundary, so it is consistent, in all processes of an island of several hosts. The copy to the
        host happens in the calling thread. Versions are always those of all fragments. Raises InfrastructureError if this
        island does not train, or reaches no boundary in time.
        """
        return self._exports.ask(request, timeout_s)

    def export_fragments(self, timeout_s: float, cut: str = "") -> list[State]:
        """Return what ``export_state`` returns for each fragment, all at the same boundary. Raises as it does."""
        requests = self._exports.request_all([StateRequest((p,), cut) for p in range(self.fragment_count)])
        return [self._exports.wait(request, timeout_s) for request in requests]

    def request_evaluation(self, request: EvaluationRequest) -> None:
        """Measure Θ at the next boundary at which it is here; ``Evaluated`` or ``NotEvaluated`` follows.

        A later request replaces a waiting one; a repeated request that was answered gets its answer again.
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
        """Return the state at the next boundary, before later publications are adopted. Raises as ``export_state``.

        ``of`` says what the cut is for; the other processes of the island get it, too.
        """
        return self._cuts.request(of)

    # ── the loop's own thread ─────────────────────────────────────────────────────────────────────────────────────

    def _run_in_thread(self) -> None:
        """Start the loop's thread, at most once."""
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
        except BaseException as error:  # report it: nothing else catches what this thread raises
            logging.getLogger(__name__).exception("the island's loop failed")
            self._outbox.put(broken_by(error, self._replica.step))
        finally:
            self._watch.end()
            self._exports.close()
            self._cuts.close()
            self._evaluate_in_thread()

    def advance(self) -> Continuation:
        """Carry out one boundary, and take the inner step after it if one follows, in the calling thread."""
        with self._watch.other_work():
            decided = self._decided or self._decide()
            self._decided = None
            self._carry_out(decided.plan.actions, decided.arrived, decided.cuts)
            if self._evaluation is not None:
                self._evaluate()
            steps = decided.plan.continuation is Continuation.STEP
            self.profiler.boundary(steps=steps)
            if steps and self._group is not None:
                # decide the next boundary now, as if the step were done; the message to the others travels meanwhile
                with self._changed:
                    self._replica.step_taken(self._group.tokens_of(decided.schedule_step))
                self._decided = self._decide()
        if steps:
            self._step(decided.schedule_step, decided.lr_ratio)
        return decided.plan.continuation

    def _decide(self) -> Decided:
        """Decide the next boundary, and tell every process of the island."""
        with self._changed:
            self._note_common()
            # read the cuts under the lock: a marker that arrived before any publication here is seen before it
            cuts = self._cuts.waiting()
            plan = self._replica.boundary(cut=bool(cuts), requests=self._exports.waiting())
            decided = Decided(plan, self._arrays.take_arrived(plan.actions), cuts, *self._replica.next_step)
        if self._group is not None:
            self._group.order(decided)
        return decided

    def give_all(self) -> None:
        """Carry out the last boundary: adopt, offer all work not yet offered, and report ``Flushed``."""
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
        """Take one inner step, and count and time it."""
        self._step(*self._replica.next_step)

    def _step(self, schedule_step: int, lr_ratio: float) -> None:
        began = monotonic()
        with self._watch.step():
            result = take_step(self._trainer, schedule_step, lr_ratio)
        ended = monotonic()
        if self._group is None:
            with self._changed:
                self._replica.step_taken(result.token_count)
        elif result.token_count != (stated := self._group.tokens_of(schedule_step)):
            raise InternalError(detail=f"a step had {result.token_count} tokens, not {stated}.")
        gap = 0.0 if self._last_step_end is None else ended - self._last_step_end
        self._last_step_end = ended
        self._odometer.count(ended - began, gap, result)
        if ended - self._reported_at >= self._plan.report_every_s:
            self._report_progress(self._replica.step)

    # ── Θ on held-out data ────────────────────────────────────────────────────────────────────────────────────────

    def _evaluate(self) -> None:
        """Measure Θ if the requested version is here. The time is reported separately, not as a gap between steps."""
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
            by_byte = (measured.bits_per_byte, measured.sources, measured.preference)
            report = Evaluated(request.global_version, measured.loss, measured.sequence_count, seconds, *by_byte)
        except BaseException as error:  # a failed measurement must not stop training
            if is_interrupt(error):
                raise
            logging.getLogger(__name__).exception("Θ could not be measured")
            report = NotEvaluated(request.global_version, in_words(error))
        if self._last_step_end is not None:
            self._last_step_end += monotonic() - began
        with self._changed:
            self._evaluation_report = (request.global_version, report)
        self._say(report, self._replica.step)

    def _evaluate_in_thread(self) -> None:
        """Measure what is still waiting once it is here, because no boundary follows."""
        if self._evaluation is not None and not self._stopping.is_set():
            threading.Thread(target=self._evaluate_after_end, name="evaluate", daemon=True).start()

    def _evaluate_after_end(self) -> None:
        if self._thread is not None:
            self._thread.join()
        until = monotonic() + LAST_PUBLICATIONS_S
        with self._changed:
            while self._evaluation is not None and self._arrays.published.values_at(self._evaluation.versions) is None:
                if self._stopping.is_set():
                    return
                if monotonic() > until:
                    self._outbox.put(NotEvaluated(self._evaluation.global_version, "this version of Θ did not arrive"))
                    self._evaluation = None
                    return
                self._changed.wait(DRAINING_POLL_S)
        with self._loading:
            self._evaluate()

    # ── actions of a boundary ─────────────────────────────────────────────────────────────────────────────────────

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
                case AdoptVersion(report):
                    self._odometer.adopted()
                    self._arrays.adopt(action, arrived[report.fragment])
                    self._say(action.report, action.report.step)
                case OfferFragment():
                    self._arrays.offer(action)
                    self._say(action.report, action.report.step)
                case ExportState():
                    requests = cast(tuple[StateRequest, ...], action.requests)
                    self._exports.answer(partial(self._arrays.state, at=action), requests)
                case SendReport():
                    self._ended.set()  # first, so that later flushes are answered by ``flush``
                    self._say(action.report, self._replica.step)
                case _:
                    assert_never(action)

    def _cut(self, position: Position, _: Hashable) -> Cut:
        return self._arrays.cut(position)

    def _say(self, report: IslandReport, step: int) -> None:
        """Report it, after the progress so far unless that was reported already.

        An adoption names its tokens itself, so the progress is reported later, with the next offer or by the clock.
        """
        if not isinstance(report, Adopted):
            self._report_progress(step)
        self._outbox.put(report)

    def _report_progress(self, step: int) -> None:
        replica = self._replica
        if self._odometer.is_news(replica.steps_total):
            self._reported_at = monotonic()
            self._outbox.put(self._odometer.report(step, replica.steps_total, replica.tokens_total))
