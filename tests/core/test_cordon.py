"""A cordoned node group takes nothing new: who trains there goes on, who would be placed there waits, and says so."""

from __future__ import annotations

from orchestrator.core import commands, events
from orchestrator.core.effects import HoldIsland, ResolveCommand, SetTimer
from orchestrator.core.synchroniser import Synchroniser
from orchestrator.core.vocabulary import IslandState
from tests.harness.job import Job
from tests.harness.story import Story, all_of, placements, policy, the


def cordon(story: Story, group: str = "group-b"):
    return story.command(f"cordon {group}", commands.Cordon(group))


def uncordon(story: Story, group: str = "group-b"):
    return story.command(f"uncordon {group}", commands.Uncordon(group))


def running() -> Story:
    story = Story("ab")
    story.starts("a", "b")
    return story


def test_who_trains_on_a_cordoned_node_group_goes_on() -> None:
    story = running()
    effects = cordon(story)
    assert [type(effect) for effect in effects] == [ResolveCommand]
    assert the(ResolveCommand, effects).accepted
    assert story.island("b").state == IslandState.TRAINING
    assert story.core.state.cordoned == {"group-b"}


def test_an_island_lost_there_waits_with_the_reason_and_is_placed_once_it_is_uncordoned() -> None:
    story = running()
    cordon(story)
    effects = story.timer(the(SetTimer, story.dies("b")))
    assert placements(effects) == []
    assert the(HoldIsland, effects).island == "b"
    view = story.island("b")
    assert (view.state, view.reason) == (IslandState.CORDONED, "node group group-b is cordoned")
    assert placements(uncordon(story, "group-a")) == []
    assert placements(uncordon(story)) == [("b", 2)]


def test_one_uncordoned_before_its_back_off_is_over_is_placed_as_ever() -> None:
    story = running()
    cordon(story)
    timer = the(SetTimer, story.dies("b"))
    assert placements(uncordon(story)) == []
    assert placements(story.timer(timer)) == [("b", 2)]


def test_a_job_that_starts_while_a_node_group_is_cordoned_places_only_the_others() -> None:
    job = Job(Synchroniser(policy("ab")))
    job.command("c1", commands.Cordon("group-b"))
    effects = job.happen(events.JobStarted)
    assert placements(effects) == [("a", 1)]
    assert [held.island for held in all_of(HoldIsland, effects)] == ["b"]
    job.now = 1.0
    assert placements(job.command("c2", commands.Uncordon("group-b"))) == [("b", 1)]


def test_re_adding_an_island_there_says_that_it_waits() -> None:
    story = running()
    story.command("k1", commands.Kill("b", False))
    story.dies("b")
    cordon(story)
    effects = story.command("r1", commands.Readd("b"))
    assert the(ResolveCommand, effects).detail == "b waits: node group group-b is cordoned"
    assert placements(effects) == []
    assert placements(uncordon(story)) == [("b", 2)]


def test_who_waits_there_has_no_process_to_kill() -> None:
    story = running()
    cordon(story)
    story.timer(the(SetTimer, story.dies("b")))
    answer = the(ResolveCommand, story.command("k1", commands.Kill("b", True)))
    assert not answer.accepted
    assert "is cordoned" in answer.detail


def test_nobody_is_placed_when_the_job_ends_meanwhile() -> None:
    story = Story("ab", token_budget=300)
    story.starts("a", "b")
    cordon(story)
    story.timer(the(SetTimer, story.dies("b")))
    story.trains("a", 200)
    assert placements(uncordon(story)) == []


def test_what_is_there_already_is_accepted_again() -> None:
    story = running()
    cordon(story)
    assert the(ResolveCommand, story.command("again", commands.Cordon("group-b"))).accepted
    uncordon(story)
    assert the(ResolveCommand, story.command("again too", commands.Uncordon("group-b"))).accepted
