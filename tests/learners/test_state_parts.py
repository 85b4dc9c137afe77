"""The transfer of a state: its windows are the state, whatever meshes give and want them."""

from __future__ import annotations

import numpy as np
import pytest

from learners.state_transfer import blocks_of, put_together, windows
from orchestrator.errors import DataError
from orchestrator.parameters.parts import whole
from tests.numerics.test_parts import pieces

STATE = {
    "w": np.arange(24 * 12, dtype=np.float32).reshape(24, 12),
    "moment": np.arange(24 * 12, dtype=np.float16).reshape(24, 12),
    "count": np.array(7, np.int32),
}
CUTS = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 4)]
"""Axis, and processes."""


def parts_of(cut):
    """Each process's bounds."""
    axis, count = cut
    return [{"w": own, "moment": own, "count": ()} for own in pieces((24, 12), axis, count)]


def gives(bounds, first: bool):
    arrays = {name: STATE[name][tuple(slice(*side) for side in own)] for name, own in bounds.items() if own}
    return blocks_of(arrays | ({"count": STATE["count"]} if first else {}), bounds)


@pytest.mark.parametrize("giver", CUTS)
@pytest.mark.parametrize("taker", CUTS)
def test_every_process_gets_its_part_and_no_more(giver, taker):
    givers = [gives(bounds, number == 0) for number, bounds in enumerate(parts_of(giver))]
    for wanted in parts_of(taker):
        came = [block for blocks in givers for block in windows(blocks, wanted)]
        own = put_together(came, wanted)
        assert sum(array.nbytes for _, _, array in came) == sum(array.nbytes for array in own.values())
        for name, bounds in wanted.items():
            expected = STATE[name][tuple(slice(*side) for side in bounds)] if bounds else STATE[name]
            assert own[name].dtype == expected.dtype
            assert np.array_equal(own[name], expected)
    together = put_together([block for blocks in givers for block in windows(blocks, None)], None)
    assert all(np.array_equal(together[name], array) for name, array in STATE.items())


def test_a_window_of_which_something_is_missing_or_overlaps_is_refused():
    first, second = (gives(bounds, number == 0) for number, bounds in enumerate(parts_of((0, 2))))
    wanted = {name: whole(array.shape) for name, array in STATE.items()}
    for wrong in (first, [*first, *gives(parts_of((0, 3))[1], False), *second]):
        with pytest.raises(DataError, match="exactly once"):
            put_together(windows(wrong, wanted), wanted)
    with pytest.raises(DataError, match="exactly once"):
        put_together(second, wanted)  # nobody gave the count
    with pytest.raises(DataError, match="has the shape"):
        blocks_of({"w": STATE["w"]}, {"w": ((0, 3), (0, 12))})


def test_a_window_of_nothing_needs_no_giver():
    assert put_together([], {"w": ((0, 0), (0, 12))})["w"].shape == (0, 12)
