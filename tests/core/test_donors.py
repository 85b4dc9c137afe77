"""Whom an island takes its state from, and what happens when that one goes away."""

from __future__ import annotations

from orchestrator.core.effects import BeginCatchUp, SetTimer
from orchestrator.core.events import CatchUpFailed
from tests.core.story import Story, all_of, the


def two_come_back(story: Story) -> list[BeginCatchUp | None]:
    """Islands c and d die after a merge, and are ready again."""
    story.timer(the(SetTimer, story.offers_fragment("a")))
    story.merges(0, 1)
    back = []
    for name in "cd":
        story.timer(the(SetTimer, story.dies(name)))
        back.append(story.is_ready(name))
    return back


def test_islands_that_come_back_together_take_their_states_from_different_donors() -> None:
    story = Story("abcd")
    story.starts(*"abcd")
    assert [asked and asked.donor for asked in two_come_back(story)] == [("a", 1), ("b", 1)]


def test_a_donor_that_falls_silent_is_left_at_once_and_its_late_failure_changes_nothing() -> None:
    story = Story("abcd")
    story.starts(*"abcd")
    two_come_back(story)
    asked = the(BeginCatchUp, story.falls_silent("a"))
    assert (asked.island, asked.donor) == ("c", ("b", 1))  # it gives two now, for nobody else could
    assert story.happen(CatchUpFailed, "c", 2, "a", "no answer within 35 s") == ()
    assert story.island("c").reason.startswith("taking a state from b")
    effects = story.dies("b")
    assert {(x.island, x.donor) for x in all_of(BeginCatchUp, effects)} == {("c", None), ("d", None)}


def test_a_donor_that_dies_and_says_so_twice_is_replaced_once() -> None:
    story = Story("abcd")
    story.starts(*"abcd")
    two_come_back(story)
    first = the(BeginCatchUp, story.happen(CatchUpFailed, "c", 2, "a", "ActorDiedError"))
    assert first.donor == ("b", 1)
    assert not all_of(BeginCatchUp, story.dies("a"))
