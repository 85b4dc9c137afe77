"""Where the learning-rate schedule is: by what all islands trained, not by the furthest one's clock alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.vocabulary import NO_ANCHOR, BatchRamp, ScheduleAnchor
from orchestrator.replica.replica import schedule_step


def test_before_any_anchor_it_is_the_clock_and_then_the_clock_since_the_anchor() -> None:
    assert schedule_step(NO_ANCHOR, 7, 400) == 7
    assert schedule_step(ScheduleAnchor(3600, 12), 12, 400) == 9
    assert schedule_step(ScheduleAnchor(3600, 12), 15, 400) == 9 + 3


@given(st.integers(2, 9), st.integers(1, 200), st.integers(0, 10_000), st.integers(0, 300))
def test_a_growing_batch_advances_the_schedule_by_what_is_trained_step_by_step(
    parts: int, steps: int, tokens: int, ahead: int
) -> None:
    """The closed form over whole stages gives what counting one step after the other does."""
    ramp = BatchRamp(parts, steps)
    position = tokens * parts // 400
    for _ in range(ahead):
        position += ramp.part(position // parts)
    assert schedule_step(ScheduleAnchor(tokens, 5), 5 + ahead, 400, ramp) == position // parts


@given(st.integers(2, 64), st.integers(1, 10_000))
def test_a_batch_grows_by_equal_parts_after_equal_tokens_and_never_shrinks(parts: int, steps: int) -> None:
    ramp = BatchRamp(parts, steps)
    sizes = [ramp.part(step) for step in range(steps + 2)]
    assert sizes == sorted(sizes)
    assert (ramp.part(0), sizes[-2], ramp.part(10 * steps)) == (1, parts, parts)
    lengths = [sizes[:steps].count(part) for part in range(1, parts)]
    assert max(lengths) - min(lengths) <= 1


def test_whoever_lags_behind_the_furthest_is_where_the_job_is() -> None:
    assert schedule_step(ScheduleAnchor(3600, 12), 4, 400) == 9
