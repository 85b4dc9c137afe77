"""Data lanes: how a resumed job deals what is left of its data to other islands than it began with.

At a resumption the rest of every stream (an island's data, by batch number) is dealt to the new islands in lanes. With m
streams before and n after there are lcm(m, n) lanes: each old stream is split into lcm/m of them, each new one takes
lcm/n, in turns. With cursors c, batch k of new stream i is batch

    c[j] + ℓ mod s + s·⌊k / t⌋   of old stream j = ⌊ℓ / s⌋,   where ℓ = i·t + k mod t,   s = lcm/m,   t = lcm/n

so that every batch behind a cursor belongs to exactly one new stream, and none before a cursor to any. Resumed more
than once, the rule is applied once per resumption. Pure arithmetic. Source: ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

Resumptions = Sequence[Sequence[int]]
"""The cursors of all streams at each resumption, first to last."""


def origin(resumptions: Resumptions, stream: int, stream_count: int, number: int) -> tuple[int, int]:
    """The shard of the job's first specification, and the number of its batch, that is batch ``number`` of this stream."""
    for cursors in reversed(resumptions):
        lanes = lcm(len(cursors), stream_count)
        split, taken = lanes // len(cursors), lanes // stream_count
        lane = stream * taken + number % taken
        before = lane // split
        stream, stream_count = before, len(cursors)
        number = cursors[before] + lane % split + split * (number // taken)
    return stream, number


def first_count(resumptions: Resumptions, stream_count: int) -> int:
    """The number of shards that the data was cut into when the job began."""
    return len(resumptions[0]) if resumptions else stream_count
