"""The synchroniser's process died and another goes on: what was held is lost and taken again, nothing waits in vain."""

from __future__ import annotations

from typing import Any

from orchestrator.core import commands, events
from orchestrator.core.effects import (
    AdmitContribution,
    BeginCatchUp,
    DrainIsland,
    Evaluate,
    FinishJob,
    FlushIsland,
    KillIsland,
    MergeFragment,
    PlaceIsland,
    PublishFragment,
    RefuseContribution,
    ReleasePayload,
    SetTimer,
    StartTraining,
)
from orchestrator.core.messages import Flushed
from orchestrator.core.vocabulary import JobTimer, ReleaseReason
from tests.harness.story import Story, all_of, inputs, the


def restart(story: Story, epoch: int = 2) -> tuple[Any, ...]:
    return story.happen(events.SynchroniserRestarted, epoch)


def test_a_contribution_whose_bytes_died_is_released_as_lost_and_the_same_offer_is_taken_again() -> None:
    story = Story("ab", quorum=2)
    story.starts("a", "b")
    offered = story.contribution("a")
    story.happen(events.ContributionArrived, offered)
    lost = the(ReleasePayload, restart(story))
    assert (lost.payload, lost.reason) == (offered.payload, ReleaseReason.LOST)
    assert the(AdmitContribution, story.happen(events.ContributionArrived, offered)).contribution == offered


def test_a_merge_that_died_is_decided_again_from_the_same_offers_under_the_new_epoch() -> None:
    story = Story("ab", quorum=2)
    story.starts("a", "b")
    a, b = story.contribution("a"), story.contribution("b")
    story.happen(events.ContributionArrived, a)
    first = the(MergeFragment, story.happen(events.ContributionArrived, b))
    assert len(all_of(ReleasePayload, restart(story))) == 2
    assert story.happen(events.MergeCompleted, 0, 1, "digest", 0.1) == ()  # nothing of it is known any more
    story.happen(events.ContributionArrived, a)
    again = the(MergeFragment, story.happen(events.ContributionArrived, b))
    assert (first.epoch, again.epoch) == (1, 2)
    assert (again.version, again.step, inputs(again)) == (first.version, first.step, inputs(first))


def test_an_offer_that_was_merged_before_the_death_is_not_taken_again() -> None:
    story = Story("a")
    story.starts("a")
    offered = story.contribution("a")
    story.happen(events.ContributionArrived, offered)
    story.merges(0, 1)
    restart(story)
    assert the(RefuseContribution, story.happen(events.ContributionArrived, offered)).reason == "duplicate"


def test_everyone_that_trains_is_told_to_and_gets_every_version_again() -> None:
    story = Story("ab")
    story.starts("a", "b")
    story.offers_fragment("a")
    story.offers_fragment("b")
    story.merges(0, 1)
    effects = restart(story)
    assert [e.island for e in all_of(StartTraining, effects)] == ["a", "b"]
    published = all_of(PublishFragment, effects)
    assert [(p.fragment, p.version, p.recipients[0].island) for p in published] == [(0, 1, "a"), (0, 1, "b")]
    assert [p.recipients[0].merged_offer for p in published] == [1, 1]


def test_what_was_asked_of_islands_that_are_coming_is_asked_again() -> None:
    story = Story("abc")
    story.is_ready("b")
    story.command("k", commands.Kill("c", True))
    effects = restart(story)
    assert [(p.island, p.incarnation) for p in all_of(PlaceIsland, effects)] == [("a", 1), ("c", 1)]
    assert the(BeginCatchUp, effects).island == "b"
    assert the(KillIsland, effects).island == "c"


def test_a_drain_goes_on_and_an_evaluation_is_made_anew() -> None:
    story = Story("ab", evaluation_every_merges=1)
    story.starts("a", "b")
    story.offers_fragment("a")
    story.offers_fragment("b")
    assert the(Evaluate, story.merges(0, 1)).global_version == 1
    story.command("d", commands.Drain("b"))
    effects = restart(story)
    assert the(DrainIsland, effects).island == "b"
    assert the(Evaluate, effects).global_version == 1


def test_last_contributions_that_died_are_waited_for_again_before_a_job_ends() -> None:
    story = Story("a", token_budget=200)
    story.starts("a")
    assert all_of(FlushIsland, story.trains("a", 100))
    offered = story.contribution("a")
    story.happen(events.ContributionArrived, offered)
    story.reports("a", 1, Flushed())  # all its work is being merged, and it waits for the end
    effects = restart(story)
    assert the(FlushIsland, effects).island == "a"
    assert the(SetTimer, effects).timer is JobTimer.FLUSH
    assert not all_of(FinishJob, effects)
    assert the(MergeFragment, story.happen(events.ContributionArrived, offered)).version == 1


def test_an_epoch_that_is_not_newer_changes_nothing() -> None:
    story = Story("a")
    story.starts("a")
    story.offers_fragment("a")
    assert restart(story, epoch=1) == ()
