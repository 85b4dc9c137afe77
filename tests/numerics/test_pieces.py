"""Pieces: named so that they can be put together again, by anybody, from their names alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import DataError
from orchestrator.parameters.pieces import Piece, cut, joined, piece_named, taken


@given(st.text(max_size=8), st.none() | st.tuples(st.integers(0, 3), st.integers(0, 99), st.integers(0, 99)))
def test_a_piece_is_known_by_its_name(tensor, bounds):
    piece = Piece(tensor, bounds)
    if bounds is not None or piece_named(tensor).bounds is None:
        assert piece_named(piece.name) == piece


def test_names_are_numpys_notation():
    array = np.arange(60).reshape(3, 4, 5)
    pieces = cut("t", array.shape, axis=1, count=2)
    assert [piece.name for piece in pieces] == ["t[:,0:2]", "t[:,2:4]"]
    assert np.array_equal(taken({"t": array}, ["t[:,2:4]"])["t[:,2:4]"], array[:, 2:4])
    assert pieces[1].shape(array.shape) == (3, 2, 5)
    assert cut("t", (5,), 0, 2) == (Piece("t", (0, 0, 2)), Piece("t", (0, 2, 5)))


def test_pieces_are_views():
    tensors = {"t": np.zeros((4, 2)), "scalar": np.zeros(())}
    for name, part in taken(tensors, ["t", "t[1:3]", "scalar"]).items():
        assert part.base is tensors[piece_named(name).tensor]


@pytest.mark.parametrize(
    "names", [["t[2:4]"], ["t[0:2]", "t[3:4]"], ["t[0:2]", "t[1:4]"], ["t", "t[0:4]"], ["t[0:2]", "t[:,2:4]"]]
)
def test_parts_that_are_not_all_of_a_tensor_are_refused(names):
    with pytest.raises(DataError, match="do not cover t"):
        joined({name: np.zeros((2, 2)) for name in names})


@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9), st.randoms(use_true_random=False))
def test_what_was_cut_is_joined_in_any_order(axes, length, count, chance):
    shape = (length,) * axes
    array = np.random.default_rng(0).standard_normal(shape)
    axis = chance.randrange(axes)
    pieces = list(taken({"t": array}, [piece.name for piece in cut("t", shape, axis, min(count, length))]).items())
    chance.shuffle(pieces)
    assert np.array_equal(joined(dict(pieces))["t"], array)
