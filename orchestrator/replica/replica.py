"""One incarnation of an island as a deterministic state machine: what it holds, offers, adopts and reports.

                    ┌──────────── a boundary ────────────┐
    … inner step ──▶ cut ▸ adopt ▸ offer what is due ▸ export ──▶ inner step …

A replica's driver tells it what happened (a publication arrived, a step was taken, a command came) and asks it, at each
boundary between two inner steps, what to do. The answer is a ``BoundaryPlan``: frozen data, in the order in which it must be
carried out, that names arrays only by fragment, version and number of offer. So one process can decide, and others that hold
other pieces of the same arrays can carry out the same plan.

Published fragments are adopted first, then due fragments are offered: an offer made on a base that is about to be replaced
would only be refused. A checkpoint's cut comes before both: what is published behind its marker is not in it.

A replica knows no clock, no thread, no array and no transport. It does not report ``Progress``, which has durations in it:
its driver does, before the first report of a plan, so that totals are known before anything that depends on them.

The island's position in the job's learning-rate schedule follows from the last anchor and the island's own clock since:

    schedule step = ⌊T / (M·B·L)⌋ + (clock − clock at the anchor)     T tokens trained by M islands of B × L tokens a step

The schedule covers the job's token budget, so it goes by what *all* islands have trained, lost work too. Every publication
says how much that was; until the next one an island assumes that the job is as fast as its own clock. The clock alone would
not do. It is the furthest island's, and runs on while others are away: a job of which a sixth is always away would end its
schedule with a sixth of its budget left, and one that grew would end before its schedule.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Literal, NamedTuple, Self

from orchestrator.core.commands import UNCHANGED, ChangedSettings
from orchestrator.core.messages import Adopted, Drained, Flushed, IslandReport, Offer
from orchestrator.core.vocabulary import (
    NO_ANCHOR,
    NO_RAMP,
    BatchRamp,
    FragmentId,
    MergedOffer,
    Schedule,
    ScheduleAnchor,
    Version,
    includes,
    offer_of_number,
)
from orchestrator.errors import InternalError
from orchestrator.replica.work import AdoptionRule, FragmentWork, LoadMode, Rebase, Replace, Trained


def schedule_step(anchor: ScheduleAnchor, clock: int, tokens_per_schedule_step: int, ramp: BatchRamp = NO_RAMP) -> int:
    """Count in whole inner steps of every island, at the logical step ``clock``; before any anchor it counts from 0."""
    position = anchor.tokens * ramp.parts // tokens_per_schedule_step
    return ramp.after(position, clock - anchor.step) // ramp.parts


@dataclass(frozen=True, slots=True)
class ReplicaPolicy:
    """The policy of a replica, from its job.

    schedule                  when each fragment is offered
    tokens_per_schedule_step  tokens of an inner step of all islands together, each with its whole batch
    snapshots_max             offers a fragment whose snapshots are kept between two adoptions (``work.SNAPSHOTS_MAX``);
                              None: all
    exact                     whether offers lose nothing in their codec
    offers_counted            whether offers are numbered through all fragments of the island, or in each
    ramp                      how the islands' batches grow
    """

    schedule: Schedule
    adoption: AdoptionRule
    tokens_per_schedule_step: int
    snapshots_max: int | None
    exact: bool = True
    offers_counted: Literal["by island", "by fragment"] = "by island"
    ramp: BatchRamp = NO_RAMP


class Publication(NamedTuple):
    """A fragment's value at ``version`` lies ready; who adopts it raises the logical step to ``step``.

    ``merged_offer`` is the island's latest offer of the fragment whose work is in it, 0 for none; ``anchor`` is where the
    job was when it was published.
    """

    fragment: FragmentId
    version: Version
    step: int
    merged_offer: MergedOffer = 0
    anchor: ScheduleAnchor = NO_ANCHOR

    @classmethod
    def received(
        cls, fragment: FragmentId, version: Version, step: int, merged_offer: int, anchor: ScheduleAnchor
    ) -> Self:
        """Return the publication that the synchroniser sent, whose calls have a number for the merged offer."""
        return cls(fragment, version, step, offer_of_number(merged_offer), anchor)


@dataclass(frozen=True, slots=True)
class Position:
    """The state of a replica at a boundary, but for arrays. Due points up to ``offered_step`` were offered.

    ``step_counts`` and ``token_counts`` are its own work by fragment since ``versions``; totals are the incarnation's.
    """

    step: int
    offered_step: int
    steps_total: int
    tokens_total: int
    versions: tuple[Version, ...]
    step_counts: tuple[int, ...]
    token_counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CutState:
    """Give the state as it is now to the checkpoints that wait for it."""

    position: Position


@dataclass(frozen=True, slots=True)
class AdoptVersion:
    """Load the published version over the fragment by this mode, then report it. Snapshots but of ``snapshots`` are over."""

    report: Adopted
    mode: LoadMode
    snapshots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OfferFragment:
    """Take a snapshot of the fragment under the offer's number, then report it. Those but of ``snapshots`` are over."""

    report: Offer
    snapshots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExportState:
    """Give the state as it is now, at these versions and this logical step, to the peers that made these requests."""

    requests: tuple[Hashable, ...]
    versions: tuple[Version, ...]
    step: int


@dataclass(frozen=True, slots=True)
class SendReport:
    report: Flushed | Drained


Action = CutState | AdoptVersion | OfferFragment | ExportState | SendReport
_REPORTING = (AdoptVersion, OfferFragment, SendReport)


class Continuation(Enum):
    """The continuation after a boundary."""

    STEP = auto()
    AWAIT_PUBLICATION = auto()
    END = auto()


@dataclass(frozen=True, slots=True)
class BoundaryPlan:
    actions: tuple[Action, ...]
    continuation: Continuation

    def reports(self) -> list[IslandReport]:
        """The reports of this boundary, in order."""
        return reports_of(self.actions)


ONLY_STEP = BoundaryPlan((), Continuation.STEP)


class Replica:
    """``step`` is the logical clock, ``anchor`` the latest of the schedule's; totals are of this incarnation.

    Inner steps are to be taken at ``lr_ratio`` of the schedule's learning rate.
    """

    def __init__(self, policy: ReplicaPolicy) -> None:
        self.policy = policy
        self.fragments = tuple(FragmentWork() for _ in range(policy.schedule.fragment_count))
        self.step = self.offered_step = 0
        self.steps_total = self.tokens_total = 0
        self.anchor = NO_ANCHOR
        self.lr_ratio = 1.0
        self.changed = UNCHANGED
        self.holds_state = self.started = False
        self.flushing = self.draining = self.drained = False
        self._arrived: dict[FragmentId, Publication] = {}
        self._standing: dict[FragmentId, Offer] = {}
        self._offer_count = 0

    # ── state ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def versions(self) -> tuple[Version, ...]:
        return tuple(work.version for work in self.fragments)

    @property
    def trained(self) -> Trained:
        return Trained(self.steps_total, self.tokens_total)

    @property
    def schedule_step(self) -> int:
        """The schedule step of the next inner step."""
        return schedule_step(self.anchor, self.step, self.policy.tokens_per_schedule_step, self.policy.ramp)

    @property
    def next_step(self) -> tuple[int, float]:
        """The schedule step of the next inner step, and the ratio of the learning rate there."""
        return self.schedule_step, self.lr_ratio

    @property
    def position(self) -> Position:
        trained = self.trained
        work = [fragment.since_origin(trained) for fragment in self.fragments]
        return Position(
            step=self.step,
            offered_step=self.offered_step,
            steps_total=self.steps_total,
            tokens_total=self.tokens_total,
            versions=self.versions,
            step_counts=tuple(one.steps for one in work),
            token_counts=tuple(one.tokens for one in work),
        )

    def hold(self, versions: Sequence[Version], step: int) -> None:
        """Begin from a state of these versions that has no work of this island in it."""
        self.require_count(versions)
        for fragment, version in zip(self.fragments, versions, strict=True):
            fragment.version = version
        self.step = self.offered_step = step
        self.holds_state = True

    def hold_saved(self, position: Position, versions: Sequence[Version]) -> tuple[FragmentId, ...]:
        """Begin where a checkpoint cut this island, which has Θ at ``versions``.

        Own work goes on where Θ has not moved past it. Returns the other fragments: on these Θ is to be loaded.
        """
        self.hold(versions, position.step)
        self.offered_step = position.offered_step
        moved_past = overtaken(position, versions)
        for p, fragment in enumerate(self.fragments):
            if p not in moved_past:
                fragment.origin = Trained(-position.step_counts[p], -position.token_counts[p])
        return moved_past

    def promote(self) -> tuple[AdoptVersion, ...]:
        """Make the island of a standby: it begins from what it holds and what was published since.

        Nothing was trained on that, so it is overwritten, and reported to nobody. Asked again before training begins, it
        adopts what came meanwhile.
        """
        if self.started or not self.holds_state:
            raise InternalError(detail="only an island that holds a state, and has not trained, takes a place over.")
        adoptions = tuple(replace(adoption, mode=Replace()) for adoption in self._adopt())
        self.offered_step = self.step
        return adoptions

    def require_count(self, versions: Sequence[Version]) -> None:
        """Raises InternalError for the versions of a state that has other fragments than the job."""
        if len(versions) != (count := self.policy.schedule.fragment_count):
            raise InternalError(detail=f"{len(versions)} versions came for {count} fragments.")

    # ── commands ──────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self, anchor: ScheduleAnchor = NO_ANCHOR) -> None:
        """Train, from the next boundary on. Asked again, it calls a drain off, or changes nothing."""
        self.draining = False
        self._begin(anchor)

    def drain(self) -> None:
        """Step no more; offer all work, again what a version lacks, until versions hold all of it."""
        self.draining = True
        self._begin(NO_ANCHOR)

    def flush(self) -> None:
        """Step no more; the next boundary is the last one."""
        self.flushing = True
        if self.holds_state:
            self._begin(NO_ANCHOR)

    def _begin(self, anchor: ScheduleAnchor) -> None:
        if not self.holds_state:
            raise InternalError(detail="an island was started before it held a state.")
        if not self.started:
            self.started, self.anchor = True, max(self.anchor, anchor)

    def adjust(self, lr_ratio: float, interval_steps: int, changed: ChangedSettings = UNCHANGED) -> None:
        """Offer each fragment every so many steps from the next boundary on. The replica's driver steps at the ratio.

        A fragment with a period of its own keeps it.
        """
        self.lr_ratio, self.changed = lr_ratio, changed
        schedule = self.policy.schedule._replace(interval_steps=interval_steps)
        self.policy = replace(self.policy, schedule=schedule)

    # ── publications and offers ───────────────────────────────────────────────────────────────────────────────────

    def publication_arrived(self, publication: Publication) -> bool:
        """It is adopted at the next boundary, unless a newer one of its fragment comes before. Whether it was news."""
        waiting = self._arrived.get(publication.fragment)
        if waiting is not None and waiting.version >= publication.version:
            return False
        self._arrived[publication.fragment] = publication
        return True

    @property
    def has_publications(self) -> bool:
        return bool(self._arrived)

    def stands(self, fragment: FragmentId, number: int) -> bool:
        """Return whether this is the fragment's latest offer and no adopted version is known to contain it."""
        offer = self._standing.get(fragment)
        return offer is not None and offer.offer == number

    def fetched(self, fragment: FragmentId, number: int) -> bool:
        """The synchroniser asks for the bytes of this offer, if it ``stands``; from now on it may be merged."""
        if not self.stands(fragment, number):
            return False
        self.fragments[fragment].fetched.add(number)
        return True

    def standing_offers(self) -> list[Offer]:
        """The latest offer of each fragment, but for those whose work is in a version that was adopted."""
        return list(self._standing.values())

    # ── boundaries ────────────────────────────────────────────────────────────────────────────────────────────────

    def step_taken(self, token_count: int) -> None:
        self.step += 1
        self.steps_total += 1
        self.tokens_total += token_count

    def boundary(self, *, cut: bool = False, requests: tuple[Hashable, ...] = ()) -> BoundaryPlan:
        """The plan of a boundary between steps. ``cut``: checkpoints wait for the state; ``requests`` are peers' for it."""
        if self.flushing:
            return self.flush_boundary(cut=cut)
        if self.draining:
            return self.drain_boundary(cut=cut, requests=requests)
        adoptions = self.adopt(cut=cut)
        offers = self.offer_due()
        if not (adoptions or offers or requests):
            return ONLY_STEP
        return BoundaryPlan((*adoptions, *offers, *self._export(requests)), Continuation.STEP)

    def flush_boundary(self, *, cut: bool = False) -> BoundaryPlan:
        """The last boundary: offer all work that no offer covers, and say so. Peers are given nothing any more."""
        actions = (*self.adopt(cut=cut), *self._offer_all(), SendReport(Flushed()))
        return BoundaryPlan(actions, Continuation.END)

    def drain_boundary(self, *, cut: bool = False, requests: tuple[Hashable, ...] = ()) -> BoundaryPlan:
        """A boundary that no step follows: offer what no offer covers, and say so once versions hold all work.

        A flush offers once, and late work is lost. A draining island offers again, because it knows exactly which of its
        work the versions lack; the core would have to guess that from its refusals.
        """
        actions = (*self.adopt(cut=cut), *self._offer_all(), *self._export(requests))
        trained = self.trained
        if any(fragment.since_origin(trained).tokens for fragment in self.fragments):
            return BoundaryPlan(actions, Continuation.AWAIT_PUBLICATION)
        self.draining, self.drained = False, True
        return BoundaryPlan((*actions, SendReport(Drained())), Continuation.END)

    def adopt(self, *, cut: bool = False) -> tuple[CutState | AdoptVersion, ...]:
        """Put fragments on what was published and has arrived; a cut comes before."""
        if cut:
            return (CutState(self.position), *self._adopt())
        return self._adopt()

    def offer_due(self) -> tuple[OfferFragment, ...]:
        """Offer the fragments whose due point the logical clock has passed, but for those that wait after earlier offers."""
        due = self.policy.schedule.due(self.offered_step, self.step)
        self.offered_step = self.step
        return self._offer(p for p in due if self.fragments[p].due_again()) if due else ()

    def _offer_all(self) -> tuple[OfferFragment, ...]:
        self.offered_step = self.step
        return self._offer(map(FragmentId, range(len(self.fragments))))

    def _export(self, requests: tuple[Hashable, ...]) -> tuple[ExportState, ...]:
        return (ExportState(requests, self.versions, self.step),) if requests else ()

    def _adopt(self) -> tuple[AdoptVersion, ...]:
        if not self._arrived:
            return ()
        arrived, self._arrived = self._arrived, {}
        publications = [arrived[fragment] for fragment in sorted(arrived)]
        fragments, trained = self.fragments, self.trained
        return tuple(
            [self._adoption(each, trained) for each in publications if each.version > fragments[each.fragment].version]
        )

    def _adoption(self, publication: Publication, trained: Trained) -> AdoptVersion:
        fragment, work = publication.fragment, self.fragments[publication.fragment]
        mode = work.load_mode(publication.merged_offer, self.policy.adoption)
        own_work = work.remaining(mode, trained)
        if self.policy.exact and isinstance(mode, Rebase) and own_work.tokens == 0:
            mode = Replace()  # the same, to the last bit
        before = work.latest_offer if self.policy.offers_counted == "by fragment" else self._offer_count
        work.adopt(publication.version, own_work, trained, before)
        standing = self._standing.get(fragment)
        if standing is not None and includes(publication.merged_offer, standing.offer):
            del self._standing[fragment]
            standing = None
        self.step = max(self.step, publication.step)
        self.anchor = max(self.anchor, publication.anchor)
        report = Adopted(fragment, publication.version, self.step, self.tokens_total, own_work.tokens, self.anchor)
        return AdoptVersion(report, mode, () if standing is None else (standing.offer,))

    def _offer(self, fragments: Iterable[FragmentId]) -> tuple[OfferFragment, ...]:
        """Offer those of these fragments that hold work which no offer covers."""
        trained, offers = self.trained, []
        for fragment in fragments:
            work = self.fragments[fragment]
            if work.unoffered_tokens(trained) == 0:
                continue
            self._offer_count += 1
            number = work.latest_offer + 1 if self.policy.offers_counted == "by fragment" else self._offer_count
            work.offered(number, trained, self.policy.snapshots_max)
            step_count, token_count = work.since_origin(trained)
            report = Offer(fragment, number, self.step, work.version, step_count, token_count, self.tokens_total)
            self._standing[fragment] = report
            offers.append(OfferFragment(report, tuple(work.offers)))
        return tuple(offers)


def overtaken(position: Position, versions: Sequence[Version]) -> tuple[FragmentId, ...]:
    """The fragments of which Θ, at ``versions``, has moved past the one on which work stood at this position."""
    both = enumerate(zip(position.versions, versions, strict=True))
    return tuple(FragmentId(p) for p, (worked_on, version) in both if worked_on != version)


def reports_of(actions: Iterable[Action]) -> list[IslandReport]:
    """The reports among these actions, in order."""
    return [action.report for action in actions if isinstance(action, _REPORTING)]
