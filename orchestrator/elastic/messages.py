"""Events of a fleet of slices, effects of the jobs on it, and their policy.

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
