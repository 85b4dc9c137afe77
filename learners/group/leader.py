"""Rank 0's end of the links to the other processes of its island: sends orders, takes answers, knows what all of them hold.

   boundary k       rank 0 carries out the plan of k, which every process got during the step before
                    it decides k + 1 as if step k were done, and sends that: the message travels during step k
   step k           the others carry out k when they reach it, report what they hold, and step

So a boundary costs no round trip, whatever the distance. Rank 0 is at most one boundary ahead of the others' reports.
A version is common, and may be adopted, once every process holds the same one.

Decisions are made in ``orchestrator.replica``. This module knows no arrays.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar, assert_never

from learners.group.link import Answer, Beat, Done, Failed, Line, LinkEnded, News, Order, Prepared, Promote, Written
from learners.loop import Decided
from orchestrator.checkpoints.manifest import File
from orchestrator.core.messages import Broken
from orchestrator.core.vocabulary import FragmentId, IslandId
from orchestrator.errors import InfrastructureError
from orchestrator.replica.replica import Action, AdoptVersion, Continuation
from orchestrator.system.logbook import Logbook

log = logging.getLogger(__name__)

Result = TypeVar("Result")

AHEAD_MAX = 2
"""Boundaries that may be under way: the one being carried out, and the next, whose message is travelling."""


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
