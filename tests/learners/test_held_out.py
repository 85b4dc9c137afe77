"""How much of the held-out data is measured in the time there is."""

from __future__ import annotations

from math import inf

import pytest

from learners.held_out import measure


class Clock:
    """Stands still but for the batches: each takes the next of ``seconds``, the last of them for ever."""

    def __init__(self, *seconds: float) -> None:
        self.now, self._seconds, self.measured = 0.0, list(seconds), 0

    def __call__(self) -> float:
        return self.now

    def loss_of(self, batch: float) -> float:
        self.now += self._seconds[min(self.measured, len(self._seconds) - 1)]
        self.measured += 1
        return batch


BATCHES = [float(n) for n in range(8)]


@pytest.mark.parametrize(("limit_s", "batches"), [(inf, 8), (8.0, 8), (7.9, 4), (4.0, 4), (2.5, 2), (1.0, 1), (0.0, 1)])
def test_the_first_half_or_quarter_is_measured_where_all_would_take_too_long(limit_s: float, batches: int) -> None:
    clock = Clock(1.0)
    measured = measure(BATCHES, 4, clock.loss_of, limit_s, clock)
    assert measured.sequence_count == 4 * batches
    assert measured.loss == pytest.approx(sum(BATCHES[:batches]) / batches)
    assert clock.measured == batches
    assert measured.seconds == batches


def test_what_becomes_slower_is_cut_short_and_counts_as_the_part_that_was_wanted() -> None:
    clock = Clock(1.0, 1.0, 1.0, 20.0)
    measured = measure(BATCHES, 4, clock.loss_of, 8.0, clock)
    assert clock.measured == 4
    assert (measured.sequence_count, measured.loss) == (4, 0.0)
