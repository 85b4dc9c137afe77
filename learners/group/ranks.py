"""The two ends of the links within an island of several hosts: rank 0's, and that of each other process.

   boundary k       rank 0 carries out the plan of k, which every process got during the step before
                    it decides k + 1 as if step k were done, and sends that: the message travels during step k
   step k           the others carry out k when they reach it, report what they hold, and step

So a boundary costs no round trip, whatever the distance. Rank 0 is at most one boundary ahead of the others' reports.
A version is common, and may be adopted, once every process holds the same one.

The ``Leader`` sends orders, takes answers and knows what all processes hold; it has no arrays. A ``Follower`` adopts, offers
and cuts its own parts of the same arrays, in rank 0's order and at the same boundaries. It decides nothing, reports nothing
to the service, and ends with rank 0. If something fails there, rank 0 reports that the island failed.

Decisions are made in ``orchestrator.replica``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar, assert_never, cast

from learners.checkpointing import Cut
from learners.contract import Trainer, broken_by, take_step
from learners.group.link import (
    Answer,
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
    Written,
)
from learners.handed_over import PublishedFragments
from learners.island_arrays import ArraysPlan, HeldPieces, IslandArrays, State, StateRequest
from learners.loop import Decided
from orchestrator.checkpoints.manifest import File
from orchestrator.core.messages import Broken
from orchestrator.core.vocabulary import Epoch, FragmentId, IslandId, Version
from orchestrator.errors import InfrastructureError, in_words
from orchestrator.replica.replica import (
    Action,
    AdoptVersion,
    Continuation,
    CutState,
    ExportState,
    OfferFragment,
    Publication,
    SendReport,
)
from orchestrator.system.logbook import Logbook

log = logging.getLogger(__name__)

Result = TypeVar("Result")

AHEAD_MAX = 2
"""Boundaries that may be under way: the one being carried out, and the next, whose message is travelling."""
OFFER_S = 60.0
"""A process may reach the boundary of an offer this much later than rank 0. Steps keep them closer together."""


class Leader:
    """``lines`` are by rank. ``failed`` is called with the reason if another process fails, ``lost`` if one is gone."""

    def __init__(
        self,
        lines: Mapping[int, Line],
        fragment_count: int,
        tokens_of: Callable[[int], int],
        failed: Callable[[Broken], None],
        lost: Callable[[str], None],
    ) -> None:
        self._tokens_of = tokens_of
        self._lines, self._failed, self._lost = dict(lines), failed, lost
        self._changed = threading.Condition()
        self._prepared: dict[int, Prepared] = {}
        self._news = dict.fromkeys(lines, News(0, (-1,) * fragment_count))
        self._done: dict[int, Done] = {}
        self._written: dict[tuple[int, Hashable], Written] = {}
        self._broken: Broken | None = None
        self._number = 0
        self._calling = threading.Lock()
        """Only one call is in progress at a time."""
        self.becomes: tuple[IslandId, Logbook] | None = None
        """The island that a standby's processes are promoted to."""
        for rank, line in self._lines.items():
            threading.Thread(target=self._receive, args=(rank, line), name=f"rank-{rank}", daemon=True).start()

    # ── the loop's group (``learners.loop.Group``) ────────────────────────────────────────────────────────────────

    def tokens_of(self, schedule_step: int) -> int:
        return self._tokens_of(schedule_step)

    def order(self, decided: Decided) -> None:
        steps = decided.plan.continuation is Continuation.STEP
        self._beat(decided.plan.actions, decided.cuts, decided.schedule_step if steps else None, decided.lr_ratio)

    def refresh(self) -> None:
        """Find out what every process holds now, while none takes steps."""
        number = self._beat((), (), None)
        self._wait(lambda: all(news.number >= number for news in self._news.values()))

    def common_version(self, fragment: FragmentId) -> int:
        with self._changed:
            versions = {news.versions[fragment] for news in self._news.values()}
        return versions.pop() if len(versions) == 1 else -1

    def promote(self, adoptions: Sequence[AdoptVersion], shard_index: int, cursor: int) -> None:
        assert self.becomes is not None
        self.call(Promote(*self.becomes, tuple(adoptions), shard_index, cursor))

    # ── other orders ──────────────────────────────────────────────────────────────────────────────────────────────

    def device_count(self) -> int:
        """Return the devices of the others, once their models are built. Raises InfrastructureError if one cannot be."""
        self._wait(lambda: self._prepared.keys() == self._lines.keys())
        return sum(prepared.device_count for prepared in self._prepared.values())

    def processes(self) -> tuple[str, ...]:
        """Return the names of the others, by rank, once their models are built."""
        return tuple(self._prepared[rank].process for rank in sorted(self._lines))

    def call(self, order: Order | Mapping[int, Order]) -> None:
        """Have all others carry this out, each its own order by rank. Raises InfrastructureError with the first problem."""
        self.call_beside(order, lambda: None)

    def call_beside(self, order: Order | Mapping[int, Order], own: Callable[[], Result]) -> Result:
        """Do the same as ``call`` while this process runs ``own``, which may raise. Returns when all have ended."""
        with self._calling:
            with self._changed:
                self._done = {}
            for rank, line in self._lines.items():
                line.send(order[rank] if isinstance(order, Mapping) else order)
            try:
                return own()
            finally:
                self._finish()

    def _finish(self) -> None:
        self._wait(lambda: self._done.keys() == self._lines.keys())
        for rank, done in sorted(self._done.items()):
            if done.problem:
                raise InfrastructureError(detail=f"the process of host {rank} reports: {done.problem}")

    def written(self, cut: Hashable) -> tuple[File, ...]:
        """Return the files that the others wrote of this cut, once all have. Raises InfrastructureError if one failed."""
        keys = [(rank, cut) for rank in self._lines]
        self._wait(lambda: all(key in self._written for key in keys))
        with self._changed:
            parts = [self._written.pop(key) for key in keys]
        for (rank, _), part in zip(keys, parts, strict=True):
            if part.problem:
                raise InfrastructureError(detail=f"the process of host {rank} reports: {part.problem}")
        return tuple(file for part in parts for file in part.files)

    def close(self) -> None:
        self._lost = _ignored
        for line in self._lines.values():
            line.close()

    # ── helpers ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _beat(
        self, actions: tuple[Action, ...], cuts: tuple[Hashable, ...], schedule_step: int | None, lr_ratio: float = 1.0
    ) -> int:
        oldest = self._number + 1 - AHEAD_MAX
        self._wait(lambda: all(news.number >= oldest for news in self._news.values()))
        self._number += 1
        for line in self._lines.values():
            line.send(Beat(self._number, actions, cuts, schedule_step, lr_ratio))
        return self._number

    def _wait(self, situation: Callable[[], bool]) -> None:
        """Wait for the situation. Raises InfrastructureError if another process fails meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: self._broken is not None or situation())
            if self._broken is not None:
                raise InfrastructureError(detail=self._broken.detail)

    def _receive(self, rank: int, line: Line) -> None:
        try:
            while True:
                self._take(rank, line.receive())
        except LinkEnded as error:
            self._lost(f"host {rank}: {error}")

    def _take(self, rank: int, answer: Answer) -> None:
        with self._changed:
            match answer:
                case Prepared():
                    self._prepared[rank] = answer
                case News():
                    self._news[rank] = answer
                case Done():
                    self._done[rank] = answer
                case Written():
                    self._written[rank, answer.cut] = answer
                case Failed():
                    broken = replace(answer.report, detail=f"host {rank}: {answer.report.detail}")
                    self._broken = self._broken or broken
                case _:
                    assert_never(answer)
            self._changed.notify_all()
        if self._broken is not None and isinstance(answer, Failed):
            self._failed(self._broken)


def _ignored(_: str) -> None:
    """Do nothing: this process closed the line itself."""


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
