"""Θ whose every merge is in the journal before anybody hears of it, and Θ again from the journal.

Responsible for the order: outer step, then durable, then told. Refuses to know: payloads, publications, retries.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
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

Inputs = Sequence[tuple[Mapping[str, NDArray[np.float32]], float]]


@dataclass(frozen=True, slots=True)
class Made:
    """A merge that is made and not told yet: ``facts``, and Θ of the fragment as bytes to publish."""

    facts: Facts
    payload: bytes
    momentum: bytes


def begin(outer: OuterState, fragment: FragmentId, epoch: Epoch) -> Made:
    """Version 0 of a fragment, which the journal keeps as well: recovery then needs nobody to make Θ again."""
    return _made(outer.state(fragment), fragment, 0, epoch, "", (), 0.0)


def merge(outer: OuterState, order: MergeFragment, inputs: Inputs) -> Made:
    """Take the outer step. The caller keeps what is returned (``keep``) before it tells anybody."""
    began = time.monotonic()
    base = outer.state(order.fragment).digest
    outer.merge(order.fragment, order.version, inputs)
    contributors = tuple((str(item.island), item.weight) for item in order.inputs)
    state, seconds = outer.state(order.fragment), time.monotonic() - began
    return _made(state, order.fragment, order.step, order.epoch, base, contributors, seconds)


def keep(journal: Journal, made: Made) -> None:
    """Durable when this returns. Raises OSError, and may be asked again."""
    journal.append(made.facts, made.payload, made.momentum)


def remembered(
    journal: Journal, fragment_count: int, averaging: str, optimizer: OuterOptimizer
) -> tuple[OuterState, tuple[Facts, ...]]:
    """Θ as the journal has it newest, and what is known of each fragment's last merge. Raises DataError if it lacks any."""
    newest = [journal.newest(FragmentId(p)) for p in range(fragment_count)]
    if missing := [p for p, version in enumerate(newest) if version is None]:
        raise DataError(detail=f"The journal holds nothing of the fragments {missing}.")
    kept = [journal.read(FragmentId(p), Version(version or 0)) for p, version in enumerate(newest)]
    return OuterState.restored([state for _, state in kept], averaging, optimizer), tuple(facts for facts, _ in kept)


def _made(
    state: FragmentState,
    fragment: FragmentId,
    step: int,
    epoch: Epoch,
    base: str,
    contributors: tuple[tuple[str, float], ...],
    seconds: float,
) -> Made:
    facts = Facts(fragment, state.version, step, epoch, state.digest, base, contributors, seconds)
    return Made(facts, wire.encode(state.parameters), wire.encode(state.momentum))
