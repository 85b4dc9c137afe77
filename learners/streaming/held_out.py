"""Which documents of streamed text are held out. It depends on their content, and neither on their file nor on their place.

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

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

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
