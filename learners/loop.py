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
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, assert_never

import numpy as np

from learners.adoption import mixed, update
from learners.checkpointing import Cut, Restored
from learners.contract import Arrays, Snapshot, Trainer
from learners.exports import Exports, require_numbers
from learners.failure import broken_by
from learners.offered import OfferedFragment, PublishedVersion
from learners.outbox import Outbox
from learners.published import PublishedFragments
from learners.state_fetch import FetchedState, Fragments
from orchestrator.core.messages import Evaluated, Flushed, IslandReport, NotEvaluated, Offer
from orchestrator.core.vocabulary import NO_ANCHOR, FragmentId, ScheduleAnchor, Version
from orchestrator.errors import InternalError
from orchestrator.parameters.codec.registry import EXACT, CodecName
from orchestrator.replica.odometer import Odometer
from orchestrator.replica.replica import (
    Action,
    AdoptVersion,
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
from orchestrator.replica.work import SNAPSHOTS_MAX, AdoptionRule, Mix, Rebase, Replace

LAST_PUBLICATIONS_S = 10.0
"""So long an island that steps no more waits for the versions that it is to measure; one from a peer may never get them."""
DRAINING_POLL_S = 0.1
"""How soon an island that drains, and waits for publications, notices anything else."""


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """``fragments[p]`` names the pieces of fragment p; ``interval_steps`` is H; ``mix_alpha`` α weighs one's own.

    ``tokens_per_schedule_step`` are those of an inner step of all islands together. Offers travel in ``codec``.
    """

    fragments: tuple[tuple[str, ...], ...]
    interval_steps: int
    adoption: AdoptionRule = "replace"
    mix_alpha: float = 0.5
    report_every_s: float = 0.5
    codec: CodecName = EXACT
    tokens_per_schedule_step: int = field(kw_only=True)

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


Base = OfferedFragment | Mapping[str, np.ndarray]
"""θ_since: an offer as it was decoded, or what was last adopted."""


@dataclass(frozen=True, slots=True)
class EvaluationRequest:
    """Measure Θ at these versions, or later ones. One of more than ``limit_s`` measures fewer sequences."""

    global_version: int
    versions: tuple[Version, ...]
    limit_s: float


@dataclass(slots=True)
class _Arrival:
    """A published value. ``update`` is what it adds to own work since ``base``, if that was worked out already."""

    published: Arrays
    base: Base | None = None
    update: Arrays | None = None


class IslandLoop:
    """One incarnation's training. ``load`` or its like once, then ``start``; all else at any time, from any thread.

    Whoever wants the steps taken in its own thread calls ``open`` in the place of ``start``, and then ``advance``.
    """

    def __init__(self, trainer: Trainer, plan: LoopPlan, outbox: Outbox) -> None:
        self._trainer, self._plan, self._outbox = trainer, plan, outbox
        self._changed = threading.Condition()
        """Guards the replica and the arrays that are named to it, for moments only."""
        self._replica = Replica(plan.policy)
        self._arrived: dict[FragmentId, _Arrival] = {}
        self._from_peers: dict[FragmentId, Mapping[str, np.ndarray]] = {}
        """What peers gave, of the fragments of which no version was adopted since."""
        self._offered: dict[FragmentId, dict[int, OfferedFragment]] = {}
        self._adopted: dict[FragmentId, PublishedVersion] = {}
        """Θ as the island stands on it, of the fragments whose values it has."""
        self._residues: dict[FragmentId, Arrays] = {}
        """What coding lost of the work in Θ, where that is not in θ by itself (``replica.work``)."""
        self._published = PublishedFragments(len(plan.fragments))
        self._evaluation: EvaluationRequest | None = None
        self._evaluation_report: tuple[int, Evaluated | NotEvaluated | None] = (-1, None)
        self._loading = threading.Lock()
        self._stopping, self._ended = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._exports: Exports[Fragments, tuple[Snapshot, tuple[Version, ...], int]] = Exports()
        self._cuts: Exports[None, Cut] = Exports()
        self._odometer = Odometer()
        self._reported_at = monotonic()
        self._last_step_end: float | None = None

    @property
    def fragment_count(self) -> int:
        return len(self._plan.fragments)

    # ── a state to begin from ─────────────────────────────────────────────────────────────────────────────────────

    def load(self, arrays: Mapping[str, np.ndarray], versions: Sequence[Version], step: int, cursor: int) -> None:
        """Begin from the synchroniser's parameters, with a fresh inner optimizer."""
        with self._loading:
            self._require_idle(versions)
            self._trainer.load(arrays)
            self._trainer.seek(cursor)
            self._stand_on([{name: arrays[name] for name in names} for names in self._plan.fragments], versions)
            with self._changed:
                self._replica.hold(versions, step)

    def load_peer(self, state: FetchedState, cursor: int) -> None:
        """Begin from what peers gave. Their uncontributed work is not ours to count, or to keep."""
        with self._loading:
            self._require_idle(state.versions)
            self._trainer.import_state(state.arrays)
            self._trainer.seek(cursor)
            if self._rebases:
                own = enumerate(self._plan.fragments)
                self._from_peers = {FragmentId(p): self._trainer.snapshot(names).arrays() for p, names in own}
            for p, version in enumerate(state.versions):
                if (published := self._published.at(FragmentId(p), version)) is not None:
                    self._adopted[FragmentId(p)] = published
            with self._changed:
                self._replica.hold(state.versions, state.step)

    def load_saved(self, saved: Restored, cursor: int) -> None:
        """Begin where the checkpoint cut this island. Work that Θ has moved past is overwritten, the rest goes on."""
        with self._loading:
            self._require_idle(saved.versions)
            require_numbers(saved.arrays)
            self._trainer.import_state(saved.arrays)
            self._trainer.seek(cursor)
            self._stand_on(saved.outer, saved.versions)
            with self._changed:
                overtaken = self._replica.hold_saved(saved.position, saved.versions)
            for fragment in overtaken:
                self._trainer.load(saved.outer[fragment])

    def promote(self, shard_index: int, cursor: int) -> tuple[tuple[Version, ...], int]:
        """Make a standby's process an island's; return the versions and the logical step that it begins from.

        It begins from the state that was loaded and what was published since. Asked again before ``start``, it returns the
        same.
        """
        with self._loading:
            with self._changed:
                adoptions, arrived = self._replica.promote(), self._take_arrived()
                versions, step = self._replica.versions, self._replica.step
            for adoption in adoptions:
                self._adopt(adoption, arrived[adoption.report.fragment])
            self._trainer.take_shard(shard_index)
            self._trainer.seek(cursor)
            return versions, step

    def _require_idle(self, versions: Sequence[Version]) -> None:
        """Before anything is changed: a catch-up may be asked twice, and the second must not touch who trains already."""
        if self._replica.holds_state:
            raise InternalError(detail="an island was given a state while it has one: it keeps the first that came.")
        self._replica.require_count(versions)

    def _stand_on(self, outer: Sequence[Mapping[str, np.ndarray]], versions: Sequence[Version]) -> None:
        """The island stands on Θ, fragment by fragment."""
        for p, (arrays, version) in enumerate(zip(outer, versions, strict=True)):
            fragment = FragmentId(p)
            self._published.hold(fragment, version, arrays)
            self._adopted[fragment] = PublishedVersion(version, arrays)

    @property
    def _rebases(self) -> bool:
        return self._plan.adoption == "rebase"

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
        arrays = self._published.take(fragment, version, since, checked_digest, payloads)
        if arrays is not None:
            self._deliver(publication, arrays)
        return self._published.version(fragment)

    def published_version(self, fragment: FragmentId) -> int:
        """The version of Θ's fragment that is here, adopted yet or not; −1 for none."""
        return self._published.version(fragment)

    def deliver(
        self,
        fragment: FragmentId,
        version: Version,
        step: int,
        arrays: Arrays,
        merged_offer: int = 0,
        anchor: ScheduleAnchor = NO_ANCHOR,
    ) -> None:
        """Have a published value adopted at the next boundary, unless it is no news (``Publication``)."""
        self._published.hold(fragment, version, arrays)
        self._deliver(Publication(fragment, version, step, merged_offer, anchor), arrays)

    def _deliver(self, publication: Publication, arrays: Arrays) -> None:
        arrival = _Arrival(arrays, self._base_for(publication.fragment, publication.merged_offer))
        if arrival.base is not None:
            # here, so that the loop's thread need not; at the boundary it looks whether the base is still this one
            arrival.update = update(arrays, _arrays_of(arrival.base))
        with self._changed:
            if self._replica.publication_arrived(publication):
                self._arrived[publication.fragment] = arrival
                self._changed.notify_all()

    def _base_for(self, fragment: FragmentId, merged_offer: int) -> Base | None:
        """The base by which a version would be loaded now; None where own work is not kept, or not by rebasing."""
        with self._changed:
            mode = self._replica.fragments[fragment].load_mode(merged_offer, self._plan.adoption)
            return self._base(fragment, mode.since) if isinstance(mode, Rebase) and self._replica.started else None

    def _base(self, fragment: FragmentId, since: int | None) -> Base | None:
        if since is not None:
            return self._offered.get(fragment, {}).get(since)
        adopted = self._adopted.get(fragment)
        return self._from_peers.get(fragment, None if adopted is None else adopted.arrays)

    def take(self, fragment: FragmentId, offer: int) -> memoryview | None:
        """The offer's payload, once it is on the host; ``None`` if a newer offer replaced it, or it was merged."""
        with self._changed:
            fetched = self._replica.fetched(fragment, offer)
            offered = self._offered.get(fragment, {}).get(offer) if fetched else None
        return None if offered is None else offered.payload()

    def standing_offers(self) -> list[Offer]:
        """The latest offer of each fragment, but for those whose work is in a version that was adopted."""
        with self._changed:
            standing = self._replica.standing_offers()
            return [offer for offer in standing if offer.offer in self._offered.get(offer.fragment, {})]

    def export_state(self, timeout_s: float, fragments: Fragments = None) -> dict[str, Any]:
        """The state that a peer needs to begin from here: ``{"trainer": arrays, "versions": (…), "step": int}``.

        With ``fragments`` only the arrays of these; versions are always all.
        Taken at one boundary, so it is consistent; the copy to the host happens in the calling thread.
        Raises InfrastructureError when this island does not train, or reaches no boundary in time.
        """
        return _exported(*self._exports.ask(fragments, timeout_s))

    def export_fragments(self, timeout_s: float) -> list[Callable[[], dict[str, Any]]]:
        """What ``export_state`` gives of each fragment, all at the same boundary. Raises as that one."""
        requests = self._exports.request_all([(p,) for p in range(self.fragment_count)])
        return [partial(_exported, *self._exports.wait(request, timeout_s)) for request in requests]

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

    def request_cut(self) -> Future[Cut]:
        """The state at the next boundary, before what is delivered from now on is adopted; raises as ``export_state``."""
        return self._cuts.request(None)

    # ── the loop's own thread ─────────────────────────────────────────────────────────────────────────────────────

    def _run_in_thread(self) -> None:
        """At most one thread in the loop's life."""
        with self._changed:
            if self._thread is not None:
                return
            self._give_states()
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
        except Exception as error:  # whatever failed must be reported: nothing catches what this thread raises
            logging.getLogger(__name__).exception("the island's loop failed")
            self._outbox.put(broken_by(error))
        finally:
            self._exports.close()
            self._cuts.close()
            self._evaluate_in_thread()

    def advance(self) -> Continuation:
        """One boundary, and the inner step after it if one follows, in the calling thread."""
        with self._changed:
            # the cuts are looked at under the lock: a marker that came before any publication here is seen before it
            plan = self._replica.boundary(cut=bool(self._cuts.waiting()), requests=self._exports.waiting())
            arrived = self._take_arrived()
        self._carry_out(plan.actions, arrived)
        if self._evaluation is not None:
            self._evaluate()
        if plan.continuation is Continuation.STEP:
            self.train()
        return plan.continuation

    def give_all(self) -> None:
        """The last boundary: adopt, offer all work not yet offered, and say ``Flushed``."""
        with self._changed:
            self._replica.flush()
        self.advance()

    def adopt_mail(self) -> None:
        """Adopt the publications that have arrived."""
        with self._changed:
            actions = self._replica.adopt(cut=bool(self._cuts.waiting()))
            arrived = self._take_arrived()
        self._carry_out(actions, arrived)

    def offer_due(self) -> None:
        """Offer the fragments whose due point the logical clock has passed."""
        with self._changed:
            actions = self._replica.offer_due()
        self._carry_out(actions, {})

    def train(self) -> None:
        """One inner step, measured and counted."""
        began = monotonic()
        result = self._trainer.step(self._replica.schedule_step)
        ended = monotonic()
        with self._changed:
            self._replica.step_taken(result.token_count)
        gap = 0.0 if self._last_step_end is None else ended - self._last_step_end
        self._last_step_end = ended
        self._odometer.count(ended - began, gap)
        self._odometer.loss = result.loss
        if ended - self._reported_at >= self._plan.report_every_s:
            self._report_progress(self._replica.step)

    # ── Θ on held-out data ────────────────────────────────────────────────────────────────────────────────────────

    def _evaluate(self) -> None:
        """Measure Θ if it is here as it is wanted. The time counts as no gap between steps: it is reported as what it is."""
        with self._changed:
            request = self._evaluation
            arrays = None if request is None else self._published.values_at(request.versions)
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
        except Exception as error:  # training does not depend on being watched
            logging.getLogger(__name__).exception("Θ cannot be measured here")
            report = NotEvaluated(request.global_version, traceback.format_exception_only(error)[-1].strip())
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
            while (request := self._evaluation) is not None and self._published.values_at(request.versions) is None:
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

    def _take_arrived(self) -> dict[FragmentId, _Arrival]:
        """Under the lock: what is adopted at this boundary."""
        arrived, self._arrived = self._arrived, {}
        return arrived

    def _carry_out(self, actions: Sequence[Action], arrived: Mapping[FragmentId, _Arrival]) -> None:
        for action in actions:
            match action:
                case CutState():
                    self._cuts.answer(partial(self._cut, position=action.position))
                case AdoptVersion():
                    self._adopt(action, arrived[action.report.fragment])
                    self._say(action.report, action.report.step)
                case OfferFragment():
                    self._offer(action)
                    self._say(action.report, action.report.step)
                case ExportState():
                    self._exports.answer(partial(self._state, at=action))
                case SendReport():
                    self._ended.set()  # first: from now on it is ``flush`` that reports to whoever flushes again
                    self._say(action.report, self._replica.step)
                case _:
                    assert_never(action)

    def _adopt(self, action: AdoptVersion, arrival: _Arrival) -> None:
        fragment, published = action.report.fragment, arrival.published
        match action.mode:
            case Replace(residue):
                self._trainer.load(self._with_residue(fragment, published, residue))
            case Mix(residue):
                own, corrected = self._own(published), self._with_residue(fragment, published, residue)
                self._trainer.load(mixed(corrected, own, self._plan.mix_alpha))
            case Rebase(since):
                base = self._base(fragment, since)
                assert base is not None, f"the snapshot of offer {since} of fragment {fragment} was dropped too early"
                ready = arrival.update if arrival.base is base else None
                self._trainer.add(update(published, _arrays_of(base)) if ready is None else ready)
            case _:
                assert_never(action.mode)
        self._adopted[fragment] = PublishedVersion(action.report.version, published)
        self._from_peers.pop(fragment, None)
        self._keep_offered(fragment, self._offered.get(fragment, {}), action.snapshots)

    def _with_residue(self, fragment: FragmentId, published: Arrays, whose: int | None) -> Arrays:
        """Θ + e. The residue of the last adoption stays until that of a later offer takes its place."""
        if whose is None:
            self._residues.pop(fragment, None)
        elif whose and (own := self._offered[fragment][whose].residue()) is not None:
            self._residues[fragment] = own
        residue = self._residues.get(fragment)
        return published if residue is None else {name: array + residue[name] for name, array in published.items()}

    def _own(self, names: Iterable[str]) -> Arrays:
        return self._trainer.snapshot(names).arrays()

    def _offer(self, action: OfferFragment) -> None:
        fragment, number = action.report.fragment, action.report.offer
        adopted = self._adopted.get(fragment)
        base = adopted if adopted is not None and adopted.version == action.report.base_version else None
        snapshot = self._trainer.snapshot(self._plan.fragments[fragment])
        offered = OfferedFragment(snapshot, base, self._plan.codec, residue_wanted=not self._rebases)
        self._keep_offered(fragment, {**self._offered.get(fragment, {}), number: offered}, action.snapshots)

    def _keep_offered(
        self, fragment: FragmentId, all_of_it: dict[int, OfferedFragment], needed: tuple[int, ...]
    ) -> None:
        with self._changed:
            self._offered[fragment] = {number: all_of_it[number] for number in needed}

    def _cut(self, _: None, *, position: Position) -> Cut:
        """The state has left the devices when this returns: the next step changes all of it."""
        began = monotonic()
        snapshot, cursor = self._trainer.export_state(), self._trainer.cursor()
        return Cut(snapshot, position, cursor, held_seconds=monotonic() - began)

    def _state(self, fragments: Fragments, *, at: ExportState) -> tuple[Snapshot, tuple[Version, ...], int]:
        pieces = None if fragments is None else [name for p in fragments for name in self._plan.fragments[p]]
        return self._trainer.export_state(pieces), at.versions, at.step

    def _say(self, report: IslandReport, step: int) -> None:
        """Report it, and before it the progress so far, unless that was reported already."""
        self._report_progress(step)
        self._outbox.put(report)

    def _report_progress(self, step: int) -> None:
        replica = self._replica
        if self._odometer.is_news(replica.steps_total):
            self._reported_at = monotonic()
            self._outbox.put(self._odometer.report(step, replica.steps_total, replica.tokens_total))


def _exported(snapshot: Snapshot, versions: tuple[Version, ...], step: int) -> dict[str, Any]:
    return {"trainer": snapshot.arrays(), "versions": versions, "step": step}


def _arrays_of(base: Base) -> Arrays:
    return dict(base) if isinstance(base, Mapping) else base.arrays()
