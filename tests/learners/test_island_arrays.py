"""Arrays of an island: the arithmetic of adoption in float32, and flattening, which restores all types and shapes."""

from __future__ import annotations

import pickle

import ml_dtypes
import numpy as np
import pytest

from learners.island_arrays import mixed, update
from learners.plain_arrays import ALIGNMENT_BYTES, flattened, restored
from orchestrator.errors import DataError

ARRAYS = {
    "counter": np.array(7, np.int32),
    "flag": np.array(True),
    "half": np.arange(6).astype(ml_dtypes.bfloat16),
    "nobody": np.zeros((0, 4), np.uint32),
    "transposed": np.arange(15, dtype=np.float32).reshape(3, 5).T,
}


def test_arrays_of_any_type_come_back_by_way_of_another_process() -> None:
    table, content = flattened(ARRAYS)
    back = restored(pickle.loads(pickle.dumps(table)), memoryview(bytes(content)))
    assert back.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert (back[name].dtype, back[name].shape) == (array.dtype, array.shape), name
        assert back[name].tobytes() == array.tobytes(), name


def test_each_begins_where_its_type_may() -> None:
    table, content = flattened(ARRAYS)
    begins = [array.__array_interface__["data"][0] for array in restored(table, content).values() if array.size]
    assert {(begin - begins[0]) % ALIGNMENT_BYTES for begin in begins} == {0}


@pytest.mark.parametrize("missing", [1, ALIGNMENT_BYTES])
def test_a_table_of_other_bytes_is_refused(missing: int) -> None:
    table, content = flattened(ARRAYS)
    with pytest.raises(DataError, match="announced"):
        restored(table, content[:-missing])


def value(number: float) -> dict[str, np.ndarray]:
    return {"a": np.full(3, number, np.float32)}


def test_the_arithmetic_of_the_rules() -> None:
    published, own, since = value(5.0), value(3.0), value(2.0)
    assert own["a"][0] + update(published, since)["a"][0] == pytest.approx(6.0)
    assert mixed(published, own, 0.25)["a"][0] == pytest.approx(0.25 * 3.0 + 0.75 * 5.0)
    assert mixed(published, own, 0.25)["a"].dtype == update(published, since)["a"].dtype == np.float32
