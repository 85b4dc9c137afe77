"""Where the learning-rate schedule is: by what all islands trained, not by the furthest one's clock."""

from __future__ import annotations

from learners.reckoning import Reckoning, tokens_per_step


def test_between_two_fixes_it_goes_by_ones_own_steps_and_a_fix_counts_from_when_it_was_true() -> None:
    reckoning = Reckoning(400)
    reckoning.begin(7)
    for _ in range(3):
        reckoning.count()
    assert reckoning.step == 10  # nothing was heard yet: the clock that it began with
    reckoning.hear(tokens_trained=3600, steps_since=2)
    assert reckoning.step == 9 + 2
    reckoning.count()
    assert reckoning.step == 12


def test_a_fix_that_is_no_news_changes_nothing_and_one_may_lead_back() -> None:
    reckoning = Reckoning(400)
    reckoning.hear(8000, 0)
    for _ in range(30):  # as if the others were as quick, but some are away
        reckoning.count()
    reckoning.hear(8000, 0)
    reckoning.hear(4000, 0)
    reckoning.hear(0, 5)  # an older tape's
    assert reckoning.step == 50
    reckoning.hear(12000, 1)
    assert reckoning.step == 31


def test_a_step_is_one_of_every_island_that_the_job_begins_with(make_job) -> None:
    spec = make_job()
    count = sum(section["count"] for section in spec["islands"])
    assert tokens_per_step(spec) == count * spec["training"]["batch_size"] * spec["data"]["sequence_length"]
