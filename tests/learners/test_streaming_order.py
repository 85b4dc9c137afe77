"""Which sequence is where, by arithmetic: every piece to one shard, every place once, and little counted for it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from math import gcd

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learners.island_spec import first_count, origin
from learners.streaming import order
from learners.streaming.order import (
    BLOCK_SEQUENCES,
    GROUP_BYTES,
    Mixture,
    NoSequence,
    Section,
    Sections,
    cut,
    divided,
    listed,
    shuffled,
)

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


@dataclass
class Counted:
    """Pieces of these tokens, ``scale`` bytes for each, and which of them were counted, in turn."""

    tokens: np.ndarray
    scale: int = 1
    asked: list[int] = field(default_factory=list)

    def of(self, pieces: np.ndarray) -> np.ndarray:
        self.asked += pieces.tolist()
        return self.tokens[pieces]

    def section(self, length: int, by: int) -> Section:
        return Section(np.arange(len(self.tokens)), self.tokens * self.scale + 1, self.of, length, by)


@st.composite
def drawable(draw) -> tuple[Counted, int, int]:
    """Pieces with a sequence at least, its length, and a key."""
    tokens = draw(st.lists(st.integers(0, 400), min_size=1, max_size=30).filter(lambda tokens: sum(tokens) > 1))
    scale = draw(st.sampled_from([1, GROUP_BYTES // 300]))
    return Counted(np.array(tokens, np.int64), scale), draw(st.integers(1, sum(tokens) - 1)), draw(st.integers(0, 9))


@given(drawable(), st.integers(0, 2))
def test_in_an_epoch_each_place_of_the_text_is_in_one_sequence(drawn, epoch) -> None:
    counted, length, by = drawn
    section = counted.section(length, by)
    count = (int(counted.tokens.sum()) - 1) // length
    places = [section.place(number) for number in range(epoch * count, (epoch + 1) * count)]
    begins, before = {}, 0
    for group in {group.number: group for group, _ in places}.values():
        begins[group.number] = before
        before += int(counted.tokens[list(group.pieces)].sum())
    starts = [begins[group.number] + group.offset + within * length for group, within in places]
    assert sorted(starts) == [number * length for number in range(count)]
    numbers = [group.number for group, _ in places]
    assert numbers == sorted(numbers), "a group was left and come back to"
    assert {group.epoch for group, _ in places} == {epoch}


@given(drawable(), st.integers(0, 400))
def test_where_a_sequence_is_does_not_depend_on_what_was_counted_before(drawn, number) -> None:
    counted, length, by = drawn
    section, again = counted.section(length, by), counted.section(length, by)
    forwards = [section.place(before) for before in range(number + 1)]
    assert again.place(number) == forwards[-1]
    assert again.place(0) == forwards[0]


@given(drawable())
def test_no_more_is_counted_than_the_next_sequence_needs(drawn) -> None:
    counted, length, by = drawn
    section = counted.section(length, by)
    count = (int(counted.tokens.sum()) - 1) // length
    for number in range(count):
        group, _ = section.place(number)
        own = [counted.asked.index(piece) for piece in group.pieces]
        behind = counted.asked[max(own) + 1 :]
        assert int(counted.tokens[behind[:-1]].sum()) < 2 * length
    assert len(counted.asked) == len(set(counted.asked)), "a piece was counted twice"


@given(drawable(), st.integers(0, 200))
def test_the_group_that_follows_is_known(drawn, number) -> None:
    counted, length, by = drawn
    section = counted.section(length, by)
    group, _ = section.place(number)
    assert section.place(group.following - 1)[0] == group
    assert section.place(group.following)[0].number > group.number


@given(st.lists(st.integers(0, 5), max_size=9), st.integers(0, 3))
def test_pieces_without_a_sequence_are_refused_when_all_of_them_were_counted(tokens, more) -> None:
    counted = Counted(np.array(tokens, np.int64))
    section = counted.section(max(1, sum(tokens) + more), 0)
    for _ in range(2):
        with pytest.raises(NoSequence) as caught:
            section.place(0)
        assert caught.value.token_count == counted.tokens.sum()


@given(st.lists(st.integers(1, 1 << 20), min_size=1, max_size=4000))
def test_a_shard_is_divided_into_sections_of_a_largest_size(sizes) -> None:
    array = np.array(sizes, np.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "SECTION_BYTES", 16 << 20)
        by_section = np.bincount(divided(array), array)
    assert by_section.min() > 0
    assert by_section.max() <= (16 << 20) + (1 << 20)


@given(
    st.lists(st.lists(st.integers(1, 90), min_size=3, max_size=9), min_size=2, max_size=4),
    st.lists(st.integers(1, 60), min_size=4, max_size=4),
    st.integers(0, 3),
)
def test_each_section_gives_its_quota_and_no_place_again_before_all_others(tokens, quotas, by) -> None:
    """Whatever the quotas are."""
    length = 2
    of_sections = [Counted(np.array(each, np.int64)).section(length, by) for each in tokens]
    divided_shard = Sections(of_sections, quotas[: len(of_sections)], by)
    epoch_count, epochs = sum(divided_shard.quotas), 5
    drawn = [divided_shard.place(number) for number in range(epochs * epoch_count)]
    for epoch in range(epochs):
        own = drawn[epoch * epoch_count : (epoch + 1) * epoch_count]
        assert Counter(place.section for place in own) == dict(enumerate(divided_shard.quotas))
        assert len([1 for a, b in pairwise(own) if a.section != b.section]) == len(of_sections) - 1
        assert {place.epoch for place in own} == {epoch}
    for number, quota in enumerate(divided_shard.quotas):
        assert [place.number for place in drawn if place.section == number] == list(range(epochs * quota))


@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=8), st.integers(0, 5))
def test_sources_are_mixed_by_weight_and_each_gives_its_sequences_in_turn(weights, by) -> None:
    mixture = Mixture(weights, by)
    drawn = [mixture.source(number) for number in range(2 * BLOCK_SEQUENCES)]
    counts = Counter(source for source, _ in drawn)
    for source, weight in enumerate(weights):
        assert [rank for s, rank in drawn if s == source] == list(range(counts[source]))
        assert counts[source] / 2 == pytest.approx(weight / sum(weights) * BLOCK_SEQUENCES, abs=1 + len(weights))
        assert counts[source] >= 2


# ── after a resumption ──────────────────────────────────────────────────────────────────────────────────────────────────

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
