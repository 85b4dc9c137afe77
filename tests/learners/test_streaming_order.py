"""Which sequence is where, by arithmetic: every piece to one shard or held out, every promise kept, nothing counted."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learners.streaming.order import BLOCK_SEQUENCES, GROUP_BYTES, Mixture, ShardOfSource, cut, listed, shuffled

sizes = st.lists(st.integers(0, 3 << 20), min_size=1, max_size=6)


@given(st.integers(0, 500), st.integers(0, 2**64 - 1))
def test_an_order_has_every_number_once(count, by) -> None:
    assert sorted(shuffled(count, by)) == list(range(count))


def test_orders_are_those_that_jobs_have_been_trained_in() -> None:
    assert shuffled(8, 1).tolist() == [4, 3, 7, 0, 1, 5, 6, 2]


@given(sizes)
def test_pieces_are_all_of_the_files_once(sizes) -> None:
    pieces = cut(sizes)
    by_file = Counter()
    for file, size in zip(pieces.file.tolist(), pieces.size.tolist(), strict=True):
        by_file[file] += size
    assert [by_file[file] for file in range(len(sizes))] == sizes
    assert all(number < count for number, count in zip(pieces.number, pieces.count, strict=True))
    assert len(pieces) == 0 or pieces.size.max() <= 1 << 20


@given(sizes)
def test_each_piece_is_listed_once_and_alike_for_every_job(sizes) -> None:
    pieces = cut(sizes)
    assert sorted(listed(pieces, "web", "training")) == list(range(len(pieces)))
    assert list(listed(pieces, "web", "training")) == list(listed(cut(sizes), "web", "training"))


@st.composite
def shards(draw) -> ShardOfSource:
    tokens = draw(st.lists(st.integers(0, 400), min_size=1, max_size=30))
    scale = draw(st.sampled_from([1, GROUP_BYTES // 300]))
    array = np.array(tokens, np.int64)
    length = draw(st.integers(1, max(1, sum(tokens))))
    return ShardOfSource(np.arange(len(tokens)) + 7, array * scale + 1, array, length, draw(st.integers(0, 9)))


@given(shards().filter(lambda shard: shard.sequence_count), st.integers(0, 3))
def test_in_an_epoch_each_group_gives_what_it_promised_each_sequence_once(shard, epoch) -> None:
    first = epoch * shard.sequence_count
    places = [shard.place(number) for number in range(first, first + shard.sequence_count)]
    groups = {group.number: group for group, _ in places}
    given = Counter((group.number, within) for group, within in places)
    assert max(given.values()) == 1
    assert {(number, i) for number, group in groups.items() for i in range(group.quota)} == set(given)
    pieces = [piece for group in groups.values() for piece in group.pieces]
    assert len(pieces) == len(set(pieces))
    ordered = [number for number, _ in given]
    assert ordered == sorted(ordered), "a group was left and come back to"


@given(shards().filter(lambda shard: shard.sequence_count), st.integers(0, 200))
def test_the_group_that_follows_is_known(shard, number) -> None:
    group, _ = shard.place(number)
    assert shard.place(group.following - 1)[0] == group
    assert shard.place(group.following)[0].number > group.number


@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=8), st.integers(0, 5))
def test_sources_are_mixed_by_weight_and_each_gives_its_sequences_in_turn(weights, by) -> None:
    mixture = Mixture(weights, by)
    drawn = [mixture.source(number) for number in range(2 * BLOCK_SEQUENCES)]
    counts = Counter(source for source, _ in drawn)
    for source, weight in enumerate(weights):
        assert [rank for s, rank in drawn if s == source] == list(range(counts[source]))
        assert counts[source] / 2 == pytest.approx(weight / sum(weights) * BLOCK_SEQUENCES, abs=1 + len(weights))
        assert counts[source] >= 2
