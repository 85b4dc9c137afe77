"""An island that fails by the specification is not placed again and again; the job ends where no other could do better."""

from __future__ import annotations

import pytest

from orchestrator.core import events
from orchestrator.core.effects import FinishJob, PlaceIsland, SetTimer
from orchestrator.core.events import event_of
from orchestrator.core.messages import Broken
from orchestrator.core.vocabulary import FailureExtent, IslandState, JobOutcome
from tests.harness.story import Story, all_of, the

REASON = "data.files: it cannot be read here. It must exist on every node."


def breaks(story: Story, island: str, extent: FailureExtent, incarnation: int = 1):
    story.wait(1)
    return story.tell(event_of(Broken(REASON, extent), story.now, island, incarnation))


@pytest.mark.parametrize("extent", [FailureExtent.ISLAND, FailureExtent.JOB])
def test_before_anything_is_trained_a_wrong_specification_ends_the_job_with_its_reason(extent) -> None:
    story = Story("abc")
    finish = the(FinishJob, breaks(story, "b", extent))
    assert finish.outcome is JobOutcome.FAILED
    assert finish.reason == f"b: its own code failed: {REASON}"


def test_once_others_train_an_island_that_cannot_is_given_up_at_once_and_they_train_on() -> None:
    story = Story("abc")
    story.starts("a", "b", "c")
    story.trains("a", 5)
    effects = breaks(story, "b", FailureExtent.ISLAND)
    assert not all_of(FinishJob, effects)
    assert not all_of(PlaceIsland, effects)
    assert story.core.state.islands["b"].state is IslandState.FAILED
    assert story.core.state.islands["b"].reason.endswith(REASON)


def test_text_that_cannot_be_read_ends_the_job_whoever_trains() -> None:
    story = Story("abc")
    story.starts("a", "b", "c")
    story.trains("a", 5)
    assert the(FinishJob, breaks(story, "b", FailureExtent.JOB)).outcome is JobOutcome.FAILED


def test_what_an_earlier_incarnation_says_ends_nothing() -> None:
    story = Story("abc")
    story.starts("a", "b", "c")
    story.timer(the(SetTimer, story.dies("b")))
    assert not all_of(FinishJob, breaks(story, "b", FailureExtent.JOB, incarnation=1))


def test_other_failures_are_restarted_as_ever() -> None:
    story = Story("abc")
    story.starts("a", "b", "c")
    breaks(story, "b", FailureExtent.INCARNATION)
    assert story.core.state.islands["b"].state is IslandState.LOST


def test_a_loss_of_connection_on_an_earlier_tape_is_of_an_incarnation() -> None:
    assert events.ConnectionLost(0.0, "a", 1, True, "gone").extent is FailureExtent.INCARNATION
