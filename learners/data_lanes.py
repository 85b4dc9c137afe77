"""Data lanes: how a resumed job deals what is left of its data to other islands than it began with.

A stream is an island's data, by sequence. At a resumption the rest of every stream is dealt to the new islands in lanes, a
granule at a time: as many sequences as divide every old island's batch, so that each had drawn whole granules. With m
streams before and n after there are lcm(m, n) lanes: each old stream is split into lcm/m of them, each new one takes
lcm/n, in turns. With cursors c, granule k of new stream i is granule

    c[j] + ℓ mod s + s·⌊k / t⌋   of old stream j = ⌊ℓ / s⌋,   where ℓ = i·t + k mod t,   s = lcm/m,   t = lcm/n

so that every sequence behind a cursor belongs to exactly one new stream, and none before a cursor to any, whatever the
batches of the new islands are. Resumed more than once, the rule is applied once per resumption. Pure arithmetic. Source:
ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import lcm

import numpy as np

Draw = Callable[[int], np.ndarray]
"""The batch of a given number: (sequences, sequence_length + 1) int32 tokens."""
Resumptions = Sequence[tuple[int, Sequence[int]]]
"""Of each resumption, first to last: the sequences of a granule, and the cursors of all streams in granules."""


def origins(
    resumptions: Resumptions, batch_size: int, shard_index: int, shard_count: int, number: int
) -> list[tuple[int, int]]:
    """Return shard and number, as the job was first cut, of each sequence of this island's batch ``number``."""
    return [
        origin(resumptions, shard_index, shard_count, sequence)
        for sequence in range(number * batch_size, (number + 1) * batch_size)
    ]


def origin(resumptions: Resumptions, stream: int, stream_count: int, number: int) -> tuple[int, int]:
    """The shard of the job's first specification, and the number in it, of sequence ``number`` of this stream."""
    for granule, cursors in reversed(resumptions):
        lanes = lcm(len(cursors), stream_count)
        split, taken = lanes // len(cursors), lanes // stream_count
        number, within = divmod(number, granule)
        lane = stream * taken + number % taken
        before = lane // split
        stream, stream_count = before, len(cursors)
        number = (cursors[before] + lane % split + split * (number // taken)) * granule + within
    return stream, number


def first_count(resumptions: Resumptions, stream_count: int) -> int:
    """The number of shards that the data was cut into when the job began."""
    return len(resumptions[0][1]) if resumptions else stream_count
