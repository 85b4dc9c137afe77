"""An island that is cut off is given its own, longer time; one that was replaced meanwhile is ended when it shows up."""

from __future__ import annotations

import pytest

from orchestrator.core import events
from orchestrator.core.effects import SetTimer, StopIsland
from orchestrator.core.messages import Progress
from orchestrator.core.vocabulary import IslandState
from tests.harness.story import Story, all_of, placements, the


@pytest.mark.parametrize(("cut_off", "patience_s"), [(False, 30.0), (True, 900.0)])
def test_who_hangs_is_replaced_soon_and_who_is_cut_off_may_train_on_for_long(cut_off: bool, patience_s: float) -> None:
    story = Story("ab")
    story.starts("a", "b")
    story.wait(5.0)
    silent = story.happen(events.ConnectionLost, "b", 1, False, "no answer", cut_off)
    assert the(SetTimer, silent).due_at == 5.0 + patience_s
    lost = story.timer(the(SetTimer, silent))
    assert the(StopIsland, lost).reason.startswith(f"no answer for {patience_s:.0f} s")
    assert placements(story.timer(the(SetTimer, lost))) == [("b", 2)]


def test_who_comes_back_before_that_goes_on_as_it_was() -> None:
    story = Story("ab")
    story.starts("a", "b")
    silent = story.happen(events.ConnectionLost, "b", 1, False, "no answer", True)
    story.wait(600.0)
    story.happen(events.ConnectionRestored, "b", 1)
    assert story.island("b").state == IslandState.TRAINING
    assert story.timer(the(SetTimer, silent)) == ()


def test_who_was_replaced_meanwhile_is_ended_when_it_shows_up_and_its_successor_left_alone() -> None:
    story = Story("ab")
    story.starts("a", "b")
    lost = story.timer(the(SetTimer, story.falls_silent("b")))
    story.timer(the(SetTimer, lost))
    story.starts("b")
    for effects in (
        story.reports("b", 1, Progress(90, 90, 9000, 90.0, 1.0, 1.0, 5.0)),
        story.happen(events.ConnectionRestored, "b", 1),
    ):
        assert [(stop.island, stop.incarnation) for stop in all_of(StopIsland, effects)] == [("b", 1)]
    assert (story.island("b").state, story.incarnation("b")) == (IslandState.TRAINING, 2)
