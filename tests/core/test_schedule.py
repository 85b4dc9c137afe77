"""When fragments are due: staggered, complete, and robust to a clock that jumps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.vocabulary import Schedule, is_router

ONE_PERIOD = st.builds(Schedule, st.integers(1, 30), st.integers(1, 60), st.none())
TWO_PERIODS = st.builds(
    lambda count, of_routers, more: Schedule(count, of_routers + more, of_routers),
    st.integers(2, 30),
    st.integers(1, 40),
    st.integers(1, 40),
)
SCHEDULES = ONE_PERIOD | TWO_PERIODS


def test_with_as_many_fragments_as_steps_one_is_due_at_every_step() -> None:
    schedule = Schedule(4, 4)
    assert [schedule.due(t - 1, t) for t in range(1, 9)] == [(1,), (2,), (3,), (0,), (1,), (2,), (3,), (0,)]


def test_one_fragment_is_the_whole_model_every_interval() -> None:
    assert [t for t in range(1, 25) if Schedule(1, 6).due(t - 1, t)] == [6, 12, 18, 24]


def test_routers_are_due_more_often_and_not_with_the_other_fragments() -> None:
    schedule = Schedule(4, 12, 4)
    due = {t: schedule.due(t - 1, t) for t in range(1, 25)}
    assert {t: fragments for t, fragments in due.items() if fragments} == {
        **{4: (1,), 8: (2,), 12: (0,), 16: (1,), 20: (2,), 24: (0,)},
        **dict.fromkeys((1, 5, 9, 13, 17, 21), (3,)),
    }


@given(TWO_PERIODS, st.integers(0, 500))
def test_the_other_fragments_are_due_as_if_there_were_no_routers(schedule: Schedule, start: int) -> None:
    others = Schedule(schedule.fragment_count - 1, schedule.interval_steps)
    routers = schedule.fragment_count - 1
    for t in range(start + 1, start + 41):
        assert tuple(p for p in schedule.due(t - 1, t) if p != routers) == others.due(t - 1, t)


@given(SCHEDULES, st.integers(0, 500), st.data())
def test_a_fragment_is_due_once_in_each_of_its_periods_wherever_it_begins(
    schedule: Schedule, start: int, data: st.DataObject
) -> None:
    count, interval, of_routers = schedule
    fragment = data.draw(st.sampled_from((0, count // 2, count - 1)))
    period = of_routers if of_routers and fragment == count - 1 else interval
    assert schedule.period(fragment) == period
    first, second = (t for t in range(start + 1, start + 2 * period + 1) if fragment in schedule.due(t - 1, t))
    assert second - first == period


@given(ONE_PERIOD)
def test_no_more_fragments_are_due_together_than_must_be(schedule: Schedule) -> None:
    most = max(len(schedule.due(t - 1, t)) for t in range(1, schedule.interval_steps + 1))
    assert most == -(-schedule.fragment_count // schedule.interval_steps)


@given(SCHEDULES, st.integers(0, 500), st.integers(1, 200))
def test_a_jump_names_what_the_steps_in_it_would_have_named(schedule: Schedule, before: int, jump: int) -> None:
    stepwise = [p for t in range(before, before + jump) for p in schedule.due(t, t + 1)]
    assert list(schedule.due(before, before + jump)) == list(dict.fromkeys(stepwise))


@given(SCHEDULES, st.integers(0, 500), st.data())
def test_the_next_due_point_is_the_first_at_which_the_fragment_is_due(
    schedule: Schedule, after: int, data: st.DataObject
) -> None:
    fragment = data.draw(st.integers(0, schedule.fragment_count - 1))
    point = schedule.next_due(fragment, after)
    assert fragment in schedule.due(point - 1, point)
    assert fragment not in schedule.due(after, point - 1)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        ("layers.feedforward.router", True),
        ("layers.feedforward.router.lora_a", True),
        ("block/router/kernel", True),
        ("model.layers.0.block_sparse_moe.gate.weight", True),
        ("layers.0.mlp.gate.weight", False),  # half of a gated hidden layer has such a name, too
        ("layers.experts.gate", False),
        ("route", False),
    ],
)
def test_routers_are_known_by_a_part_of_their_path(tensor: str, expected: bool) -> None:
    assert is_router(tensor) is expected
