"""How long the transfer of a state between islands may take before another donor is asked: by its size.

A limit that were the same for all would be too short for a large model, or leave a small one waiting for a dead line. Where
the service notices that a donor is gone, or silent, nobody waits so long.
"""

from __future__ import annotations

STATE_BYTES_PER_PARAMETER = 12
"""A parameter and Adam's two moments, in float32: what most states have. An estimate is enough here."""
BOUNDARY_S = 30.0
"""A donor takes no longer than this to come to a boundary between two steps."""
ANSWER_S = 5.0
TO_HOST_BYTES_PER_S = 100_000_000
"""A state leaves the devices faster than this: all of it, before the first fragment of one boundary can be given."""
SLOWEST_BYTES_PER_S = 1_000_000
"""A line slower than this is as good as none: a billion parameters would take more than three hours."""
QUEUE_S, REQUESTS_AHEAD_MAX = 60.0, 4
"""Of a donor that limits its own rate: so long a queue is borne whatever is asked for, and so many requests of this size."""


def queue_s(byte_count: int, bytes_per_s: float | None) -> float:
    """How long a donor with this limit on its rate may let a request wait, its own bytes included."""
    return 0.0 if bytes_per_s is None else QUEUE_S + (REQUESTS_AHEAD_MAX + 1) * byte_count / bytes_per_s


def held_s(byte_count: int, stall_s: float, bytes_per_s: float | None) -> float:
    """How long a donor holds so many bytes of which none moves, for whoever was told of them.

    ``stall_s`` is the pull's own limit of progress. It may have to wait for another of this size, at the cap of the link.
    """
    return ANSWER_S + stall_s + byte_count / min(SLOWEST_BYTES_PER_S, bytes_per_s or SLOWEST_BYTES_PER_S)


def limit_s(byte_count: int, bytes_per_s: float | None) -> float:
    """How long whoever requests so many bytes waits for them, from a donor with this limit on its rate."""
    return BOUNDARY_S + ANSWER_S + byte_count / SLOWEST_BYTES_PER_S + queue_s(byte_count, bytes_per_s)
