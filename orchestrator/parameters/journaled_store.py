"""The journaled store: Θ whose every merge is journalled before it is announced, and its recovery from the journal.

Responsible for the order: outer step, then durable, then the answer; and for what an entry is: the merge's inputs or their
average, whichever is fewer bytes, so at most four a parameter; and now and then the state that it made. Refuses to know
payload ids and publications.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from orchestrator.core.effects import MergeFragment
from orchestrator.core.vocabulary import Epoch, FragmentId, Version
from orchestrator.errors import DataError
from orchestrator.parameters.journal.storage import Content, Facts, Journal, OuterGradient
from orchestrator.parameters.outer_state import FragmentState, OuterState, OuterStep
from orchestrator.parameters.pieces import rows_of
from orchestrator.parameters.wire_format import EncodedTensors

MERGES_PER_STATE = 16
"""So many merges are at most between two states in the journal: what a recovery must take again of a fragment."""

Retry = Callable[[str, Callable[[], None]], None]
"""Do what may raise OSError until it is done; the text says what cannot be done meanwhile."""


class MergeLog(Protocol):
    """The log of merges, written before they are announced: the ``Journal``, or nowhere for a run that can begin anew."""

    def append(self, facts: Facts, content: Content) -> None:
        """The merge is durable, as the policy has it, when this returns. Raises OSError."""
        ...


Inputs = Sequence[tuple[EncodedTensors, float]]


class EntryKind(StrEnum):
    """What an entry of the journal holds of a merge: what it made, what it read, or the average by which it stepped."""

    STATE = "state"
    INPUTS = "inputs"
    OUTER_GRADIENT = "outer gradient"


@dataclass(frozen=True, slots=True)
class JournaledVersion:
    """A version that is in the journal. ``journal_seconds`` is how long the entry took to be durable, also where the disk
    refused for a while.
    """

    facts: Facts
    journal_seconds: float


class JournaledStore:
    """Orders for different fragments may come from several threads at once.

    ``retry`` is given every write to the journal; ``clock`` times outer steps.
    """

    def __init__(
        self, outer: OuterState, journal: MergeLog, retry: Retry, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.outer, self._journal, self._retry, self._clock = outer, journal, retry, clock
        self._merges_since_state: dict[FragmentId, int] = {}

    def begin(self, fragment: FragmentId, epoch: Epoch, step: int = 0) -> JournaledVersion:
        """Journal the first version, too, made at ``step`` of an earlier job: so that a recovery need not make Θ again."""
        return self._journaled(fragment, step, epoch, "", (), 0.0)

    def merge(self, order: MergeFragment, inputs: Inputs) -> JournaledVersion:
        """Take the outer step and journal it. It is durable, as the policy has it, when this returns."""
        began = self._clock()
        before = self.outer.state(order.fragment)
        content: Content | None = None
        match self._entry_kind(before, order, inputs):
            case EntryKind.OUTER_GRADIENT:
                average = self.outer.outer_gradient(order.fragment, inputs)
                inputs, content = [(average, 1.0)], OuterGradient(average)
            case EntryKind.INPUTS:
                content = tuple(displacement for displacement, _ in inputs)
            case EntryKind.STATE:
                pass
        self.outer.merge(order.fragment, order.version, inputs, order.outer_lr_ratio)
        contributors = tuple((str(item.island), item.weight) for item in order.inputs)
        seconds = self._clock() - began
        ratio = order.outer_lr_ratio
        return self._journaled(
            order.fragment, order.step, order.epoch, before.digest, contributors, seconds, content, ratio
        )

    def restore(
        self, fragment: FragmentId, version: Version, step: int, epoch: Epoch, state: FragmentState
    ) -> JournaledVersion:
        """Put an earlier state in the fragment's place, as its next version, and journal that."""
        base = self.outer.state(fragment).digest
        self.outer.restore(fragment, version, state)
        return self._journaled(fragment, step, epoch, base, (), 0.0)

    def _journaled(
        self,
        fragment: FragmentId,
        step: int,
        epoch: Epoch,
        base: str,
        contributors: tuple[tuple[str, float], ...],
        seconds: float,
        content: Content | None = None,
        outer_lr_ratio: float = 1.0,
    ) -> JournaledVersion:
        """Journal the fragment as it stands, or ``content``, which led there from the version before."""
        state = self.outer.state(fragment)
        merge, result = (fragment, state.version, step, epoch), (state.digest, base, contributors, seconds)
        facts = Facts(*merge, *result, rows_of(state.roles), outer_lr_ratio)
        entry = state if content is None else content
        since = 0 if content is None else self._merges_since_state[fragment] + 1
        began = self._clock()
        self._retry("the journal cannot be written", lambda: self._journal.append(facts, entry))
        self._merges_since_state[fragment] = since
        return JournaledVersion(facts, self._clock() - began)

    def _entry_kind(self, before: FragmentState, order: MergeFragment, inputs: Inputs) -> EntryKind:
        """What is fewest bytes; and a state now and then, after a recovery, and of a merge that was taken before."""
        since = self._merges_since_state.get(order.fragment, MERGES_PER_STATE) + 1
        if since >= MERGES_PER_STATE or order.version == before.version:
            return EntryKind.STATE
        sizes = {
            EntryKind.STATE: sum(array.nbytes for arrays in before.arrays() for array in arrays.values()),
            EntryKind.INPUTS: sum(displacement.value_bytes for displacement, _ in inputs),
            EntryKind.OUTER_GRADIENT: sum(array.nbytes for array in before.parameters.values()),
        }
        return min(sizes, key=sizes.__getitem__)  # the first of equal ones, which is the sooner recovered


def recovered(
    journal: Journal, fragments: Iterable[FragmentId], outer_step: OuterStep
) -> tuple[OuterState, tuple[Facts, ...]]:
    """Θ as the journal has it newest, and the facts of each fragment's last merge. Raises DataError if it lacks any."""
    newest = {p: journal.newest(p) for p in fragments}
    if missing := [p for p, version in newest.items() if version is None]:
        raise DataError(detail=f"The journal holds nothing of the fragments {missing}.")
    states, merges = {}, []
    for p, version in newest.items():
        states[p] = state_at(journal, p, Version(version or 0), outer_step)
        merges.append(journal.facts(p, Version(version or 0)))
    older = {p: _older(journal, p, states[p].version, outer_step) for p in states}
    return OuterState.restored(states, outer_step, older), tuple(merges)


def _older(journal: Journal, fragment: FragmentId, newest: Version, outer_step: OuterStep) -> tuple[FragmentState, ...]:
    """The states before the newest that displacements may still count from, as far as the journal has them."""
    wanted = range(newest - outer_step.staleness_max, newest)
    return tuple(state_at(journal, fragment, v, outer_step) for v in journal.versions(fragment) if v in wanted)


def state_at(journal: Journal, fragment: FragmentId, version: Version, outer_step: OuterStep) -> FragmentState:
    """The fragment as it stood at that version, by the journal: a state, and the merges since taken again.

    Raises DataError where the journal lacks it, or the merges give something else than they gave.
    """
    (_, first), *merges = journal.entries(fragment, version)
    assert isinstance(first, FragmentState)
    outer = OuterState.restored({fragment: first}, outer_step)
    for facts, content in merges:
        assert not isinstance(content, FragmentState)
        digest = outer.merge(fragment, facts.version, _inputs(facts, content), facts.outer_lr_ratio)
        if digest != facts.digest:
            raise DataError(
                detail=f"The merge of version {facts.version} of fragment {fragment} gave {facts.digest}, and taken again "
                f"from the journal it gives {digest}: the specification, or the program, is another one."
            )
    return outer.state(fragment)


def _inputs(facts: Facts, content: tuple[EncodedTensors, ...] | OuterGradient) -> Inputs:
    """What gives the merge's bits again."""
    if isinstance(content, OuterGradient):
        return [(content.average, 1.0)]
    weights = (weight for _, weight in facts.contributors)
    return list(zip(content, weights, strict=True))
