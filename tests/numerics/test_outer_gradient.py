"""The two averages, against a dumb model in float64 and against what their definitions promise."""

import numpy as np
import plain_model
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from whole_average import average

from orchestrator.parameters.outer_state import (
    DIRECTION_MIN,
    Averaging,
    averaging_for,
    coefficients,
)
from orchestrator.parameters.pieces import role_by_name

ANY_COUNT = st.integers(1, 6)


@st.composite
def weighted_deltas(draw, island_count=ANY_COUNT):
    """Float32 displacements of very different lengths, zeros among them, with weights that sum to one."""
    count, size = draw(island_count), draw(st.integers(1, 24))
    element = st.integers(-1000, 1000)
    rows = draw(st.lists(st.lists(element, min_size=size, max_size=size), min_size=count, max_size=count))
    scales = draw(st.lists(st.sampled_from([1e-9, 1e-3, 1.0, 1e6]), min_size=count, max_size=count))
    deltas = [np.array(row, np.float32) * np.float32(scale) for row, scale in zip(rows, scales, strict=True)]
    tokens = np.array(draw(st.lists(st.integers(1, 50), min_size=count, max_size=count)), np.float64)
    return deltas, list(tokens / tokens.sum())


def assert_close(found, expected, relative=1e-4):
    """Close in the norm: an element that is small by cancellation is only as exact as its neighbours are large."""
    expected = np.asarray(expected, np.float64)
    assert np.linalg.norm(found - expected) <= relative * np.linalg.norm(expected) + 1e-30


@given(weighted_deltas())
def test_radial_average_is_the_formula_of_the_paper(case):
    deltas, weights = case
    vectors = [delta.tolist() for delta in deltas]
    direction = plain_model.norm(plain_model.mean_direction(vectors, weights))
    assume(not DIRECTION_MIN / 2 < direction < 3 * DIRECTION_MIN)  # there float32 may decide either way
    by_formula = plain_model.radial if direction > DIRECTION_MIN else plain_model.mean
    # where the mean is a fallback it cancels: compare it with the displacements it is made of
    slack = 1e-4 * sum(w * plain_model.norm(v) for w, v in zip(weights, vectors, strict=True))
    found = average(deltas, weights, Averaging.RADIAL)
    assert np.linalg.norm(found - np.array(by_formula(vectors, weights))) <= 3 * slack + 1e-30


@given(weighted_deltas())
def test_mean_is_the_weighted_mean(case):
    deltas, weights = case
    expected = np.average(np.array(deltas, np.float64), axis=0, weights=weights)
    found = average(deltas, weights, Averaging.MEAN)
    assert np.all(np.abs(found - expected) <= 1e-6 * np.max(np.abs(deltas), axis=0))


@given(weighted_deltas(), st.sampled_from(Averaging))
def test_equal_displacements_merge_to_themselves(case, averaging):
    deltas, weights = case
    assert_close(average([deltas[0]] * len(weights), weights, averaging), deltas[0], relative=1e-5)


@given(weighted_deltas(island_count=st.just(1)))
def test_one_island_alone_is_taken_as_it_is_by_both_averages(case):
    (delta,), weights = case
    for averaging in Averaging:
        np.testing.assert_array_equal(average([delta], weights, averaging), delta)


@given(weighted_deltas(), st.sampled_from([2.0, 0.25, -4.0]), st.sampled_from(Averaging))
def test_scaling_every_displacement_scales_the_result_exactly(case, factor, averaging):
    deltas, weights = case
    scaled = average([delta * np.float32(factor) for delta in deltas], weights, averaging)
    np.testing.assert_array_equal(scaled, average(deltas, weights, averaging) * np.float32(factor))


@given(st.integers(2, 16), st.floats(0.01, 100))
def test_of_orthogonal_displacements_the_radial_average_keeps_the_length_and_the_mean_shrinks_it(count, length):
    deltas = list(np.eye(count, 20, dtype=np.float32) * np.float32(length))
    weights = [1 / count] * count
    assert np.linalg.norm(average(deltas, weights, Averaging.RADIAL)) == pytest.approx(length, rel=1e-5)
    assert np.linalg.norm(average(deltas, weights, Averaging.MEAN)) == pytest.approx(length / count**0.5, rel=1e-5)


@given(weighted_deltas(island_count=st.integers(2, 6)))
def test_length_of_the_radial_average_is_the_weighted_mean_of_lengths(case):
    deltas, weights = case
    vectors = [delta.tolist() for delta in deltas]
    assume(plain_model.norm(plain_model.mean_direction(vectors, weights)) > 3 * DIRECTION_MIN)
    expected = sum(w * plain_model.norm(v) for w, v in zip(weights, vectors, strict=True))
    assert np.linalg.norm(average(deltas, weights, Averaging.RADIAL)) == pytest.approx(expected, rel=1e-3)


def test_a_zero_displacement_has_no_direction_but_its_weight_still_shortens_the_step():
    still, east, north = np.float32([0, 0]), np.float32([2, 0]), np.float32([0, 2])
    found = average([still, east, north], [0.5, 0.25, 0.25], Averaging.RADIAL)
    np.testing.assert_allclose(found, [0.5**0.5, 0.5**0.5], rtol=1e-6)  # half the length of 2, to the north-east


def test_islands_that_did_not_move_merge_to_zero():
    assert not average([np.zeros(5, np.float32)] * 3, [0.5, 0.25, 0.25], Averaging.RADIAL).any()


def test_opposite_directions_of_unequal_length_fall_back_to_the_weighted_mean():
    there = np.random.default_rng(1).standard_normal(100_000, dtype=np.float32)
    back = -3 * there
    found = average([there, back], [0.5, 0.5], Averaging.RADIAL)
    np.testing.assert_allclose(found, -there, rtol=1e-5)


def test_three_directions_that_cancel_in_a_plane_fall_back_to_the_weighted_mean():
    angles = np.array([0, 2 * np.pi / 3, 4 * np.pi / 3])
    deltas = list(np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32) * np.float32([[1], [2], [3]]))
    found = average(deltas, [1 / 3] * 3, Averaging.RADIAL)
    np.testing.assert_allclose(found, np.mean(deltas, axis=0), atol=1e-6)


def test_the_mean_needs_no_products():
    weights = coefficients(np.full((2, 2), np.nan), [0.5, 0.5], Averaging.MEAN)
    assert weights.tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    "name", ["embed", "unembed", "token_embedding", "Embed_0/embedding", "decoder.unembed.kernel", "lm_head", "head/w"]
)
def test_embedding_like_tensors_take_the_mean(name):
    assert averaging_for(role_by_name(name, 2), Averaging.RADIAL) is Averaging.MEAN


@pytest.mark.parametrize("name", ["layer0/mlp/expand", "multi_head_attention/kernel", "heads", "head_norm", "ahead"])
def test_other_tensors_take_the_chosen_average(name):
    assert averaging_for(role_by_name(name, 2), Averaging.RADIAL) is Averaging.RADIAL
    assert averaging_for(role_by_name(name, 2), Averaging.MEAN) is Averaging.MEAN
