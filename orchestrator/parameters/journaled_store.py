"""The journaled store: Θ whose every merge is journalled before it is announced, and its recovery from the journal.

It keeps the order: outer step, then durable, then the answer. It also decides the content of an entry: the merge's inputs or
their average, whichever is smaller, so at most four bytes a parameter; and now and then the resulting state. Payload ids and
publications are handled elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from orchestrator.core.effects import MergeFragment
from orchestrator.core.vocabulary import Epoch, FragmentId, Version
from orchestrator.errors import DataError
from orchestrator.parameters.journal import Content, Facts, Journal, OuterGradient, set_back
from orchestrator.parameters.outer_state import FragmentState, OuterState, OuterStep
from orchestrator.parameters.pieces import rows_of
from orchestrator.parameters.tensors import Tensors
from orchestrator.parameters.wire_format import EncodedTensors

MERGES_PER_STATE = 16
"""The most merges between two states in the journal, which a recovery of a fragment has to repeat."""

Retry = Callable[[str, Callable[[], None]], None]
"""Repeats a call that may raise OSError until it succeeds; the text says what is not possible meanwhile."""


class MergeLog(Protocol):
    """The log of merges, written before they are announced: the ``Journal``, or nothing in a run that can start over."""

    def append(self, facts: Facts, content: Content) -> None:
        """Write the merge durably, as the policy requires. Raises OSError."""
        ...


Inputs = Sequence[tuple[EncodedTensors, float]]


class EntryKind(StrEnum):
    """The content of a journal entry: the resulting state, the merge's inputs, or the average by which it stepped."""

    STATE = "state"
    INPUTS = "inputs"
    OUTER_GRADIENT = "outer gradient"


@dataclass(frozen=True, slots=True)
class JournaledVersion:
    """A version that is in the journal. ``journal_seconds`` is how long that took, including times in which the disk
    failed.
    """

    facts: Facts
    journal_seconds: float


class JournaledStore:
    """Θ and its journal. Several threads may order merges of different fragments at the same time.

    ``retry`` performs every write to the journal; ``clock`` times outer steps.
    """

    def __init__(
        self, outer: OuterState, journal: MergeLog, retry: Retry, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.outer, self._journal, self._retry, self._clock = outer, journal, retry, clock
        self._merges_since_state: dict[FragmentId, int] = {}

    def begin(self, fragment: FragmentId, epoch: Epoch, step: int = 0) -> JournaledVersion:
        """Journal the first version, too, made at ``step`` of an earlier job, so that a recovery need not create Θ again."""
        return self._journaled(fragment, step, epoch, "", (), 0.0)

    def merge(self, order: MergeFragment, inputs: Inputs) -> JournaledVersion:
        """Take the outer step and journal it durably, as the policy requires."""
        began = self._clock()
        before = self.outer.state(order.fragment)
        content: Content | None = None
        spread = self.outer.router_spread(order.fragment, inputs)
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
            order.fragment, order.step, order.epoch, before.digest, contributors, seconds, content, ratio, spread
        )

    def restore(
        self, fragment: FragmentId, version: Version, step: int, epoch: Epoch, state: FragmentState
    ) -> JournaledVersion:
        """Replace the fragment by an earlier state, as its next version, and journal that."""
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
        spread: tuple[float, float] | None = None,
    ) -> JournaledVersion:
        """Journal the fragment's current state, or ``content``, which led to it from the version before."""
        state = self.outer.state(fragment)
        merge, result = (fragment, state.version, step, epoch), (state.digest, base, contributors, seconds)
        figures = (outer_lr_ratio, state.gradient_norm, *(spread or ()))
        facts = Facts(*merge, *result, rows_of(state.roles), *figures)
        entry = state if content is None else content
        since = 0 if content is None else self._merges_since_state[fragment] + 1
        began = self._clock()
        self._retry("the journal cannot be written", lambda: self._journal.append(facts, entry))
        self._merges_since_state[fragment] = since
        return JournaledVersion(facts, self._clock() - began)

    def _entry_kind(self, before: FragmentState, order: MergeFragment, inputs: Inputs) -> EntryKind:
        """Choose the smallest content; a state now and then, after a recovery, and for a merge that is repeated."""
        since = self._merges_since_state.get(order.fragment, MERGES_PER_STATE) + 1
        if since >= MERGES_PER_STATE or order.version == before.version:
            return EntryKind.STATE
        sizes = {
            EntryKind.STATE: sum(array.nbytes for arrays in before.arrays() for array in arrays.values()),
            EntryKind.INPUTS: sum(displacement.value_bytes for displacement, _ in inputs),
            EntryKind.OUTER_GRADIENT: sum(array.nbytes for array in before.parameters.values()),
        }
        return min(sizes, key=sizes.__getitem__)  # the first of equal ones, whose recovery is fastest


def recovered(
    journal: Journal, fragments: Iterable[FragmentId], outer_step: OuterStep
) -> tuple[OuterState, tuple[Facts, ...]]:
    """Return Θ as the journal has it, and the facts of each fragment's last merge. Raises DataError if one is missing."""
    newest = {p: journal.newest(p) for p in fragments}
    if missing := [p for p, version in newest.items() if version is None]:
        raise DataError(detail=f"The journal has nothing of the fragments {missing}.")
    states, merges = {}, []
    for p, version in newest.items():
        states[p] = state_at(journal, p, Version(version or 0), outer_step)
        merges.append(journal.facts(p, Version(version or 0)))
    older = {p: _older(journal, p, states[p].version, outer_step) for p in states}
    return OuterState.restored(states, outer_step, older), tuple(merges)


def _older(journal: Journal, fragment: FragmentId, newest: Version, outer_step: OuterStep) -> tuple[FragmentState, ...]:
    """Return the states before the newest from which displacements may still count, if the journal has them."""
    wanted = range(newest - outer_step.staleness_max, newest)
    return tuple(state_at(journal, fragment, v, outer_step) for v in journal.versions(fragment) if v in wanted)


def state_at(journal: Journal, fragment: FragmentId, version: Version, outer_step: OuterStep) -> FragmentState:
    """Return the fragment at that version from the journal: a state, and the merges since, repeated.

    Raises DataError if the journal lacks it, or if the merges give another result.
    """
    (_, first), *merges = journal.entries(fragment, version)
    assert isinstance(first, FragmentState)
    outer = OuterState.restored({fragment: first}, outer_step)
    for facts, content in merges:
        assert not isinstance(content, FragmentState)
        digest = outer.merge(fragment, facts.version, _inputs(facts, content), facts.outer_lr_ratio)
        if digest != facts.digest:
            raise DataError(
                detail=f"The merge of version {facts.version} of fragment {fragment} gave {facts.digest}, but repeated "
                f"from the journal it gives {digest}: the specification or the program has changed."
            )
    return outer.state(fragment)


def append_set_back(journal: Journal, fragment: FragmentId, epoch: Epoch, outer_step: OuterStep) -> None:
    """Append the journal's newest version of a fragment as the one after a lost version. Raises OSError, DataError."""
    newest = Version(max(journal.versions(fragment)))
    before = journal.facts(fragment, newest)
    journal.append(set_back(before, Version(newest + 1), epoch), state_at(journal, fragment, newest, outer_step))


def replace_fragment(journal: Journal, facts: Facts, state: FragmentState, retry: Retry) -> None:
    """Have the journal continue with this version of a fragment, whatever it has of it. ``Journal.settle`` follows."""
    fragment = FragmentId(facts.fragment)
    retry("the journal cannot be written", lambda: journal.forget(fragment))
    retry("the journal cannot be written", lambda: journal.append(facts, replace(state, version=facts.version)))


def momentum_at_last(journal: Journal, fragment: FragmentId, outer_step: OuterStep) -> Tensors:
    """Return the momentum of the newest version that can be read, which is earlier than those announced. Else nothing."""
    try:
        newest = Version(max(journal.versions(fragment), default=-1))
        return state_at(journal, fragment, newest, outer_step).momentum
    except (DataError, OSError):
        return {}


def _inputs(facts: Facts, content: tuple[EncodedTensors, ...] | OuterGradient) -> Inputs:
    """Return the inputs that reproduce the merge's bits."""
    if isinstance(content, OuterGradient):
        return [(content.average, 1.0)]
    weights = (weight for _, weight in facts.contributors)
    return list(zip(content, weights, strict=True))
