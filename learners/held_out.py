"""The measurement of a loss on held-out data, batch by batch, within a time limit.

If all batches would take longer than the limit, half of them are measured, or a quarter, and so on, and at least one. They
are always the first ones, so losses of the same count are over the same sequences. The count is estimated after the first
batch, and again after each. The caller computes the loss of a batch.

Which documents of streamed text are held out. It depends on their content, and neither on their file nor on their place.

   by ratio      a document is held out if its digest, as a number below 2⁶⁴, is below ``held_out_ratio`` · 2⁶⁴
   reserved      documents that are held out one by one, by their digests: those of files that a source reserves (all of
                 small ones, otherwise those that are measured); and of a small source those with the smallest digests,
                 because the ratio might select none

So equal documents are on the same side, in whatever files, pieces and sources they are, and nothing has to read all text to
know. Documents are equal if they have the same bytes. Plain text has no documents: it is cut into blocks by its content
(``documents``), so that equal passages are equal blocks, except for the first and last of each. Arithmetic over bytes.
Source: ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import fsum, log
from time import monotonic
from typing import Any, TypeVar

import numpy as np

from learners.contract import Batch, HeldOutLoss
from orchestrator.core.vocabulary import SourceLoss

DIGEST_BITS = 64


def digest(document: bytes) -> int:
    """Return a number below 2⁶⁴ that changes with any change of the document."""
    return int.from_bytes(blake2b(document, digest_size=DIGEST_BITS // 8).digest(), "little")


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The text that no island trains on. ``limit`` is that of digests; 0 if every source reserves its own."""

    limit: int
    reserved: frozenset[int] = frozenset()

    @classmethod
    def of_ratio(cls, ratio: float) -> HeldOut:
        return cls(int(ratio * 2**DIGEST_BITS))

    def has(self, document: bytes) -> bool:
        return self.has_digest(digest(document))

    def has_digest(self, number: int) -> bool:
        return number < self.limit or number in self.reserved


def smallest(sizes: Mapping[int, int], wanted_bytes: float) -> frozenset[int]:
    """Return the digests of documents, smallest first, with ``wanted_bytes`` in sum: at least one, at most half of all.

    ``sizes`` are the bytes of each document by its digest.
    """
    limit, taken, chosen = min(wanted_bytes, sum(sizes.values()) / 2), 0, set[int]()
    for number in sorted(sizes)[: max(1, len(sizes) - 1)]:
        if chosen and taken >= limit:
            break
        chosen.add(number)
        taken += sizes[number]
    return frozenset(chosen)


Measured = TypeVar("Measured")


@dataclass(frozen=True, slots=True)
class HeldOutBatch:
    """The sequences of one source, as ``tokens`` (sequences, sequence_length + 1) int32 or a ``Batch``.

    ``bytes_per_token`` is the average of what counts in the loss, if known.
    """

    tokens: np.ndarray | Batch
    source: str
    bytes_per_token: float | None

    @property
    def weight(self) -> float:
        """Return how much the batch counts: 1 if every token does."""
        weights = Batch.of(self.tokens).target_weights
        return 1.0 if weights is None else float(np.sum(weights))


def measure(
    batches: Sequence[Measured],
    sequences_per_batch: int,
    loss_of: Callable[[Measured], float],
    limit_s: float,
    clock: Callable[[], float] = monotonic,
    weights: Sequence[float] | None = None,
) -> HeldOutLoss:
    """Return the mean loss of the batches that fit, by their weights.

    ``loss_of`` must be compiled already, or it distorts the estimate.
    """
    losses: list[float] = []
    began, wanted = clock(), len(batches)
    while len(losses) < wanted:
        losses.append(float(loss_of(batches[len(losses)])))
        wanted = min(wanted, _fitting(len(batches), (clock() - began) / len(losses), limit_s))
    return HeldOutLoss(_mean(losses[:wanted], weights), wanted * sequences_per_batch, clock() - began)


def measure_by_source(
    batches: Sequence[HeldOutBatch],
    loss_of: Callable[[Any], float],
    limit_s: float,
    clock: Callable[[], float] = monotonic,
    weights: Sequence[float] | None = None,
) -> HeldOutLoss:
    """Do the same as ``measure``, and add the loss of each measured source and the bits per byte of text.

    ``weights`` replace those of the batches, for a loss that is no mean over tokens, which has no bits per byte.
    """
    losses: list[float] = []
    own = [batch.weight for batch in batches] if weights is None else weights

    def recorded(batch: HeldOutBatch) -> float:
        losses.append(loss_of(batch.tokens))
        return losses[-1]

    size = len(batches[0].tokens)
    whole = measure(batches, size, recorded, limit_s, clock, own)
    measured = list(zip(batches, losses[: whole.sequence_count // size], own, strict=False))

    def bits(pairs: Sequence[tuple[HeldOutBatch, float, float]]) -> float | None:
        sizes = [weight * batch.bytes_per_token for batch, _, weight in pairs if batch.bytes_per_token is not None]
        nats = fsum(weight * loss for _, loss, weight in pairs)
        if weights is not None:
            return None
        return nats / fsum(sizes) / log(2) if len(sizes) == len(pairs) else None

    by_name = {
        name: [pair for pair in measured if pair[0].source == name] for name in sorted({b.source for b, *_ in measured})
    }
    sources = tuple(
        SourceLoss(name, _mean([loss for _, loss, _ in pairs], [weight for _, _, weight in pairs]), bits(pairs))
        for name, pairs in by_name.items()
    )
    several = len({batch.source for batch in batches}) > 1
    return replace(whole, bits_per_byte=bits(measured), sources=sources if several else ())


def _mean(losses: Sequence[float], weights: Sequence[float] | None) -> float:
    """Return the mean by the first of the weights: a held-out batch without learned tokens counts nothing."""
    own = [1.0] * len(losses) if weights is None else weights[: len(losses)]
    total = fsum(own)
    return fsum(weight * loss for weight, loss in zip(own, losses, strict=True)) / total if total else 0.0


def _fitting(count: int, seconds_each: float, limit_s: float) -> int:
    while count > 1 and count * seconds_each > limit_s:
        count //= 2
    return count
