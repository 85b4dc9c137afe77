"""The fragment map: disjoint, complete, the same for everyone, and as even as the greedy rule promises."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import ConfigurationError
from orchestrator.parameters import fragment_map

SIZES = st.dictionaries(st.text("abc/", min_size=1, max_size=6), st.integers(1, 1000), min_size=1, max_size=40)


@st.composite
def sizes_and_count(draw, sizes=SIZES):
    chosen = draw(sizes)
    return chosen, draw(st.integers(1, len(chosen)))


def loads(sizes, fragments):
    """The size of each fragment, in the unit of ``sizes``."""
    return tuple(sum(sizes[name] for name in members) for members in fragments)


@given(sizes_and_count())
def test_every_tensor_is_in_exactly_one_fragment_and_no_fragment_is_empty(case):
    sizes, count = case
    fragments = fragment_map.build(sizes, count)
    assert sorted(name for members in fragments for name in members) == sorted(sizes)
    assert len(fragments) == count
    assert all(fragments)
    assert sum(loads(sizes, fragments)) == sum(sizes.values())


@given(sizes_and_count(), st.randoms(use_true_random=False))
def test_insertion_order_does_not_matter(case, chance):
    sizes, count = case
    shuffled = list(sizes.items())
    chance.shuffle(shuffled)
    assert fragment_map.build(dict(shuffled), count) == fragment_map.build(sizes, count)


def optimal_peak(sizes: list[int], count: int) -> int:
    """By trying every assignment."""
    return min(
        max(sum(size for size, chosen in zip(sizes, where, strict=True) if chosen == fragment) for fragment in where)
        for where in product(range(count), repeat=len(sizes))
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3))
def test_peak_is_within_grahams_bound_of_the_best_map(sizes, count):
    count = min(count, len(sizes))
    named = {f"t{index}": size for index, size in enumerate(sizes)}
    peak = max(loads(named, fragment_map.build(named, count)))
    assert 3 * count * peak <= (4 * count - 1) * optimal_peak(sizes, count)


@given(sizes_and_count())
def test_the_last_tensor_put_on_the_peak_found_it_lightest(case):
    """So the peak exceeds the mean by less than its smallest tensor: the even case, where that is small, is even."""
    sizes, count = case
    fragments = fragment_map.build(sizes, count)
    sums = loads(sizes, fragments)
    peak = max(range(count), key=sums.__getitem__)
    smallest = min(sizes[name] for name in fragments[peak])
    assert count * (sums[peak] - smallest) <= sum(sizes.values()) - smallest


def test_a_transformer_of_many_layers_is_within_four_thirds_of_the_ideal():
    layer = {"attention": 4 * 512 * 512, "expand": 512 * 2048, "contract": 2048 * 512, "norm": 512}
    sizes = {f"layer{index}/{name}": size for index in range(24) for name, size in layer.items()}
    sums = loads(sizes, fragment_map.build(sizes, 24))
    assert 3 * 24 * max(sums) <= 4 * sum(sums)


def test_ties_break_by_name_and_then_by_fragment_index():
    assert fragment_map.build({"d": 2, "b": 2, "a": 2, "c": 2, "e": 1}, 2) == (("a", "c", "e"), ("b", "d"))


@pytest.mark.parametrize(
    ("sizes", "count", "remedy"),
    [
        ({"a": 1, "b": 1}, 3, "Lower it to at most 2"),
        ({"a": 1}, 0, "Set it to 1 or more"),
        ({"a": 1, "b": 0}, 1, "'b' have no elements"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_a_remedy(sizes, count, remedy):
    with pytest.raises(ConfigurationError, match=remedy):
        fragment_map.build(sizes, count)
