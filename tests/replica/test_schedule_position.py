"""Where the learning-rate schedule is: by what all islands trained, not by the furthest one's clock alone."""

from __future__ import annotations

from orchestrator.core.vocabulary import NO_ANCHOR, ScheduleAnchor
from orchestrator.replica.replica import schedule_step


def test_before_any_anchor_it_is_the_clock_and_then_the_clock_since_the_anchor() -> None:
    assert schedule_step(NO_ANCHOR, 7, 400) == 7
    assert schedule_step(ScheduleAnchor(3600, 12), 12, 400) == 9
    assert schedule_step(ScheduleAnchor(3600, 12), 15, 400) == 9 + 3


def test_whoever_lags_behind_the_furthest_is_where_the_job_is() -> None:
    assert schedule_step(ScheduleAnchor(3600, 12), 4, 400) == 9
