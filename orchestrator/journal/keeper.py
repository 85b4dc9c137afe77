"""Θ whose every merge is in the journal before anybody hears of it, and Θ again from the journal.

Responsible for the order: outer step, then durable, then told. Refuses to know: payloads' names, publications.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.effects import MergeFragment
from orchestrator.core.vocabulary import Epoch, FragmentId, Version
from orchestrator.errors import DataError
from orchestrator.journal.entry import Facts
from orchestrator.journal.storage import Journal
from orchestrator.merge import wire
from orchestrator.merge.outer_optimizer import OuterOptimizer
from orchestrator.merge.outer_state import FragmentState, OuterState

Insist = Callable[[str, Callable[[], None]], None]
Inputs = Sequence[tuple[Mapping[str, NDArray[np.float32]], float]]


@dataclass(frozen=True, slots=True)
class Made:
    """A version that is kept and may be told: what is known of it, and Θ of the fragment as bytes to publish.

    ``journal_seconds`` is how long it took to be kept, also where the disk refused for a while.
    """

    facts: Facts
    payload: bytes
    journal_seconds: float


class Keeper:
    """Not for several threads at once. ``insist`` does what may raise OSError until it is done (``runtime.patience``).

    ``clock`` measures, in seconds, how long merging and keeping take. The journal holds what it says, so a simulation that
    is to be repeated has one of its own.
    """

    def __init__(
        self, outer: OuterState, journal: Journal, insist: Insist, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.outer, self._journal, self._insist, self._clock = outer, journal, insist, clock

    def begin(self, fragment: FragmentId, epoch: Epoch, step: int = 0) -> Made:
        """Keep the first version, too, made at ``step`` of an earlier job: who recovers needs nobody to make Θ again."""
        return self._kept(fragment, step, epoch, "", (), 0.0)

    def merge(self, order: MergeFragment, inputs: Inputs) -> Made:
        """Take the outer step and keep what it made. It is durable, as the policy has it, when this returns."""
        began = self._clock()
        base = self.outer.state(order.fragment).digest
        self.outer.merge(order.fragment, order.version, inputs)
        contributors = tuple((str(item.island), item.weight) for item in order.inputs)
        seconds = self._clock() - began
        return self._kept(order.fragment, order.step, order.epoch, base, contributors, seconds)

    def restore(self, fragment: FragmentId, version: Version, step: int, epoch: Epoch, state: FragmentState) -> Made:
        """Put an earlier state in the fragment's place, as its next version, and keep that."""
        base = self.outer.state(fragment).digest
        self.outer.restore(fragment, version, state)
        return self._kept(fragment, step, epoch, base, (), 0.0)

    def _kept(
        self,
        fragment: FragmentId,
        step: int,
        epoch: Epoch,
        base: str,
        contributors: tuple[tuple[str, float], ...],
        seconds: float,
    ) -> Made:
        state = self.outer.state(fragment)
        facts = Facts(fragment, state.version, step, epoch, state.digest, base, contributors, seconds)
        payload, momentum = wire.encode(state.parameters), wire.encode(state.momentum)
        began = self._clock()
        self._insist("the journal cannot be written", lambda: self._journal.append(facts, payload, momentum))
        return Made(facts, payload, self._clock() - began)


def remembered(
    journal: Journal, fragment_count: int, averaging: str, optimizer: OuterOptimizer
) -> tuple[OuterState, tuple[Facts, ...]]:
    """Θ as the journal has it newest, and what is known of each fragment's last merge. Raises DataError if it lacks any."""
    newest = [journal.newest(FragmentId(p)) for p in range(fragment_count)]
    if missing := [p for p, version in enumerate(newest) if version is None]:
        raise DataError(detail=f"The journal holds nothing of the fragments {missing}.")
    kept = [journal.read(FragmentId(p), Version(version or 0)) for p, version in enumerate(newest)]
    return OuterState.restored([state for _, state in kept], averaging, optimizer), tuple(facts for facts, _ in kept)
