"""Whom an island takes its state from, and what happens when that one goes away."""

from __future__ import annotations

from orchestrator.core.effects import BeginCatchUp, SetTimer, StartTraining
from orchestrator.core.messages import CatchUpFailure, CaughtUp
from tests.harness.story import Story, all_of, the


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
    assert story.reports("c", 2, CatchUpFailure("a", "no answer within 35 s")) == ()
    assert story.island("c").reason.startswith("taking a state from b")
    effects = story.dies("b")
    assert {(x.island, x.donor) for x in all_of(BeginCatchUp, effects)} == {("c", None), ("d", None)}


def test_a_donor_that_dies_and_says_so_twice_is_replaced_once() -> None:
    story = Story("abcd")
    story.starts(*"abcd")
    two_come_back(story)
    first = the(BeginCatchUp, story.reports("c", 2, CatchUpFailure("a", "ActorDiedError")))
    assert first.donor == ("b", 1)
    assert not all_of(BeginCatchUp, story.dies("a"))


def with_several_donors(islands: str = "abcd") -> Story:
    """The last island is back, and takes its state from the two furthest of the others, a and b."""
    story, back = Story(islands, donors_max=2), islands[-1]
    story.starts(*islands)
    story.timer(the(SetTimer, story.offers_fragment("a")))
    story.merges(0, 1)
    story.timer(the(SetTimer, story.dies(back)))
    asked = story.is_ready(back)
    assert asked is not None
    assert (asked.donor, asked.helpers) == (("a", 1), (("b", 1),))
    assert story.island(back).reason.startswith("taking a state from a (step ")
    assert " and b (step " in story.island(back).reason
    return story


def test_several_donors_are_asked_at_once_and_one_that_fails_is_replaced_while_the_other_goes_on() -> None:
    story = with_several_donors()
    asked = the(BeginCatchUp, story.reports("d", 2, CatchUpFailure("b", "no answer")))
    assert (asked.donor, asked.helpers) == (("a", 1), (("c", 1),))
    assert story.reports("d", 2, CatchUpFailure("b", "no answer, told again")) == ()
    asked = the(BeginCatchUp, story.falls_silent("a"))
    assert (asked.donor, asked.helpers) == (("c", 1), ())
    assert the(BeginCatchUp, story.reports("d", 2, CatchUpFailure("c", "no answer"))).donor is None


def test_a_donor_that_gives_goes_on_though_others_have_overtaken_it() -> None:
    story = with_several_donors("abcde")
    for name in "cd":
        story.trains(name, 50 * 1024, steps=50)
    again = the(BeginCatchUp, story.dies("b"))
    assert ("a", 1) in (again.donor, *again.helpers)


def test_an_island_that_came_by_its_state_from_several_trains() -> None:
    story = with_several_donors()
    effects = story.reports("d", 2, CaughtUp("a", (1, 0), 4, 0.1, ("a", "b")))
    assert the(StartTraining, effects).island == "d"
    assert story.island("d").reason == "state taken from a and b"
