"""Limits by size: none is right for one model and wrong for the next."""

from __future__ import annotations

import pytest

from learners import state_transfer
from learners.state_transfer import Throttle

BILLION = 12 * 10**9


@pytest.mark.parametrize(("byte_count", "line_bytes_per_s"), [(10**7, 2e6), (BILLION, 2e6), (8 * BILLION, 125e6)])
def test_a_line_that_is_twice_as_fast_as_the_slowest_is_waited_for_whatever_the_size(
    byte_count: int, line_bytes_per_s: float
) -> None:
    assert state_transfer.limit_s(byte_count, None) > byte_count / line_bytes_per_s + state_transfer.BOUNDARY_S


@pytest.mark.parametrize("byte_count", [1000, BILLION])
def test_a_donor_never_makes_anybody_wait_for_longer_than_they_do(byte_count: int) -> None:
    rate = 50e6
    assert state_transfer.queue_s(byte_count, rate) < state_transfer.limit_s(byte_count, rate)
    assert byte_count / rate < state_transfer.queue_s(byte_count, rate)


def test_a_donor_without_a_limit_lets_nobody_wait() -> None:
    Throttle(None).wait(BILLION, state_transfer.queue_s(BILLION, None))
