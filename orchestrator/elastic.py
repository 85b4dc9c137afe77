"""Elastic jobs: learners made of slices, which stall, shrink and grow as slices fail and return.

                         slice failed
        RUNNING ─────────────────────────────▶ STALLED (shrinking, or restarting if not elastic)
           ▲  └──────────────────────────────▶ STALLED (growing)
           │             slice returned           │
           └──────────────────────────────────────┘ stall ended

A *learner* is what the protocol level calls an island: the word is that of the fleet tape, and of the paper.

The decisions are made once, for two callers: the flat loop of the simulator calls ``slice_failed`` and its like, which
return a code, and a replay calls ``handle``, which returns effects. Events (in the past tense) and effects (verbs) are
frozen data, in the form in which tapes hold them. ``ElasticJobs`` also keeps the running totals from which goodput is
integrated. It knows neither time nor chance.

The policy says what a failure or a return does during a stall. The default (absorbed, and joining for free) has the closed
forms 1/(1 + λR) and u = 1/(1 + λ(D + uU)) (``simulation/oracles.py``).

Source: Decoupled DiLoCo, arXiv:2604.21428 (chips in slices, a failure takes out its slice, elastic jobs reconfigure); the
names are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from orchestrator.core.vocabulary import Instant

NOTHING, AWAIT, SHRINK, GROW, RESTART = 0, 1, 2, 4, 8
"""Codes of decisions, which can be added. ``AWAIT`` is about the slice, the others about its learner's stall."""
AWAIT_AND_SHRINK, AWAIT_AND_RESTART = AWAIT | SHRINK, AWAIT | RESTART
CHANGED = 16
"""The code for no effect but changed totals."""


class Stall(StrEnum):
    """The reason why a learner stands still."""

    SHRINKING = "shrinking"
    """It reconfigures to fewer slices."""
    GROWING = "growing"
    """It takes slices in."""
    RESTARTING = "restarting"
    """It cannot shrink: it starts again on as many slices as before."""


class DuringStall(StrEnum):
    """The effect of an interruption on a learner that is stalled already. Decision 0026 (docs/decisions) compares them."""

    ABSORBED = "absorbed"
    """None: only running slices are interrupted, and the reconfiguration in progress handles the rest."""
    JOINS = "joins"
    """The slice is lost, but the present stall covers that too."""
    RESTARTS = "restarts"
    """The slice is lost and the stall starts again."""


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutively numbered slices that work for one learner. ``resident`` slices are present from the start."""

    learner: int
    slice_count: int
    resident: bool = True


@dataclass(frozen=True, slots=True)
class ElasticPolicy:
    """The slices of each learner, and the effects of failing and returning slices."""

    blocks: tuple[Block, ...]
    elastic: bool = True
    during_stall: DuringStall = DuringStall.ABSORBED
    returns_join: bool = True
    """If True, a slice that returns during a stall is taken in for free. Otherwise the stall starts again."""

    @property
    def learner_count(self) -> int:
        return 1 + max(block.learner for block in self.blocks)

    @property
    def slice_count(self) -> int:
        return sum(block.slice_count for block in self.blocks)


@dataclass(frozen=True, slots=True)
class SliceFailed:
    """A chip of the slice was interrupted, whether or not the slice was in use."""

    at: Instant
    slice: int


@dataclass(frozen=True, slots=True)
class SliceReturned:
    """An awaited slice is usable again."""

    at: Instant
    slice: int


@dataclass(frozen=True, slots=True)
class StallEnded:
    """The learner's last stall is over."""

    at: Instant
    learner: int


@dataclass(frozen=True, slots=True)
class BlockArrived:
    """Scavenged slices arrived."""

    at: Instant
    block: int


@dataclass(frozen=True, slots=True)
class BlockLeft:
    """The owner of scavenged slices took them back."""

    at: Instant
    block: int


FleetEvent = SliceFailed | SliceReturned | StallEnded | BlockArrived | BlockLeft


@dataclass(frozen=True, slots=True)
class AwaitSlice:
    """Report when the slice is back (``SliceReturned``)."""

    slice: int


@dataclass(frozen=True, slots=True)
class BeginStall:
    """Report when the stall is over (``StallEnded``). It replaces an earlier stall of this learner."""

    learner: int
    stall: Stall


FleetEffect = AwaitSlice | BeginStall


STALLS = {SHRINK: Stall.SHRINKING, GROW: Stall.GROWING, RESTART: Stall.RESTARTING}


_ABSENT, _SERVING, _AWAY = 0, 1, 2
"""States of a slice: not part of the fleet (yet, or any more); in service; failed and not yet returned."""


class ElasticJobs:
    """All learners of one fleet.

    These totals, in slices, add up to all slices that are present:
        training    slices of running learners
        stalled     {SHRINK, GROW, RESTART: slices of learners stalled for that reason}
        away        failed and not yet returned
    ``live`` is the number of learners that run with at least one slice.
    """

    def __init__(self, policy: ElasticPolicy) -> None:
        self.policy = policy
        self.learner_of: list[int] = []
        self.first_of: list[int] = []
        states: list[int] = []
        for block in policy.blocks:
            self.first_of.append(len(states))
            self.learner_of += [block.learner] * block.slice_count
            states += [_SERVING if block.resident else _ABSENT] * block.slice_count
        self._states = bytearray(states)
        self.serving = [0] * policy.learner_count
        self.stall = [NOTHING] * policy.learner_count
        for block in policy.blocks:
            self.serving[block.learner] += block.slice_count if block.resident else 0
        self.training = sum(self.serving)
        self.stalled = {SHRINK: 0, GROW: 0, RESTART: 0}
        self.away = 0
        self.live = sum(count > 0 for count in self.serving)
        self._elastic = policy.elastic
        self._loss = SHRINK if policy.elastic else RESTART
        self._absorbs = policy.during_stall is DuringStall.ABSORBED
        self._restarts = policy.during_stall is DuringStall.RESTARTS
        self._returns_join = policy.returns_join

    def slice_failed(self, index: int) -> int:
        if self._states[index] != _SERVING:
            return NOTHING
        learner = self.learner_of[index]
        stalled = self.stall[learner]
        if not stalled:
            if self._elastic:  # _take_out and _begin in one: every second event of a long simulation gets here
                self._states[index] = _AWAY
                self.away += 1
                self.live -= 1
                before = self.serving[learner]
                self.training -= before
                self.stalled[SHRINK] += before - 1
                self.serving[learner] = before - 1
                self.stall[learner] = SHRINK
                return AWAIT_AND_SHRINK
            self._begin(learner, RESTART)
            return RESTART
        if self._absorbs:
            return NOTHING
        decided = NOTHING
        if self._elastic:
            self._take_out(index, learner)
            decided = AWAIT
        if self._restarts:
            self._begin(learner, self._loss)
            decided |= self._loss
        return decided

    def slice_returned(self, index: int) -> int:
        if self._states[index] != _AWAY:
            return NOTHING
        learner = self.learner_of[index]
        self._states[index] = _SERVING
        self.away -= 1
        return self._take_in(learner, 1)

    def stall_ended(self, learner: int) -> int:
        """Let the learner run on. The caller drops the ends of stalls that started again or whose learner has left."""
        count = self.serving[learner]
        self.stalled[self.stall[learner]] -= count
        self.stall[learner] = NOTHING
        self.training += count
        self.live += count > 0
        return CHANGED

    def block_arrived(self, block: int) -> int:
        whole = self._slices_of(block)
        self._states[whole] = bytes([_SERVING]) * (whole.stop - whole.start)
        return self._take_in(self.policy.blocks[block].learner, whole.stop - whole.start)

    def block_left(self, block: int) -> int:
        """Remove the slices. A learner that keeps some shrinks. One that has none left is gone, stalled or not."""
        learner, whole = self.policy.blocks[block].learner, self._slices_of(block)
        states = self._states[whole]
        self.away -= states.count(_AWAY)
        self._states[whole] = bytes(whole.stop - whole.start)
        self._count(learner, -states.count(_SERVING))
        if not self._owns_any(learner):
            self.stall[learner] = NOTHING
            return CHANGED
        if self.stall[learner] and not self._restarts:
            return CHANGED
        self._begin(learner, self._loss)
        return self._loss

    def handle(self, event: FleetEvent) -> tuple[FleetEffect, ...]:
        """Return the same decisions as effects."""
        match event:
            case SliceFailed(_, index):
                return self._effects(self.slice_failed(index), index, self.learner_of[index])
            case SliceReturned(_, index):
                return self._effects(self.slice_returned(index), index, self.learner_of[index])
            case StallEnded(_, learner):
                return self._effects(self.stall_ended(learner), 0, learner)
            case BlockArrived(_, block):
                return self._effects(self.block_arrived(block), 0, self.policy.blocks[block].learner)
            case BlockLeft(_, block):
                return self._effects(self.block_left(block), 0, self.policy.blocks[block].learner)

    @staticmethod
    def _effects(code: int, index: int, learner: int) -> tuple[FleetEffect, ...]:
        effects: list[FleetEffect] = [AwaitSlice(index)] if code & AWAIT else []
        effects += [BeginStall(learner, stall) for bit, stall in STALLS.items() if code & bit]
        return tuple(effects)

    def _take_out(self, index: int, learner: int) -> None:
        self._states[index] = _AWAY
        self.away += 1
        self._count(learner, -1)

    def _take_in(self, learner: int, count: int) -> int:
        self._count(learner, count)
        if self.stall[learner] and self._returns_join:
            return CHANGED
        self._begin(learner, GROW)
        return GROW

    def _count(self, learner: int, more: int) -> None:
        """Add ``more`` slices to those in service, and update the totals."""
        before = self.serving[learner]
        self.serving[learner] = before + more
        stalled = self.stall[learner]
        if stalled:
            self.stalled[stalled] += more
        else:
            self.training += more
            self.live += (before + more > 0) - (before > 0)

    def _begin(self, learner: int, code: int) -> None:
        count, before = self.serving[learner], self.stall[learner]
        if before:
            self.stalled[before] -= count
        else:
            self.training -= count
            self.live -= count > 0
        self.stall[learner] = code
        self.stalled[code] += count

    def _slices_of(self, block: int) -> slice:
        first = self.first_of[block]
        return slice(first, first + self.policy.blocks[block].slice_count)

    def _owns_any(self, learner: int) -> bool:
        """Return whether the learner has slices, in service or away."""
        return any(
            state != _ABSENT
            for number, block in enumerate(self.policy.blocks)
            if block.learner == learner
            for state in self._states[self._slices_of(number)]
        )
