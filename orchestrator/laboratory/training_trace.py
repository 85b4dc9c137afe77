"""The training trace of a job: how far each incarnation trained between its adoptions and offers.

    IncarnationTrace   one incarnation: the origin of its state, then its moments in its own order
      Offered          it made an offer that was merged
      Adopted          it adopted a published version
      Exported         another incarnation took its state from it
    Merged             the outer step of a fragment, with its contributions and weights
    Evaluated          an evaluation of Θ

Only what a merge depends on is kept: steps after an island's last merged offer never reached the model. ``trace_reader``
reads a ``TrainingTrace`` from a tape, and ``tape_training`` trains by it.

Steps are counted in steps of the training *here*, which stand for as many tokens as the fastest steps on the tape had
(``tokens_per_step``). An island that stepped at less capacity, on fewer tokens, takes fewer steps here, so that tokens stay
comparable.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.core.vocabulary import (
    FragmentId,
    Incarnation,
    IslandId,
    JobPolicy,
    PayloadId,
    ScheduleAnchor,
    Version,
    WeightedPayload,
)

LifeId = tuple[IslandId, Incarnation]


@dataclass(frozen=True, slots=True)
class Offered:
    """The fragment was copied as ``payload`` after ``steps`` inner steps of this incarnation."""

    steps: int
    fragment: FragmentId
    payload: PayloadId


@dataclass(frozen=True, slots=True)
class Adopted:
    """The incarnation adopted ``version`` after ``steps`` inner steps. Its logical step is then at least ``logical_step``.

    ``fix`` is the latest schedule anchor that it had received, in tokens of the tape. ``has_work`` says whether it had own
    work, and ``keeps`` whether all of that survived. ``since`` is its own offer that the version contains, if any.
    """

    steps: int
    fragment: FragmentId
    version: Version
    logical_step: int
    fix: ScheduleAnchor
    keeps: bool = False
    has_work: bool = False
    since: PayloadId | None = None


@dataclass(frozen=True, slots=True)
class Exported:
    """The whole state went to ``receiver`` after ``steps`` inner steps."""

    steps: int
    receiver: LifeId


Moment = Offered | Adopted | Exported


@dataclass(frozen=True, slots=True)
class IncarnationTrace:
    """One incarnation. Without a donor it began from Θ at ``versions`` with a fresh inner optimizer.

    ``shard`` is the index of its island, and ``cursor`` the number of batches of that shard drawn before it.
    ``logical_step`` and ``fix`` are its step and the job's schedule anchor at the start.
    """

    id: LifeId
    shard: int
    donor: LifeId | None
    cursor: int
    versions: tuple[Version, ...]
    logical_step: int
    fix: ScheduleAnchor
    moments: tuple[Moment, ...]

    @property
    def step_count(self) -> int:
        return self.moments[-1].steps if self.moments else 0


@dataclass(frozen=True, slots=True)
class Merged:
    """A merge. ``digest`` is the recorded digest of the fragment's parameters (made up on a simulated tape).

    ``outer_lr_ratio`` is the outer learning rate relative to the specification's.
    """

    fragment: FragmentId
    version: Version
    inputs: tuple[WeightedPayload, ...]
    digest: str
    outer_lr_ratio: float = 1.0


@dataclass(frozen=True, slots=True)
class Evaluated:
    """An evaluation of Θ after ``tokens``, in tokens of the tape."""

    tokens: int


Act = Merged | Evaluated


@dataclass(frozen=True, slots=True)
class TrainingTrace:
    """A whole job. ``acts`` are in their order, and ``lives`` are the incarnations that an act needs.

    ``tokens_trained`` and ``steps_trained`` count all reported training as the tape counts it, including lost work.
    ``inferred_count`` adoptions were not reported but follow from the state that a receiver got. ``ended`` says that the
    budget was reached and the islands were flushed.
    """

    policy: JobPolicy
    lives: dict[LifeId, IncarnationTrace]
    acts: tuple[Act, ...]
    tokens_per_step: int
    tokens_trained: int
    steps_trained: int
    inferred_count: int
    ended: bool

    @property
    def step_count(self) -> int:
        """The number of inner steps to train."""
        return sum(life.step_count for life in self.lives.values())

    def horizon_steps(self, tokens: int) -> int:
        """Convert tokens of the tape to inner steps of each island."""
        return max(1, tokens // (len(self.policy.islands) * self.tokens_per_step))

    @property
    def merges(self) -> tuple[Merged, ...]:
        return tuple(act for act in self.acts if isinstance(act, Merged))
