"""The journaled store: Θ whose every merge is journalled before it is announced, and its recovery from the journal.

Responsible for the order: outer step, then durable, then the answer. Refuses to know payload ids and publications.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from orchestrator.core.effects import MergeFragment
from orchestrator.core.vocabulary import Epoch, FragmentId, Version
from orchestrator.errors import DataError
from orchestrator.parameters.journal.entry import Facts, payloads_of
from orchestrator.parameters.journal.storage import Journal
from orchestrator.parameters.outer_optimizer import OuterOptimizer
from orchestrator.parameters.outer_state import FragmentState, OuterState
from orchestrator.parameters.roles import rows_of
from orchestrator.parameters.tensors import Tensors

Retry = Callable[[str, Callable[[], None]], None]
"""Do what may raise OSError until it is done; the text says what cannot be done meanwhile."""


class MergeLog(Protocol):
    """The log of merges, written before they are announced: the ``Journal``, or nowhere for a run that can begin anew."""

    def append(self, facts: Facts, parameters: bytes, momentum: bytes) -> None:
        """The merge is durable, as the policy has it, when this returns. Raises OSError."""
        ...


Inputs = Sequence[tuple[Tensors, float]]


@dataclass(frozen=True, slots=True)
class JournaledVersion:
    """A version that is in the journal: its facts, and Θ of the fragment as the journal's bytes.

    ``journal_seconds`` is how long the entry took to be durable, also where the disk refused for a while.
    """

    facts: Facts
    payload: bytes
    journal_seconds: float


class JournaledStore:
    """Not for several threads at once. ``retry`` is given every write to the journal; ``clock`` times outer steps."""

    def __init__(
        self, outer: OuterState, journal: MergeLog, retry: Retry, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.outer, self._journal, self._retry, self._clock = outer, journal, retry, clock

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
        return self._journaled(order.fragment, order.step, order.epoch, base, contributors, seconds)

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
    ) -> JournaledVersion:
        state = self.outer.state(fragment)
        facts = Facts(
            fragment, state.version, step, epoch, state.digest, base, contributors, seconds, rows_of(state.roles)
        )
        payload, momentum = payloads_of(state)
        began = self._clock()
        self._retry("the journal cannot be written", lambda: self._journal.append(facts, payload, momentum))
        return JournaledVersion(facts, payload, self._clock() - began)


def recovered(
    journal: Journal, fragments: Iterable[FragmentId], averaging: str, optimizer: OuterOptimizer
) -> tuple[OuterState, tuple[Facts, ...]]:
    """Θ as the journal has it newest, and the facts of each fragment's last merge. Raises DataError if it lacks any."""
    newest = {p: journal.newest(p) for p in fragments}
    if missing := [p for p, version in newest.items() if version is None]:
        raise DataError(detail=f"The journal holds nothing of the fragments {missing}.")
    entries = {p: journal.read(p, Version(version or 0)) for p, version in newest.items()}
    states = {p: state for p, (_, state) in entries.items()}
    return OuterState.restored(states, averaging, optimizer), tuple(facts for facts, _ in entries.values())
