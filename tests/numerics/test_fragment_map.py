"""The fragment map: disjoint, complete, the same for everyone, and even: also of the models that people have."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import ConfigurationError, DataError
from orchestrator.parameters import fragment_map, tensors
from orchestrator.parameters.pieces import Role, joined, piece_named, taken
from tests.numerics.model_shapes import MODELS, scanned_llama_8b

SHAPES = st.dictionaries(
    st.text("abc/", min_size=1, max_size=6).map("w".__add__) | st.sampled_from(["embed", "lm_head"]),
    st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple),
    min_size=1,
    max_size=40,
)


@st.composite
def shapes_roles_and_count(draw, count_max=40):
    shapes = draw(SHAPES)
    stacked = draw(st.sets(st.sampled_from(sorted(shapes))))
    roles = {name: Role(stacked_axes=len(shapes[name]) - 1) for name in stacked}
    return shapes, roles, draw(st.integers(1, min(len(shapes), count_max)))


@given(shapes_roles_and_count())
def test_every_parameter_is_in_exactly_one_fragment_and_no_fragment_is_empty(case):
    shapes, roles, count = case
    fragments = fragment_map.build(shapes, count, roles)
    assert len(fragments) == count
    assert all(fragments)
    numbers = {name: np.arange(math.prod(shape), dtype=np.float32).reshape(shape) for name, shape in shapes.items()}
    pieces = [taken(numbers, members) for members in fragments]
    assert sum(map(len, pieces)) == len({name for members in fragments for name in members})
    together = joined({name: array for members in pieces for name, array in members.items()})
    assert together.keys() == numbers.keys()
    for name, array in numbers.items():
        assert np.array_equal(together[name], array)


@given(shapes_roles_and_count(), st.randoms(use_true_random=False))
def test_insertion_order_does_not_matter(case, chance):
    shapes, roles, count = case
    shuffled = list(shapes.items())
    chance.shuffle(shuffled)
    assert fragment_map.build(dict(shuffled), count, roles) == fragment_map.build(shapes, count, roles)


@given(shapes_roles_and_count())
def test_a_stacked_tensor_is_cut_between_its_layers_or_experts_only(case):
    shapes, roles, count = case
    pieces = [piece_named(name) for members in fragment_map.build(shapes, count, roles) for name in members]
    for piece in pieces:
        if piece.bounds is not None and piece.tensor in roles and roles[piece.tensor].stacked_axes:
            assert piece.bounds[0] < roles[piece.tensor].stacked_axes


@given(shapes_roles_and_count())
def test_what_is_even_enough_whole_is_not_split(case):
    shapes, roles, count = case
    fragments = fragment_map.build(shapes, count, roles)
    if all(piece_named(name).bounds is None for members in fragments for name in members):
        return
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    assert packed_peak(sizes, count) > fragment_map.PEAK_MAX * sum(sizes.values()) / count


def packed_peak(sizes, count):
    """The largest load when whole tensors are dealt out, largest first, to the lightest."""
    peaks = [0] * count
    for size in sorted(sizes.values(), reverse=True):
        peaks[peaks.index(min(peaks))] += size
    return max(peaks)


def optimal_peak(sizes: list[int], count: int) -> int:
    """By trying every assignment."""
    return min(
        max(sum(size for size, chosen in zip(sizes, where, strict=True) if chosen == fragment) for fragment in where)
        for where in product(range(count), repeat=len(sizes))
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3))
def test_peak_is_within_grahams_bound_of_the_best_map_of_whole_tensors(sizes, count):
    count = min(count, len(sizes))
    shapes = {f"t{index}": (size,) for index, size in enumerate(sizes)}
    peak = max(fragment_map.sizes(fragment_map.build(shapes, count), shapes))
    assert 3 * count * peak <= (4 * count - 1) * optimal_peak(sizes, count)


@pytest.mark.parametrize("count", [8, 24, 32, 64, 96])
@pytest.mark.parametrize("model", MODELS)
def test_the_fragments_of_real_models_are_even(model, count):
    shapes = MODELS[model]
    fragments = fragment_map.build(shapes, count)
    assert max(fragment_map.sizes(fragments, shapes)) <= 1.1 * sum(fragment_map.sizes(fragments, shapes)) / count


@pytest.mark.parametrize("model", MODELS)
def test_with_24_fragments_only_the_embeddings_of_real_models_are_split(model):
    pieces = [piece_named(name) for members in fragment_map.build(MODELS[model], 24) for name in members]
    assert {piece.tensor for piece in pieces if piece.bounds} <= {"model.embed_tokens.weight", "lm_head.weight"}


@pytest.mark.parametrize("count", [8, 24, 32, 64, 96])
def test_the_fragments_of_a_layer_scanned_model_are_even_and_no_layer_is_split(count):
    shapes, roles = scanned_llama_8b()
    fragments = fragment_map.build(shapes, count, roles)
    assert max(fragment_map.sizes(fragments, shapes)) <= 1.1 * sum(fragment_map.sizes(fragments, shapes)) / count
    pieces = [piece_named(name) for members in fragments for name in members]
    assert all(piece.bounds[0] == 0 for piece in pieces if piece.bounds and piece.tensor in roles)


def test_where_embeddings_are_not_enough_matrices_are_split_too():
    shapes = {"up": (100, 30), "down": (30, 10)}
    fragments = fragment_map.build(shapes, 2)
    assert max(fragment_map.sizes(fragments, shapes)) <= 1.1 * 3300 / 2
    assert any(piece_named(name).tensor == "up" for members in fragments for name in members)


def test_ties_break_by_name_and_then_by_fragment_index():
    shapes = {"d": (2,), "b": (2,), "a": (2,), "c": (2,)}
    assert fragment_map.build(shapes, 2) == (("a", "c"), ("b", "d"))


@pytest.mark.parametrize(
    ("shapes", "count", "roles", "remedy"),
    [
        ({"a": (1,), "b": (1,)}, 3, {}, "Lower it to at most 2"),
        ({"a": (1,)}, 0, {}, "Set it to 1 or more"),
        ({"a": (1,), "b": (0, 3)}, 1, {}, "'b' have no elements"),
        ({"a[0:3]": (3,)}, 1, {}, "Rename them"),
        ({"a": (3,)}, 1, {"b": Role()}, "'b' a role with 0 stacked axes, but it has no such tensor"),
        ({"a": (3, 2)}, 1, {"a": Role(stacked_axes=2)}, "2 stacked axes, but it has the shape"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_a_remedy(shapes, count, roles, remedy):
    with pytest.raises(ConfigurationError, match=remedy):
        fragment_map.build(shapes, count, roles)


MIXTURE = {"embed": (100, 4), "layers.router": (2, 4, 8), "layers.experts.up": (2, 8, 4, 6), "norm": (4,)}


def test_routers_are_the_last_fragment_and_the_rest_is_cut_as_if_there_were_none():
    roles = {"layers.experts.up": Role(stacked_axes=2), "layers.router": Role(stacked_axes=1)}
    fragments = fragment_map.build(MIXTURE, 4, roles, routers_apart=True)
    assert fragments[-1] == ("layers.router",)
    rest = {name: shape for name, shape in MIXTURE.items() if name != "layers.router"}
    assert fragments[:-1] == fragment_map.build(rest, 3, {"layers.experts.up": Role(stacked_axes=2)})
    arrays = {name: np.zeros(shape, np.float32) for name, shape in MIXTURE.items()}
    own = [tensors.shapes(taken(arrays, members)) for members in fragments]
    fragment_map.require_own(own, roles, routers_apart=True)
    with pytest.raises(DataError, match="other fragments"):
        fragment_map.require_own(own, roles)


@pytest.mark.parametrize(
    ("shapes", "count", "lack"),
    [
        ({"embed": (9, 4), "up": (4, 4)}, 2, "no routers"),
        ({"layers.router": (4, 4)}, 2, "nothing but routers"),
        (MIXTURE, 1, "one fragment"),
    ],
)
def test_routers_that_cannot_be_apart_are_refused_with_a_remedy(shapes, count, lack):
    with pytest.raises(ConfigurationError, match=rf"synchroniser\.router_interval_steps .*{lack}\. Leave it out"):
        fragment_map.build(shapes, count, routers_apart=True)


def test_fragments_of_another_build_are_refused_and_own_ones_are_not():
    shapes, roles = {"embed": (100, 4), "up": (10, 4), "layers": (6, 5, 4)}, {"layers": Role(stacked_axes=1)}
    arrays = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    own = [tensors.shapes(taken(arrays, members)) for members in fragment_map.build(shapes, 3, roles)]
    fragment_map.require_own(own, roles)
    with pytest.raises(DataError, match="other fragments"):
        fragment_map.require_own([{name: shape} for name, shape in shapes.items()], roles)
