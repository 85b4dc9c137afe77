"""An island is drained: it steps no more, all its work is merged, then its process ends. And all that may come between."""

from __future__ import annotations

import pytest

from orchestrator.core import commands, events
from orchestrator.core.effects import (
    AdmitContribution,
    DrainIsland,
    FinishJob,
    FlushIsland,
    MergeFragment,
    PublishFragment,
    ResolveCommand,
    SetTimer,
    StartTraining,
    StopIsland,
)
from orchestrator.core.messages import Drained, Flushed
from orchestrator.core.vocabulary import IslandState
from tests.harness.story import Story, all_of, inputs, placements, the


@pytest.fixture
def story() -> Story:
    """Three islands train; one contribution is a quorum."""
    told = Story("abc")
    told.starts("a", "b", "c")
    return told


def drain(story: Story, island: str, command: str = "d1"):
    return story.command(command, commands.Drain(island))


def is_drained(story: Story, island: str):
    return story.reports(island, story.incarnation(island), Drained())


def readd(story: Story, island: str):
    return story.command("r1", commands.Readd(island))


def test_a_drained_island_gives_its_work_and_then_its_process_is_stopped(story: Story) -> None:
    effects = drain(story, "a")
    assert the(ResolveCommand, effects).accepted
    assert the(DrainIsland, effects) == DrainIsland("a", 1)
    assert story.island("a").state == IslandState.DRAINING
    assert the(AdmitContribution, story.offers_fragment("a", step=1)).contribution.island == "a"
    effects = story.offers_fragment("b")
    merge = the(MergeFragment, story.offers_fragment("c"))  # nobody waits for a, and its work is in
    assert set(inputs(merge)) == {"a", "b", "c"}
    heard = {to.island for to in the(PublishFragment, story.merges(0, 1)).recipients}
    assert "a" in heard
    assert the(StopIsland, is_drained(story, "a")).island == "a"
    view = story.island("a")
    assert (view.state, view.pid) == (IslandState.DRAINED, None)


def test_draining_lets_a_round_close_that_had_waited_for_the_island(story: Story) -> None:
    story.offers_fragment("b")
    story.offers_fragment("c")
    assert set(inputs(the(MergeFragment, drain(story, "a")))) == {"b", "c"}


def test_a_drained_island_stays_away_until_it_is_re_added_and_its_data_goes_on(story: Story) -> None:
    story.trains("a", 400)
    drain(story, "a")
    is_drained(story, "a")
    assert placements(readd(story, "a")) == [("a", 2)]
    request = story.is_ready("a")
    assert request is not None
    assert request.cursor == 5


@pytest.mark.parametrize("state", [IslandState.DRAINING, IslandState.DRAINED])
def test_an_island_is_not_drained_twice(story: Story, state: IslandState) -> None:
    drain(story, "a")
    if state is IslandState.DRAINED:
        is_drained(story, "a")
    answer = the(ResolveCommand, drain(story, "a", "d2"))
    assert not answer.accepted
    assert f"it is {state}" in answer.detail


def test_a_drain_repeated_under_its_id_changes_nothing(story: Story) -> None:
    drain(story, "a")
    assert drain(story, "a") == ()


def test_an_island_that_does_not_train_has_nothing_to_drain(story: Story) -> None:
    story.dies("a")
    answer = the(ResolveCommand, drain(story, "a"))
    assert not answer.accepted
    assert "not training" in answer.detail


def test_an_island_that_is_being_killed_is_not_drained(story: Story) -> None:
    story.command("k1", commands.Kill("a", True))
    answer = the(ResolveCommand, drain(story, "a"))
    assert not answer.accepted
    assert "killed by operator" in answer.detail


def test_a_drain_that_leaves_no_quorum_is_refused_because_its_work_might_never_merge() -> None:
    story = Story("abc", quorum=2)
    story.starts("a", "b")
    answer = the(ResolveCommand, drain(story, "a"))
    assert not answer.accepted
    assert "only 1 of the 2 islands" in answer.detail
    story.starts("c")
    assert the(ResolveCommand, drain(story, "a", "d2")).accepted


def test_re_adding_a_draining_island_calls_the_drain_off(story: Story) -> None:
    drain(story, "a")
    effects = readd(story, "a")
    assert the(StartTraining, effects).island == "a"
    assert story.island("a").state == IslandState.TRAINING


def test_an_island_that_was_drained_before_it_heard_of_its_re_adding_is_placed_again(story: Story) -> None:
    drain(story, "a")
    readd(story, "a")
    effects = is_drained(story, "a")
    assert the(StopIsland, effects).incarnation == 1
    assert placements(effects) == [("a", 2)]


@pytest.mark.parametrize(("restart", "state"), [(False, IslandState.STOPPED), (True, IslandState.LOST)])
def test_a_kill_while_draining_does_what_it_says(story: Story, restart: bool, state: IslandState) -> None:
    drain(story, "a")
    story.command("k1", commands.Kill("a", restart))
    story.dies("a")
    assert story.island("a").state == state


def test_an_island_that_dies_while_it_drains_stays_away_and_says_why(story: Story) -> None:
    drain(story, "a")
    story.offers_fragment("a", step=1)
    story.dies("a")
    view = story.island("a")
    assert (view.state, view.reason) == (IslandState.STOPPED, "process died")
    story.offers_fragment("b")
    assert "a" in inputs(the(MergeFragment, story.offers_fragment("c")))  # what it gave is not lost


def test_an_island_that_falls_silent_while_it_drains_is_asked_again(story: Story) -> None:
    drain(story, "a")
    story.falls_silent("a")
    assert the(DrainIsland, story.happen(events.ConnectionRestored, "a", 1)).island == "a"
    assert story.island("a").state == IslandState.DRAINING


def test_a_silent_draining_island_that_is_re_added_trains_on_once_it_answers(story: Story) -> None:
    drain(story, "a")
    story.falls_silent("a")
    assert the(ResolveCommand, readd(story, "a")).accepted
    assert the(StartTraining, story.happen(events.ConnectionRestored, "a", 1)).island == "a"


def test_a_draining_island_gives_no_state_to_others(story: Story) -> None:
    story.offers_fragment("a")
    story.offers_fragment("b")
    story.offers_fragment("c")
    story.merges(0, 1)
    story.trains("a", 900)  # the furthest
    drain(story, "a")
    story.timer(the(SetTimer, story.dies("c")))
    request = story.is_ready("c")
    assert request is not None
    assert request.donor == ("b", 1)


def test_a_job_that_ends_waits_for_the_last_work_of_a_draining_island() -> None:
    story = Story("ab", token_budget=300)
    story.starts("a", "b")
    drain(story, "a")
    assert {e.island for e in all_of(FlushIsland, story.trains("b", 200))} == {"a", "b"}
    story.offers_fragment("b", step=3)
    story.reports("b", 1, Flushed())
    merge = the(MergeFragment, story.offers_fragment("a", step=1))
    assert set(inputs(merge)) == {"a", "b"}


def test_a_job_that_ends_does_not_wait_for_a_draining_island_for_ever() -> None:
    story = Story("ab", token_budget=300)
    story.starts("a", "b")
    drain(story, "a")
    deadline = the(SetTimer, story.trains("b", 200))
    story.offers_fragment("b", step=3)
    story.reports("b", 1, Flushed())
    merge = the(MergeFragment, story.timer(deadline))
    assert set(inputs(merge)) == {"b"}


def test_a_cancelled_job_stops_a_draining_island(story: Story) -> None:
    drain(story, "a")
    effects = story.command("c1", commands.Cancel())
    assert "a" in {stop.island for stop in all_of(StopIsland, effects)}
    assert the(FinishJob, effects)
    assert story.island("a").state == IslandState.STOPPED
