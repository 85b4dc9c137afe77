"""A job is scaled while it trains: slots are filled, the last islands of a node group are drained, and a quorum is left."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.core import commands, events
from orchestrator.core.effects import (
    DrainIsland,
    FinishJob,
    ResolveCommand,
    SetTimer,
    StartTraining,
    StopIsland,
    WantIsland,
)
from orchestrator.core.messages import Drained
from orchestrator.core.vocabulary import IslandState, NodeGroupId
from tests.harness.story import Story, all_of, placements, policy, the

HERE = NodeGroupId("here")


def together(islands: str, **changed: int):
    """All islands are on one node group."""
    plans = policy(islands, **changed)
    return replace(plans, islands=tuple(replace(plan, node_group=HERE) for plan in plans.islands))


class Scaled(Story):
    """Islands a to d on one node group, of which ``wanted`` are wanted at first."""

    def __init__(self, wanted: int = 2, **changed: int) -> None:
        first = events.CommandRequested(0.0, "at the start", "operator", commands.Scale(HERE, wanted))
        super().__init__(wanted=together("abcd", **changed), before=(first,))

    def scales(self, count: int, command: str, group: str = "here"):
        return self.command(command, commands.Scale(group, count))


def wanted(effects):
    return [(effect.island, effect.wanted) for effect in all_of(WantIsland, effects)]


def test_spares_are_not_placed_when_the_job_starts() -> None:
    story = Scaled(2)
    assert placements(story.begun) == [("a", 1), ("b", 1)]
    assert story.island("c").state == IslandState.STOPPED


def test_scaling_up_places_the_first_spares_and_down_drains_the_last_islands() -> None:
    story = Scaled(2)
    story.starts("a", "b")
    effects = story.scales(3, "up")
    assert (wanted(effects), placements(effects)) == ([("c", True)], [("c", 1)])
    story.starts("c")
    effects = story.scales(1, "down")
    assert wanted(effects) == [("b", False), ("c", False)]
    assert [drain.island for drain in all_of(DrainIsland, effects)] == ["b", "c"]
    story.reports("b", 1, Drained())
    assert story.island("b").state == IslandState.DRAINED
    assert placements(story.scales(2, "up again")) == [("b", 2)]


def test_an_island_that_is_still_draining_trains_on_when_it_is_wanted_again() -> None:
    story = Scaled(2)
    story.starts("a", "b")
    story.scales(1, "down")
    assert the(StartTraining, story.scales(2, "up")).island == "b"


def test_what_has_no_work_yet_is_stopped_at_once() -> None:
    story = Scaled(3)
    story.starts("a", "b")
    effects = story.scales(2, "down")
    assert the(StopIsland, effects).island == "c"
    assert story.island("c").state == IslandState.STOPPED


def test_what_waits_for_its_back_off_is_not_placed_any_more() -> None:
    story = Scaled(2)
    story.starts("a", "b")
    timer = the(SetTimer, story.dies("b"))
    story.scales(1, "down")
    assert story.timer(timer) == ()
    assert story.island("b").state == IslandState.STOPPED


def test_a_silent_island_is_drained_once_it_answers() -> None:
    story = Scaled(2)
    story.starts("a", "b")
    story.falls_silent("b")
    assert wanted(story.scales(1, "down")) == [("b", False)]
    assert the(DrainIsland, story.happen(events.ConnectionRestored, "b", 1)).island == "b"


def test_scaling_below_the_quorum_is_refused_whole() -> None:
    story = Scaled(3, quorum=2)
    story.starts("a", "b", "c")
    answer = the(ResolveCommand, story.scales(1, "down"))
    assert not answer.accepted
    assert "only 1 of the 2 islands" in answer.detail
    assert story.island("c").state == IslandState.TRAINING


def test_scaling_beyond_the_spares_is_refused_and_says_how_many_there_may_be() -> None:
    story = Scaled(2)
    answers = [the(ResolveCommand, story.scales(*asked)) for asked in ((5, "more"), (1, "elsewhere", "there"))]
    assert [answer.accepted for answer in answers] == [False, False]
    assert "0 to 4 islands on node group 'here'" in answers[0].detail
    assert "0 to 0 islands on node group 'there'" in answers[1].detail


def test_the_same_count_again_changes_nothing() -> None:
    story = Scaled(2)
    effects = story.scales(2, "again")
    assert [type(effect) for effect in effects] == [ResolveCommand]
    assert the(ResolveCommand, effects).accepted


def test_spares_do_not_keep_a_job_alive_whose_islands_were_all_given_up() -> None:
    story = Scaled(1, restarts_max=0)
    assert the(FinishJob, story.happen(events.PlacementFailed, "a", 1, "no room")).outcome == "failed"
