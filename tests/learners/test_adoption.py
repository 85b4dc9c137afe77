"""The arithmetic of adoption, in float32."""

from __future__ import annotations

import numpy as np
import pytest

from learners.island_arrays import mixed, update


def value(number: float) -> dict[str, np.ndarray]:
    return {"a": np.full(3, number, np.float32)}


def test_the_arithmetic_of_the_rules() -> None:
    published, own, since = value(5.0), value(3.0), value(2.0)
    assert own["a"][0] + update(published, since)["a"][0] == pytest.approx(6.0)
    assert mixed(published, own, 0.25)["a"][0] == pytest.approx(0.25 * 3.0 + 0.75 * 5.0)
    assert mixed(published, own, 0.25)["a"].dtype == update(published, since)["a"].dtype == np.float32
