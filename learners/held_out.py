"""The measurement of a loss on held-out data, batch by batch, within a limit of time.

Where all batches would take longer than the limit, half of them are measured, or a quarter, and so on, and at least one:
always the first ones, so that losses of one size are over the same sequences. How many is known after the first batch, and
looked at again after each. Refuses to know what a batch is, and what computes its loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import fsum
from time import monotonic
from typing import TypeVar

from learners.contract import HeldOutLoss

Batch = TypeVar("Batch")


def measure(
    batches: Sequence[Batch],
    sequences_per_batch: int,
    loss_of: Callable[[Batch], float],
    limit_s: float,
    clock: Callable[[], float] = monotonic,
) -> HeldOutLoss:
    """The mean loss of the batches that fit. ``loss_of`` must not compile: that is not counted as measuring."""
    losses: list[float] = []
    began, wanted = clock(), len(batches)
    while len(losses) < wanted:
        losses.append(float(loss_of(batches[len(losses)])))
        wanted = min(wanted, _fitting(len(batches), (clock() - began) / len(losses), limit_s))
    return HeldOutLoss(fsum(losses[:wanted]) / wanted, wanted * sequences_per_batch, clock() - began)


def _fitting(count: int, seconds_each: float, limit_s: float) -> int:
    while count > 1 and count * seconds_each > limit_s:
        count //= 2
    return count
