"""Resharding: how a resumed job deals the rest of its data to a different set of islands.

A stream is the data of one island, by sequence. When a job is resumed, the rest of every stream is dealt to the new islands
in blocks. A block is as many sequences as divide every old island's batch, so that each old island had drawn whole blocks.
With m old and n new streams there are lcm(m, n) substreams: each old stream is split into lcm/m of them, and each new stream
takes lcm/n, in turns. With cursors c, block k of new stream i is block

   c[j] + ℓ mod s + s·⌊k / t⌋   of old stream j = ⌊ℓ / s⌋,   where ℓ = i·t + k mod t,   s = lcm/m,   t = lcm/n

So every sequence after a cursor belongs to exactly one new stream, and none before a cursor to any, whatever the batches of
the new islands are. The rule is applied once for each resumption. Pure arithmetic. Source: ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import lcm
from typing import Any

Draw = Callable[[int], Any]
"""Returns the batch with a given number: (sequences, sequence_length + 1) int32 tokens, or a ``learners.contract.Batch``."""
Resumptions = Sequence[tuple[int, Sequence[int]]]
"""For each resumption, first to last: the sequences of a block, and the cursors of all streams in blocks."""


def origins(
    resumptions: Resumptions, batch_size: int, shard_index: int, shard_count: int, number: int
) -> list[tuple[int, int]]:
    """Return the original shard and number, as the job was first cut, of each sequence of this island's batch ``number``."""
    return [
        origin(resumptions, shard_index, shard_count, sequence)
        for sequence in range(number * batch_size, (number + 1) * batch_size)
    ]


def origin(resumptions: Resumptions, stream: int, stream_count: int, number: int) -> tuple[int, int]:
    """Return the original shard of sequence ``number`` of this stream, and its number there."""
    for block, cursors in reversed(resumptions):
        substreams = lcm(len(cursors), stream_count)
        split, taken = substreams // len(cursors), substreams // stream_count
        number, within = divmod(number, block)
        substream = stream * taken + number % taken
        before = substream // split
        stream, stream_count = before, len(cursors)
        number = (cursors[before] + substream % split + split * (number // taken)) * block + within
    return stream, number


def first_count(resumptions: Resumptions, stream_count: int) -> int:
    """Return the number of shards that the data was cut into when the job began."""
    return len(resumptions[0][1]) if resumptions else stream_count
