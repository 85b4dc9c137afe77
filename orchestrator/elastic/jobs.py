"""Elastic jobs: learners made of slices, which stall, shrink and grow as slices fail and return.

                         slice failed
        RUNNING ─────────────────────────────▶ STALLED (shrinking, or restarting if not elastic)
           ▲  └──────────────────────────────▶ STALLED (growing)
           │             slice returned           │
           └──────────────────────────────────────┘ stall ended

Responsible for: the decisions, once, for the simulator's flat loop (``slice_failed`` and its like, which return a code) and
for replay (``handle``, which returns effects). Also for the running totals that goodput is integrated from. Refuses to know:
time and chance.

What a failure or a return does during a stall is the policy's; the default (absorbed; joins for free) is the one whose
closed forms are 1/(1 + λR) and u = 1/(1 + λ(D + uU)) (``simulation/oracles.py``).

Events of a fleet of slices, effects of the jobs on it, and their policy.

A *learner* here is what the protocol level calls an island: the word is the fleet tape's, and the paper's.

Responsible for: the fleet level's words, in the one form that tapes know (frozen data; events in the past tense, effects as
verbs). Refuses to know: time that passes, chance, and how long anything takes; a tape's reader decides the same without.

Source: Decoupled DiLoCo, arXiv:2604.21428 (chips in slices, a failure takes out its slice, elastic jobs reconfigure); the
words are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from orchestrator.core.vocabulary import Instant


class Stall(StrEnum):
    """The reason why a learner stands still."""

    SHRINKING = "shrinking"
    """It reconfigures to fewer slices."""
    GROWING = "growing"
    """It takes slices in."""
    RESTARTING = "restarting"
    """It cannot shrink: it starts again on as many slices as before."""


class DuringStall(StrEnum):
    """The effect of an interruption on a learner that stands still already. Decision 0026 (docs/decisions) compares them."""

    ABSORBED = "absorbed"
    """Nothing: only what computes is interrupted, and the reconfiguration under way copes with the rest."""
    JOINS = "joins"
    """The slice is lost, but the stall under way covers that too."""
    RESTARTS = "restarts"
    """The slice is lost and the stall begins anew."""


@dataclass(frozen=True, slots=True)
class Block:
    """``slice_count`` slices, numbered on from the block before, that work for one learner; ``resident`` from the start."""

    learner: int
    slice_count: int
    resident: bool = True


@dataclass(frozen=True, slots=True)
class ElasticPolicy:
    """How the learners are cut from slices, and what they do when slices fail and return."""

    blocks: tuple[Block, ...]
    elastic: bool = True
    during_stall: DuringStall = DuringStall.ABSORBED
    returns_join: bool = True
    """A slice that returns during a stall is taken in for free; otherwise the stall begins anew."""

    @property
    def learner_count(self) -> int:
        return 1 + max(block.learner for block in self.blocks)

    @property
    def slice_count(self) -> int:
        return sum(block.slice_count for block in self.blocks)


@dataclass(frozen=True, slots=True)
class SliceFailed:
    """A chip of the slice was interrupted, whether or not anybody used it."""

    at: Instant
    slice: int


@dataclass(frozen=True, slots=True)
class SliceReturned:
    """A slice that was awaited can be used again."""

    at: Instant
    slice: int


@dataclass(frozen=True, slots=True)
class StallEnded:
    """The learner's last stall is over."""

    at: Instant
    learner: int


@dataclass(frozen=True, slots=True)
class BlockArrived:
    """Scavenged slices came."""

    at: Instant
    block: int


@dataclass(frozen=True, slots=True)
class BlockLeft:
    """Scavenged slices were taken back by their owner."""

    at: Instant
    block: int


FleetEvent = SliceFailed | SliceReturned | StallEnded | BlockArrived | BlockLeft


@dataclass(frozen=True, slots=True)
class AwaitSlice:
    """Say when the slice is back (``SliceReturned``)."""

    slice: int


@dataclass(frozen=True, slots=True)
class BeginStall:
    """Say when the stall is over (``StallEnded``); an earlier one of this learner no longer matters."""

    learner: int
    stall: Stall


FleetEffect = AwaitSlice | BeginStall


NOTHING, AWAIT, SHRINK, GROW, RESTART = 0, 1, 2, 4, 8
"""Codes of decisions; they add. ``AWAIT`` is about the slice, the others about its learner's stall."""
AWAIT_AND_SHRINK, AWAIT_AND_RESTART = AWAIT | SHRINK, AWAIT | RESTART
CHANGED = 16
"""Nothing is asked for, but the totals are others now."""

STALLS = {SHRINK: Stall.SHRINKING, GROW: Stall.GROWING, RESTART: Stall.RESTARTING}


_ABSENT, _SERVING, _AWAY = 0, 1, 2
"""States of a slice: not (yet, or any more) of this fleet; in service; failed and not yet returned."""


class ElasticJobs:
    """All learners of one fleet.

    Totals, in slices, which add up to all slices that are there:
        training    serve learners that run
        stalled     {SHRINK, GROW, RESTART: serve learners that stand still for that}
        away        failed and not yet returned
    ``live`` learners run with at least one slice.
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
            if self._elastic:  # as _take_out and _begin, in one: every second event of a long simulation passes here
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
        """Its learner runs on. The caller drops the ends of stalls that were begun anew, or whose learner has left."""
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
        """A learner that keeps slices shrinks; one that has none left is gone, in whatever stall it was."""
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
        """The same decisions as effects."""
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
        """The learner has ``more`` slices in service; the totals follow."""
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
        """Whether slices of the learner are there, in service or away."""
        return any(
            state != _ABSENT
            for number, block in enumerate(self.policy.blocks)
            if block.learner == learner
            for state in self._states[self._slices_of(number)]
        )
