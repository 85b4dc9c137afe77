"""After an event the core settles: it decides whatever follows from the decisions before, a bounded number of times."""

from __future__ import annotations

import pytest

from orchestrator.core import job_life
from orchestrator.core.commands import Finish
from orchestrator.core.effects import Effect, Evaluate, FinishJob, FlushIsland, ResolveCommand, StandBy
from orchestrator.core.events import EvaluationCompleted, Event, SynchroniserRestarted
from orchestrator.core.messages import Flushed
from orchestrator.core.state import JobState
from orchestrator.core.synchroniser import SETTLING_PASSES_MAX
from orchestrator.core.vocabulary import Incarnation, IslandId, JobOutcome
from orchestrator.errors import InternalError
from tests.harness.story import Story, all_of, the


def test_a_core_that_never_settles_fails_with_the_recent_story(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story("ab", quorum=2)
    story.starts("a", "b")
    passes = 0

    def endless(state: JobState, event: Event) -> list[Effect]:
        nonlocal passes
        passes += 1
        return [StandBy(IslandId("a"), Incarnation(1))]

    monkeypatch.setattr(job_life, "settle", endless)
    with pytest.raises(InternalError, match=r"does not settle: 8 passes .* StandBy") as raised:
        story.trains("a", tokens=100)
    assert passes == SETTLING_PASSES_MAX
    (note,) = raised.value.__notes__
    assert "while deciding on step" in note
    assert "CaughtUp" in note.split("before it:")[1], "the steps before are told as well"


def test_a_job_that_is_finished_early_merges_the_last_work_and_completes() -> None:
    story = Story("ab", quorum=2, accounted=True)
    story.starts("a", "b")
    effects = story.command("c1", Finish(), caller="ada")
    assert the(ResolveCommand, effects).accepted
    assert {flush.island for flush in all_of(FlushIsland, effects)} == {"a", "b"}
    again = the(ResolveCommand, story.command("c2", Finish()))
    assert not again.accepted
    assert "is finishing already" in again.detail

    for name in "ab":
        story.offers_fragment(name, 0, steps=1, tokens=100)
        story.reports(name, 1, Flushed())
    effects = story.merges(0, 1)
    assert the(Evaluate, effects).global_version == 1
    ended = the(FinishJob, story.happen(EvaluationCompleted, 1, 2.0, 8, 0.1))
    assert (ended.outcome, ended.reason) == (
        JobOutcome.COMPLETED,
        "finished early by ada, after 200 of 1,000,000 tokens",
    )


def test_a_synchroniser_that_dies_while_a_job_is_finished_early_asks_for_the_last_work_again() -> None:
    story = Story("ab", quorum=2)
    story.starts("a", "b")
    story.command("c1", Finish(), caller="ada")
    effects = story.happen(SynchroniserRestarted, 2)
    assert {flush.island for flush in all_of(FlushIsland, effects)} == {"a", "b"}
    assert story.core.state.end_reason.startswith("finished early by ada")


def test_a_job_finished_early_without_any_merge_fails_and_says_why() -> None:
    story = Story("ab", quorum=2)
    story.starts("a")
    story.command("c1", Finish(), caller="ada")
    story.reports("a", 1, Flushed())
    ended = the(FinishJob, story.happen(EvaluationCompleted, 0, 2.0, 8, 0.1))
    assert ended.outcome is JobOutcome.FAILED
    assert ended.reason.startswith("finished early by ada, after 100 of 1,000,000 tokens, but nothing was ever merged")


def test_a_job_that_has_not_trained_is_not_finished() -> None:
    refused = the(ResolveCommand, Story("ab").command("c1", Finish()))
    assert not refused.accepted
    assert "cancel it instead" in refused.detail
