"""Whom an island takes its state from, and what happens when that one goes away."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.core import events
from orchestrator.core.effects import BeginCatchUp, Effect, ReleasePayload, SetTimer, StartTraining
from orchestrator.core.messages import Adopted, CatchUpFailure, CaughtUp, LeftState, Ready
from orchestrator.core.vocabulary import ReleaseReason
from orchestrator.tape.codec import decode_tagged, to_json
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


# ── a state that an earlier incarnation left on its machine ───────────────────────────────────────────────────────

LEFT = LeftState(1, (1, 0), 5, 5, 500, 5.0, (400, 500))
"""Of island b, which had reported 100 tokens of one step: it trained four steps more before its node ended."""


def merged_once() -> Story:
    """Fragment 0 has a version with the first 100 tokens of both islands, and both are based on it."""
    story = Story("ab", accounted=True)
    story.starts(*"ab")
    for name in "ab":
        story.offers_fragment(name, tokens=100)
    story.merges(0, 1)
    for name in "ab":
        story.reports(name, 1, Adopted(0, 1, 1, 100, 0))
    return story


def comes_back(story: Story, left: LeftState | None = LEFT) -> tuple[Effect, ...]:
    """Island b is lost, placed again, and finds this."""
    story.timer(the(SetTimer, story.dies("b")))
    story.happen(events.IslandPlaced, "b", story.incarnation("b"), "node", 1000)
    return story.reports("b", story.incarnation("b"), Ready(1, 0.5, left))


def test_an_island_continues_from_what_it_left_and_its_work_counts_once() -> None:
    story = merged_once()
    story.wait(4.0)
    begun = the(BeginCatchUp, comes_back(story))
    assert (begun.donor, begun.cursor) == (("b", 1), 5), "it draws on where the file's state stands"
    assert story.goodput.summary()["badput_seconds"]["lost with the island"] > 3.0
    caught_up = CaughtUp("b", (1, 0), 5, 0.1, left=LEFT)
    assert all_of(StartTraining, story.reports("b", 2, caught_up))
    story.reports("b", 2, caught_up)  # repeated
    assert story.island("b").reason == "state taken from the file of incarnation 1, with its unmerged work"
    assert story.core.state.tokens_trained == 100 + 500
    assert "lost with the island" not in story.goodput.summary()["badput_seconds"], "it stepped all that time"
    tokens = story.goodput.summary()["tokens"]
    assert tokens == {"trained": 600, "merged": 100, "discarded": 0, "in_flight": 500}
    own = replace(story.contribution("b", 1, tokens=500, steps=5), tokens_total=0)
    story.happen(events.ContributionArrived, own)
    story.offers_fragment("a", 1, tokens=100)
    story.merges(1, 1)
    assert story.goodput.summary()["tokens"]["merged"] == (200 + 600) / 2
    story.goodput.check()
    assert decode_tagged(json.loads(to_json(events.IslandReported(1.0, "b", 2, caught_up)))).report == caught_up


@pytest.mark.parametrize(
    "changed",
    [
        {"versions": (0, 0), "kept_tokens": (500, 0)},  # Θ has moved past all that it holds
        {"kept_tokens": (0, 0)},
        {"incarnation": 2},  # as if it were its own
        {"tokens_total": 50},  # less than the island had reported
        {"versions": (1, 0, 0), "kept_tokens": (0, 0, 500)},
        {"kept_tokens": (400,)},  # of fewer fragments than its versions
        {"versions": (1, 0, 0)},
    ],
)
def test_a_state_that_does_not_belong_or_holds_no_work_is_not_used(changed: dict[str, Any]) -> None:
    story = merged_once()
    assert the(BeginCatchUp, comes_back(story, replace(LEFT, **changed))).donor == ("a", 1)


def test_a_state_of_an_incarnation_before_the_last_that_trained_is_not_used() -> None:
    story = merged_once()
    comes_back(story)
    story.reports("b", 2, CaughtUp("a", (1, 0), 1, 0.1))
    story.trains("b", tokens=100)
    assert the(BeginCatchUp, comes_back(story)).donor == ("a", 1)


def test_what_a_round_holds_of_the_earlier_incarnation_is_withdrawn_before_the_island_goes_on_with_it() -> None:
    story = merged_once()
    story.offers_fragment("b", 1, tokens=100)
    released, begun = all_of(ReleasePayload, effects := comes_back(story)), the(BeginCatchUp, effects)
    assert [(one.payload, one.reason) for one in released] == [("b.1.1.1", ReleaseReason.SUPERSEDED)]
    assert begun.donor == ("b", 1)
    assert not story.core.state.rounds[1].offered
    story.reports("b", 2, CaughtUp("b", (1, 0), 5, 0.1, left=LEFT))
    assert story.goodput.summary()["tokens"] == {"trained": 600, "merged": 100, "discarded": 0, "in_flight": 500}


def test_a_state_whose_work_is_being_merged_is_not_used() -> None:
    story = merged_once()
    for name in "ab":
        story.offers_fragment(name, 1, tokens=100)
    assert the(BeginCatchUp, comes_back(story)).donor == ("a", 1)


def test_an_island_whose_file_cannot_be_read_takes_a_state_from_a_peer() -> None:
    story = merged_once()
    comes_back(story)
    assert the(BeginCatchUp, story.reports("b", 2, CatchUpFailure("b", "it is damaged"))).donor == ("a", 1)
    story.reports("b", 2, CaughtUp("a", (1, 0), 1, 0.1))
    assert story.goodput.summary()["tokens"]["trained"] == 200, "nobody knows of more"
