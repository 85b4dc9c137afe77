"""A process of an island of several hosts other than rank 0: carries out what rank 0 decides, and reports what it holds.

It adopts, offers and cuts its own parts of the same arrays, in rank 0's order and at the same boundaries. It decides
nothing, reports nothing to the service, and ends with rank 0. If something fails here, rank 0 reports that the island
failed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import assert_never, cast

from learners.checkpointing import Cut
from learners.contract import Trainer, broken_by, take_step
from learners.group.link import (
    Beat,
    Done,
    Failed,
    FetchPart,
    Line,
    LinkEnded,
    News,
    Order,
    Prepared,
    Promote,
    StateOrder,
    TakeOuter,
    TakePeer,
    TakeSaved,
)
from learners.handed_over import PublishedFragments
from learners.island_arrays import ArraysPlan, HeldPieces, IslandArrays, State, StateRequest
from orchestrator.core.vocabulary import Epoch, FragmentId, Version
from orchestrator.errors import in_words
from orchestrator.replica.replica import AdoptVersion, CutState, ExportState, OfferFragment, Publication, SendReport

log = logging.getLogger(__name__)

OFFER_S = 60.0
"""This process may reach the boundary of an offer this much later than rank 0. Steps keep them closer together."""


class Follower:
    """``take_state`` fetches or loads the state that rank 0 names into the given arrays. ``save`` gets each cut.

    ``give`` gets this process's part of a fragment's state, for peers, with the name of the boundary that it is from.
    """

    def __init__(
        self,
        line: Line,
        trainer: Trainer,
        plan: ArraysPlan,
        prepared: Prepared,
        take_state: Callable[[IslandArrays, StateOrder], None],
        give: Callable[[str, int, State], None],
        save: Callable[[Hashable, Cut], None],
        promoted: Callable[[Promote], None],
    ) -> None:
        self._line, self._trainer, self._plan, self._prepared = line, trainer, plan, prepared
        self._take_state, self._give, self._save, self._promoted = take_state, give, save, promoted
        self._changed = threading.Condition()
        self._arrays = IslandArrays(trainer, plan, self._changed)
        self._latest_offer = 0

    @property
    def fragment_count(self) -> int:
        return len(self._plan.fragments)

    @property
    def held(self) -> HeldPieces:
        """The same as ``IslandLoop.held``."""
        return self._arrays.held

    def run(self) -> None:
        """Carry out rank 0's orders until its line ends. Raises LinkEnded."""
        self._line.send(self._prepared)
        while True:
            self._carry_out(self._line.receive())

    # ── called by other threads ───────────────────────────────────────────────────────────────────────────────────

    @property
    def published(self) -> PublishedFragments:
        """The same as ``IslandLoop.published``."""
        return self._arrays.published

    def receive(
        self,
        publication: Publication,
        since: Version | None,
        checked_digest: str,
        payloads: Sequence[bytes | memoryview],
        epoch: Epoch | None = None,
    ) -> int:
        """Do the same as ``IslandLoop.receive``. The version waits here until rank 0 orders its adoption."""
        fragment, version = publication.fragment, publication.version
        arrays = self._arrays.published.take(fragment, version, since, checked_digest, payloads, epoch)
        if arrays is not None:
            likely = self._arrays.likely_mode(fragment, publication.merged_offer)
            self._arrays.arrive(fragment, version, arrays, likely)
        return self._arrays.published.version(fragment)

    def take(self, fragment: FragmentId, offer: int) -> memoryview | None:
        """Do the same as ``IslandLoop.take`` for this process's part of the payload."""
        with self._changed:
            self._changed.wait_for(lambda: self._latest_offer >= offer, OFFER_S)
            offered = self._arrays.offered(fragment, offer)
        return None if offered is None else offered.payload()

    # ── in rank 0's order ─────────────────────────────────────────────────────────────────────────────────────────

    def _carry_out(self, order: Order) -> None:
        try:
            match order:
                case Beat():
                    self._beat(order)
                    return
                case Promote():
                    self._promoted(order)
                    arrived = self._arrays.take_arrived(order.adoptions)
                    self._arrays.promote(order.adoptions, arrived, order.shard_index, order.cursor)
                case TakeOuter() | TakeSaved() | FetchPart() | TakePeer():
                    self._take_state(self._arrays, order)
                case _:
                    assert_never(order)
        except LinkEnded:
            raise
        except (Exception, SystemExit) as error:  # every failure must reach rank 0, which reports it
            log.exception("an order of rank 0 failed here")
            self._line.send(Failed(broken_by(error)) if isinstance(order, Beat) else Done(in_words(error)))
        else:
            self._line.send(Done())

    def _beat(self, beat: Beat) -> None:
        arrived = self._arrays.take_arrived(beat.actions)
        for action in beat.actions:
            match action:
                case CutState():
                    for cut in beat.cuts:
                        self._save(cut, self._arrays.cut(action.position))
                case AdoptVersion():
                    self._arrays.adopt(action, arrived[action.report.fragment])
                case OfferFragment():
                    self._arrays.offer(action)
                    with self._changed:
                        self._latest_offer = action.report.offer
                        self._changed.notify_all()
                case ExportState():
                    self._export(action)
                case SendReport():
                    pass
                case _:
                    assert_never(action)
        versions = tuple(self._arrays.ready_version(FragmentId(p)) for p in range(self.fragment_count))
        self._line.send(News(beat.number, versions))
        if beat.schedule_step is not None:
            take_step(self._trainer, beat.schedule_step, beat.lr_ratio)

    def _export(self, action: ExportState) -> None:
        """Cut this process's part for requests that go to every process."""
        for request in cast(tuple[StateRequest, ...], action.requests):
            if request.cut and not self._arrays.held.is_whole:
                assert request.fragments is not None
                (fragment,) = request.fragments
                self._give(request.cut, fragment, self._arrays.state(request, action))
