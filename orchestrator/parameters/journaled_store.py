"""The journaled store: Θ whose every merge is journalled before it is announced, and its recovery from the journal.

Responsible for the order: outer step, then durable, then the answer; and for what an entry is: the merge's inputs where
they are fewer bytes, the state that it made else, and now and then. Refuses to know payload ids and publications.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from orchestrator.core.effects import MergeFragment
from orchestrator.core.vocabulary import Epoch, FragmentId, Version
from orchestrator.errors import DataError
from orchestrator.parameters.journal.entry import Content, Facts
from orchestrator.parameters.journal.storage import Journal
from orchestrator.parameters.outer_state import FragmentState, OuterState, OuterStep
from orchestrator.parameters.roles import rows_of
from orchestrator.parameters.wire_format import EncodedTensors

MERGES_PER_STATE = 16
"""So many merges are at most between two states in the journal: what a recovery must take again of a fragment."""
INPUTS_SHARE_MAX = 0.5
"""Inputs are journalled while they are at most this share of the state."""

Retry = Callable[[str, Callable[[], None]], None]
"""Do what may raise OSError until it is done; the text says what cannot be done meanwhile."""


class MergeLog(Protocol):
    """The log of merges, written before they are announced: the ``Journal``, or nowhere for a run that can begin anew."""

    def append(self, facts: Facts, content: Content) -> None:
        """The merge is durable, as the policy has it, when this returns. Raises OSError."""
        ...


Inputs = Sequence[tuple[EncodedTensors, float]]


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
        base = self.outer.state(order.fragment).digest
        self.outer.merge(order.fragment, order.version, inputs)
        contributors = tuple((str(item.island), item.weight) for item in order.inputs)
        seconds = self._clock() - began
        own = [displacement for displacement, _ in inputs]
        return self._journaled(order.fragment, order.step, order.epoch, base, contributors, seconds, own)

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
        inputs: Sequence[EncodedTensors] = (),
    ) -> JournaledVersion:
        state = self.outer.state(fragment)
        facts = Facts(
            fragment, state.version, step, epoch, state.digest, base, contributors, seconds, rows_of(state.roles)
        )
        content = self._content(fragment, state, inputs)
        began = self._clock()
        self._retry("the journal cannot be written", lambda: self._journal.append(facts, content))
        return JournaledVersion(facts, self._clock() - began)

    def _content(self, fragment: FragmentId, state: FragmentState, inputs: Sequence[EncodedTensors]) -> Content:
        since = self._merges_since_state.get(fragment, MERGES_PER_STATE) + 1
        state_bytes = sum(array.nbytes for arrays in state.arrays() for array in arrays.values())
        input_bytes = sum(displacement.value_bytes for displacement in inputs)
        if not inputs or since >= MERGES_PER_STATE or input_bytes > INPUTS_SHARE_MAX * state_bytes:
            self._merges_since_state[fragment] = 0
            return state
        self._merges_since_state[fragment] = since
        return tuple(inputs)


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
    for facts, inputs in merges:
        assert not isinstance(inputs, FragmentState)
        weights = [weight for _, weight in facts.contributors]
        digest = outer.merge(fragment, facts.version, list(zip(inputs, weights, strict=True)))
        if digest != facts.digest:
            raise DataError(
                detail=f"The merge of version {facts.version} of fragment {fragment} gave {facts.digest}, and taken again "
                f"from the journal it gives {digest}: the specification, or the program, is another one."
            )
    return outer.state(fragment)
