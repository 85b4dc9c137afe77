"""The staggered schedule of fragments: the logical steps at which each one is due, live and simulated.

Fragment p is due at every logical step t ≥ 1 with t ≡ offset_p (mod H), offset_p = ⌊p·H / P⌋. With P = H one fragment is
due at every step; with P = 1 the whole model every H steps. The schedule knows nothing of islands, counters or bytes: an
island asks it once a step, with the logical clock before and after.

Source: Streaming DiLoCo, arXiv:2501.18512 (staggered fragments); Decoupled DiLoCo, arXiv:2604.21428.
"""

from __future__ import annotations

from functools import lru_cache

from orchestrator.core.vocabulary import FragmentId


@lru_cache(maxsize=64)
def offsets(fragment_count: int, interval: int) -> tuple[int, ...]:
    """Return each fragment's place in the interval, in steps: ⌊p·H / P⌋ for p = 0 … P - 1."""
    return tuple(fragment * interval // fragment_count for fragment in range(fragment_count))


def next_due(fragment: FragmentId, after: int, fragment_count: int, interval: int) -> int:
    """Return the fragment's first due point later than logical step ``after``."""
    return after + 1 + (offsets(fragment_count, interval)[fragment] - after - 1) % interval


def due(previous_step: int, step: int, fragment_count: int, interval: int) -> tuple[FragmentId, ...]:
    """Return the fragments with a due point in (previous_step, step], earliest due point first.

    The logical clock may jump when a newer version is adopted, so there may be more than one step between the
    two. A fragment that was due several times in the gap is named once.
    """
    if step - previous_step < _steps_to_any(previous_step % interval, fragment_count, interval):
        return ()
    points = []
    for fragment in map(FragmentId, range(fragment_count)):
        point = next_due(fragment, previous_step, fragment_count, interval)
        if point <= step:
            points.append((point, fragment))
    return tuple(fragment for _, fragment in sorted(points))


@lru_cache(maxsize=4096)
def _steps_to_any(place: int, fragment_count: int, interval: int) -> int:
    """Return the steps from this place in the interval to the next due point of any fragment. Most steps need only this."""
    return min(next_due(FragmentId(p), place, fragment_count, interval) for p in range(fragment_count)) - place
