"""What is left of the data when a job is resumed: every batch belongs to one island, however many there are now."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from learners.data_lanes import first_count, origin

counts = st.integers(1, 7)


@given(counts, st.lists(st.tuples(counts, st.integers(0, 40)), min_size=0, max_size=3), st.data())
def test_over_all_resumptions_no_batch_is_drawn_twice_and_none_is_left_out(first, resumptions, data) -> None:
    """Islands draw unevenly, the job is resumed with other counts, and so on; at the end everybody draws much more."""
    earlier: list[tuple[int, ...]] = []
    count, drawn = first, Counter()
    for next_count, most in resumptions:
        cursors = tuple(data.draw(st.integers(0, most)) for _ in range(count))
        drawn.update(origin(earlier, stream, count, n) for stream in range(count) for n in range(cursors[stream]))
        earlier.append(cursors)
        count = next_count
    rest = 2_000
    drawn.update(origin(earlier, stream, count, n) for stream in range(count) for n in range(rest))
    assert max(drawn.values()) == 1
    shards = {shard for shard, _ in drawn}
    assert shards <= set(range(first_count(earlier, count)))
    for shard in shards:
        numbers = sorted(n for s, n in drawn if s == shard)
        gap = next((k for k, n in enumerate(numbers) if k != n), len(numbers))
        assert gap >= 150, f"batch {gap} of shard {shard} was left out"


def test_with_as_many_islands_each_goes_on_where_it_was() -> None:
    assert [origin([(5, 9)], 1, 2, k) for k in range(3)] == [(1, 9), (1, 10), (1, 11)]


def test_from_two_to_three_each_takes_two_lanes_of_the_six() -> None:
    drawn = [[origin([(10, 20)], stream, 3, k) for k in range(4)] for stream in range(3)]
    assert drawn == [
        [(0, 10), (0, 11), (0, 13), (0, 14)],
        [(0, 12), (1, 20), (0, 15), (1, 23)],
        [(1, 21), (1, 22), (1, 24), (1, 25)],
    ]
