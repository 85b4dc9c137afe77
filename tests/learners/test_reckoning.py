"""Where the learning-rate schedule is: by what all islands trained, not by the furthest one's clock alone."""

from __future__ import annotations

from learners.reckoning import schedule_step, tokens_per_schedule_step
from orchestrator.config import parse_job
from orchestrator.core.vocabulary import NO_FIX, Fix


def test_before_any_fix_it_is_the_clock_and_then_the_clock_since_the_fix() -> None:
    assert schedule_step(NO_FIX, 7, 400) == 7
    assert schedule_step(Fix(3600, 12), 12, 400) == 9
    assert schedule_step(Fix(3600, 12), 15, 400) == 9 + 3


def test_whoever_lags_behind_the_furthest_is_where_the_job_is() -> None:
    assert schedule_step(Fix(3600, 12), 4, 400) == 9


def test_a_step_is_one_of_every_island_that_the_job_begins_with(make_job) -> None:
    spec = make_job()
    assert tokens_per_schedule_step(spec) == parse_job(spec).tokens_per_schedule_step == 2 * 4 * 32
