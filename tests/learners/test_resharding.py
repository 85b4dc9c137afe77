"""What is left of the data when a job is resumed: every sequence belongs to one island, whatever the islands are now."""

from __future__ import annotations

from collections import Counter
from math import gcd

from hypothesis import given
from hypothesis import strategies as st

from learners.resharding import first_count, origin

sizes = st.lists(st.integers(1, 6), min_size=1, max_size=5)
"""The batch size of each island."""


@given(sizes, st.lists(st.tuples(sizes, st.integers(0, 12)), max_size=3), st.data())
def test_over_all_resumptions_no_sequence_is_drawn_twice_and_none_is_left_out(batches, resumptions, data) -> None:
    """Islands draw unevenly, the job is resumed on others with other batches, and so on; in the end all draw much more."""
    earlier: list[tuple[int, tuple[int, ...]]] = []
    drawn = Counter()
    for next_batches, most in resumptions:
        cursors = [data.draw(st.integers(0, most)) * batch for batch in batches]
        for stream, cursor in enumerate(cursors):
            drawn.update(origin(earlier, stream, len(batches), n) for n in range(cursor))
        block = gcd(*batches)
        earlier.append((block, tuple(cursor // block for cursor in cursors)))
        batches = next_batches
    drawn.update(origin(earlier, stream, len(batches), n) for stream in range(len(batches)) for n in range(1_500))
    assert max(drawn.values()) == 1
    shards = {shard for shard, _ in drawn}
    assert shards <= set(range(first_count(earlier, len(batches))))
    for shard in shards:
        numbers = sorted(n for s, n in drawn if s == shard)
        gap = next((k for k, n in enumerate(numbers) if k != n), len(numbers))
        assert gap >= 200, f"sequence {gap} of shard {shard} was left out"


def _batch_origin(resumptions, stream, count, number):
    """The rule of earlier builds, by which checkpoints were resumed: batches of one size were dealt, not sequences."""
    by_batch = [(1, cursors) for cursors in resumptions]
    return origin(by_batch, stream, count, number)


@given(st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=5), max_size=3), st.integers(1, 5), st.integers(1, 8))
def test_with_batches_of_one_size_whole_batches_are_dealt_as_ever(cursors, count, size) -> None:
    by_sequence = [(size, leg) for leg in cursors]
    for stream in range(count):
        for number in range(20):
            shard, batch = _batch_origin(cursors, stream, count, number)
            drawn = [origin(by_sequence, stream, count, number * size + n) for n in range(size)]
            assert drawn == [(shard, batch * size + n) for n in range(size)]


def test_with_as_many_islands_each_goes_on_where_it_was() -> None:
    assert [origin([(2, (5, 9))], 1, 2, k) for k in range(3)] == [(1, 18), (1, 19), (1, 20)]


def test_from_two_to_three_each_takes_two_substreams_of_the_six() -> None:
    drawn = [[origin([(1, (10, 20))], stream, 3, k) for k in range(4)] for stream in range(3)]
    assert drawn == [
        [(0, 10), (0, 11), (0, 13), (0, 14)],
        [(0, 12), (1, 20), (0, 15), (1, 23)],
        [(1, 21), (1, 22), (1, 24), (1, 25)],
    ]
