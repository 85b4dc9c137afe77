"""When fragments are due: staggered, complete, and robust to a clock that jumps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.vocabulary import due_fragments, next_due, offsets

SHAPES = st.tuples(st.integers(1, 30), st.integers(1, 60))


def test_with_as_many_fragments_as_steps_one_is_due_at_every_step() -> None:
    assert [due_fragments(t - 1, t, 4, 4) for t in range(1, 9)] == [(1,), (2,), (3,), (0,), (1,), (2,), (3,), (0,)]


def test_one_fragment_is_the_whole_model_every_interval() -> None:
    assert [t for t in range(1, 25) if due_fragments(t - 1, t, 1, 6)] == [6, 12, 18, 24]


@given(SHAPES)
def test_no_more_fragments_are_due_together_than_must_be(shape: tuple[int, int]) -> None:
    count, interval = shape
    most = max(list(offsets(count, interval)).count(place) for place in range(interval))
    assert most == -(-count // interval)


@given(SHAPES, st.integers(0, 500), st.integers(1, 200))
def test_a_jump_names_what_the_steps_in_it_would_have_named(shape: tuple[int, int], before: int, jump: int) -> None:
    stepwise = [p for t in range(before, before + jump) for p in due_fragments(t, t + 1, *shape)]
    at_once = due_fragments(before, before + jump, *shape)
    assert list(at_once) == list(dict.fromkeys(stepwise))


@given(SHAPES, st.integers(0, 500), st.data())
def test_the_next_due_point_is_the_first_at_which_the_fragment_is_due(
    shape: tuple[int, int], after: int, data: st.DataObject
) -> None:
    fragment = data.draw(st.integers(0, shape[0] - 1))
    point = next_due(fragment, after, *shape)
    assert fragment in due_fragments(point - 1, point, *shape)
    assert fragment not in due_fragments(after, point - 1, *shape)
