"""A job's training trace: how far each incarnation trained between which adoptions and offers.

    IncarnationTrace        one incarnation: where its state came from, then its moments in its own order
    Offered     … it made an offer that was merged          Adopted   … it took over a published version
    Exported    … another life took its state from it
    Merged      a fragment's outer step, with the contributions and weights that were decided
    Evaluated   Θ was measured

Only what some merge depends on is kept: what an island trained after its last merged offer never reached the model.
``trace_reader`` makes a ``TrainingTrace`` out of a tape, ``tape_training`` trains by it. Nothing here knows either, nor
arrays.

Counts of steps are inner steps *here*: a step here is as many tokens on the tape as the tape's fastest steps had
(``tokens_per_step``). An island that stepped with less capacity, on fewer tokens, so takes fewer steps here, and tokens
stay comparable.
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
    """After ``steps`` inner steps of this life, its fragment was copied as ``payload``."""

    steps: int
    fragment: FragmentId
    payload: PayloadId


@dataclass(frozen=True, slots=True)
class Adopted:
    """After ``steps`` inner steps it took version ``version``; its logical step was then at least ``logical_step``.

    ``fix``, in tokens of the tape, is the latest it had heard. ``keeps`` says whether own work survived, all of it if there
    was any, as ``has_work`` says; ``since`` is the offer of its own that the version holds, ``None`` for none.
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
    """After ``steps`` inner steps its whole state went to ``receiver``."""

    steps: int
    receiver: LifeId


Moment = Offered | Adopted | Exported


@dataclass(frozen=True, slots=True)
class IncarnationTrace:
    """One incarnation. ``donor`` ``None``: it began from Θ at ``versions``, with a fresh inner optimizer.

    ``shard`` is its island's place in the job; ``cursor`` the batches of the shard drawn before it; ``logical_step`` its
    clock, and ``fix`` the job's, at the start.
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
    """``digest`` is that of the fragment's parameters as the tape has it: its own if it trained, made up if simulated.

    The outer learning rate was ``outer_lr_ratio`` of its specification's.
    """

    fragment: FragmentId
    version: Version
    inputs: tuple[WeightedPayload, ...]
    digest: str
    outer_lr_ratio: float = 1.0


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Θ was measured when ``tokens`` had been trained, in tokens of the tape."""

    tokens: int


Act = Merged | Evaluated


@dataclass(frozen=True, slots=True)
class TrainingTrace:
    """A whole job. ``acts`` in the order in which they happened; ``lives`` those that some act needs.

    ``tokens_trained`` and ``steps_trained`` count everything that islands said they trained, as the tape counts it and
    lost work too; ``inferred_count`` adoptions that no letter told of, found by what a receiver got from their island;
    ``ended``: the budget was reached, and they gave what they had.
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
        """Inner steps to be trained."""
        return sum(life.step_count for life in self.lives.values())

    def horizon_steps(self, tokens: int) -> int:
        """So many tokens of the tape as inner steps of each island."""
        return max(1, tokens // (len(self.policy.islands) * self.tokens_per_step))

    @property
    def merges(self) -> tuple[Merged, ...]:
        return tuple(act for act in self.acts if isinstance(act, Merged))
