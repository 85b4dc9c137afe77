"""Norms of an update, against NumPy in float64, and for what a merge really left."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.vocabulary import Version
from orchestrator.parameters.shard import CHUNK, norms_of_update
from orchestrator.parameters.validation import MAGNITUDE_MAX


@given(
    sizes=st.lists(st.sampled_from([0, 1, 7, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5]), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
)
def test_they_are_those_of_all_pieces_together(sizes: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    before, after, residue = (
        {f"w{n}": random.standard_normal(size, np.float32) for n, size in enumerate(sizes)} for _ in range(3)
    )
    norms = norms_of_update(Version(3), before, after, residue)
    moved = np.concatenate([after[name].astype(np.float64) - before[name] for name in before])
    owed = np.concatenate([array.astype(np.float64) for array in residue.values()])
    assert norms.version == 3
    assert norms.update_norm == pytest.approx(np.linalg.norm(moved), rel=1e-4)
    assert norms.residue_norm == pytest.approx(np.linalg.norm(owed), rel=1e-4)


def test_without_a_residue_nothing_is_owed_and_matrices_count_as_their_values() -> None:
    before, after = {"w": np.zeros((2, 2), np.float32)}, {"w": np.ones((2, 2), np.float32)}
    norms = norms_of_update(Version(1), before, after, {})
    assert (norms.update_norm, norms.residue_norm) == (2.0, 0.0)


def test_the_largest_values_that_may_be_published_do_not_overflow() -> None:
    largest = {"w": np.full(CHUNK, MAGNITUDE_MAX, np.float32)}
    opposite = {"w": -largest["w"]}
    assert np.isfinite(norms_of_update(Version(1), largest, opposite, largest).update_norm)
