"""The measurement of a loss on held-out data, batch by batch, within a time limit.

If all batches would take longer than the limit, half of them are measured, or a quarter, and so on, and at least one. They
are always the first ones, so losses of the same count are over the same sequences. The count is estimated after the first
batch, and again after each. The caller computes the loss of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import fsum, log
from time import monotonic
from typing import TypeVar

import numpy as np

from learners.contract import HeldOutLoss
from orchestrator.core.vocabulary import SourceLoss

Batch = TypeVar("Batch")


@dataclass(frozen=True, slots=True)
class HeldOutBatch:
    """(sequences, sequence_length + 1) int32 ``tokens`` of one source, and the average bytes per token."""

    tokens: np.ndarray
    source: str
    bytes_per_token: float


def measure(
    batches: Sequence[Batch],
    sequences_per_batch: int,
    loss_of: Callable[[Batch], float],
    limit_s: float,
    clock: Callable[[], float] = monotonic,
) -> HeldOutLoss:
    """Return the mean loss of the batches that fit. ``loss_of`` must be compiled already, or it distorts the estimate."""
    losses: list[float] = []
    began, wanted = clock(), len(batches)
    while len(losses) < wanted:
        losses.append(float(loss_of(batches[len(losses)])))
        wanted = min(wanted, _fitting(len(batches), (clock() - began) / len(losses), limit_s))
    return HeldOutLoss(fsum(losses[:wanted]) / wanted, wanted * sequences_per_batch, clock() - began)


def measure_by_source(
    batches: Sequence[HeldOutBatch],
    loss_of: Callable[[np.ndarray], float],
    limit_s: float,
    clock: Callable[[], float] = monotonic,
) -> HeldOutLoss:
    """Do the same as ``measure``, and add the loss of each measured source and the bits per byte of text."""
    losses: list[float] = []

    def recorded(batch: HeldOutBatch) -> float:
        losses.append(loss_of(batch.tokens))
        return losses[-1]

    size = len(batches[0].tokens)
    whole = measure(batches, size, recorded, limit_s, clock)
    measured = list(zip(batches, losses[: whole.sequence_count // size], strict=False))

    def bits(pairs: Sequence[tuple[HeldOutBatch, float]]) -> float:
        return fsum(loss for _, loss in pairs) / fsum(batch.bytes_per_token for batch, _ in pairs) / log(2)

    by_name = {
        name: [pair for pair in measured if pair[0].source == name] for name in sorted({b.source for b, _ in measured})
    }
    sources = tuple(
        SourceLoss(name, fsum(loss for _, loss in pairs) / len(pairs), bits(pairs)) for name, pairs in by_name.items()
    )
    several = len({batch.source for batch in batches}) > 1
    return replace(whole, bits_per_byte=bits(measured), sources=sources if several else ())


def _fitting(count: int, seconds_each: float, limit_s: float) -> int:
    while count > 1 and count * seconds_each > limit_s:
        count //= 2
    return count
