"""An island's node is about to go: the island gives its work and goes on elsewhere, and no failure is counted."""

from __future__ import annotations

import pytest

from orchestrator.core import commands, events
from orchestrator.core.effects import DrainIsland, MergeFragment, PlaceIsland, ResolveCommand, SetTimer, StopIsland
from orchestrator.core.messages import CaughtUp, Drained, Flushed
from orchestrator.core.vocabulary import CloseReason, IslandPlan, IslandState
from tests.harness.story import Story, all_of, inputs, placements, the


@pytest.fixture
def story() -> Story:
    """Three islands train; one contribution is a quorum."""
    told = Story("abc", accounted=True)
    told.starts("a", "b", "c")
    return told


def notice(story: Story, island: str, seconds: float | None = 30.0, incarnation: int = 1):
    return story.happen(events.NoticeReceived, island, incarnation, "the spot machine is taken back", seconds)


def is_drained(story: Story, island: str, incarnation: int = 1):
    return story.reports(island, incarnation, Drained())


def test_an_island_whose_node_goes_gives_its_work_and_is_placed_again_without_a_wait(story: Story) -> None:
    effects = notice(story, "a")
    assert the(DrainIsland, effects) == DrainIsland("a", 1)
    view = story.island("a")
    assert (view.state, "taken back: its node goes in 30 s" in view.reason) == (IslandState.DRAINING, True)
    effects = is_drained(story, "a")
    assert the(StopIsland, effects).incarnation == 1
    again = the(SetTimer, effects)
    assert again.due_at == story.now
    assert placements(story.timer(again)) == [("a", 2)]
    assert story.core.state.islands["a"].failures == 0


def test_its_process_ends_before_the_node_does_whatever_versions_hold(story: Story) -> None:
    deadline = the(SetTimer, notice(story, "a"))
    assert story.now < deadline.due_at < story.now + 30.0
    story.offers_fragment("a", step=1)
    effects = story.timer(deadline)
    assert the(StopIsland, effects).island == "a"
    assert placements(story.timer(the(SetTimer, effects))) == [("a", 2)]
    story.offers_fragment("b")
    assert "a" in inputs(the(MergeFragment, story.offers_fragment("c")))  # what it gave is not lost


@pytest.mark.parametrize("seconds", [0.0, -5.0, 0.5])
def test_a_notice_that_comes_too_late_still_has_an_end(story: Story, seconds: float) -> None:
    deadline = the(SetTimer, notice(story, "a", seconds))
    assert story.now <= deadline.due_at <= story.now + max(0.0, seconds)


def test_one_without_an_end_waits_for_the_merges(story: Story) -> None:
    effects = notice(story, "a", None)
    assert the(DrainIsland, effects)
    assert all_of(SetTimer, effects) == []


def test_a_notice_said_again_changes_nothing(story: Story) -> None:
    notice(story, "a")
    assert notice(story, "a") == ()


def test_an_island_without_work_leaves_at_once(story: Story) -> None:
    placed = story.timer(the(SetTimer, story.dies("a")))
    assert placements(placed) == [("a", 2)]
    effects = notice(story, "a", incarnation=2)
    assert the(StopIsland, effects).incarnation == 2
    assert placements(story.timer(the(SetTimer, effects))) == [("a", 3)]


def test_an_island_that_an_operator_drains_stays_away(story: Story) -> None:
    story.command("d1", commands.Drain("a"))
    assert notice(story, "a") == ()
    is_drained(story, "a")
    assert story.island("a").state == IslandState.DRAINED


def test_no_quorum_is_asked_for_where_the_node_goes_anyhow() -> None:
    story = Story("ab", quorum=2)
    story.starts("a", "b")
    assert the(DrainIsland, notice(story, "a")).island == "a"
    story.offers_fragment("a", step=1)
    assert set(inputs(the(MergeFragment, story.offers_fragment("b")))) == {"a", "b"}


def test_a_silent_island_is_drained_once_it_answers_and_then_goes_on_elsewhere(story: Story) -> None:
    story.falls_silent("a")
    assert notice(story, "a") == ()
    assert the(DrainIsland, story.happen(events.ConnectionRestored, "a", 1)).island == "a"
    assert placements(story.timer(the(SetTimer, is_drained(story, "a")))) == [("a", 2)]


def test_one_that_dies_before_its_time_is_lost_as_any_other(story: Story) -> None:
    notice(story, "a")
    backoff = the(SetTimer, story.dies("a"))
    assert backoff.due_at > story.now
    assert story.island("a").state == IslandState.LOST


def test_an_operator_may_keep_away_what_goes(story: Story) -> None:
    notice(story, "a")
    assert the(ResolveCommand, story.command("k1", commands.Kill("a", False))).accepted
    effects = is_drained(story, "a")
    assert all_of(PlaceIsland, effects) == []
    assert all_of(SetTimer, effects) == []


def test_a_cordoned_group_takes_its_next_incarnation_when_it_may(story: Story) -> None:
    story.command("c1", commands.Cordon(story.core.state.islands["a"].plan.node_group))
    notice(story, "a")
    story.timer(the(SetTimer, is_drained(story, "a")))
    assert story.island("a").state == IslandState.CORDONED


def test_a_standby_takes_over_at_the_moment_the_work_is_merged() -> None:
    story = Story("ab", accounted=True, standbys=(IslandPlan("spare", "group-b", "region-b", 1),))
    story.starts("a", "b")
    story.is_ready("spare")
    versions = tuple(f.version for f in story.core.state.rounds)
    story.reports("spare", 1, CaughtUp(None, versions, 0, 0.1))
    notice(story, "b")
    effects = is_drained(story, "b")
    assert ("spare", 1) in [place.standby for place in all_of(PlaceIsland, effects)]
    assert placements(effects) == [("b", 2), ("spare", 2)]


def test_a_standby_whose_node_goes_is_placed_elsewhere_and_promoted_nowhere_meanwhile() -> None:
    story = Story("ab", accounted=True, standbys=(IslandPlan("spare", "group-b", "region-b", 1),))
    story.starts("a", "b")
    story.is_ready("spare")
    versions = tuple(f.version for f in story.core.state.rounds)
    story.reports("spare", 1, CaughtUp(None, versions, 0, 0.1))
    leaving = notice(story, "spare")
    assert placements(story.dies("b")) == []
    assert placements(story.timer(the(SetTimer, leaving))) == [("spare", 2)]


# ── all islands leave ─────────────────────────────────────────────────────────────────────────────────────────────


def leaving_together(islands: str, leaving: str, *, quorum: int = 1) -> Story:
    """These islands train, and some of them hear within one round that their nodes go."""
    story = Story(islands, quorum=quorum, leaving_closes=True)
    story.starts(*islands)
    for island in leaving:
        notice(story, island)
    return story


def test_islands_that_leave_together_merge_their_last_work_at_once_before_it_is_due() -> None:
    story = leaving_together("ab", "ab")
    wait = the(SetTimer, story.offers_fragment("a", step=1))
    assert story.now < wait.due_at < story.now + 10.0  # "b" may have nothing to give
    merge = the(MergeFragment, story.offers_fragment("b", step=1))
    assert (merge.reason, set(inputs(merge))) == (CloseReason.LEAVING, {"a", "b"})
    assert story.timer(wait) == ()


def test_work_offered_before_the_last_notice_waits_for_nobody_else() -> None:
    story = leaving_together("ab", "a")
    assert all_of(MergeFragment, story.offers_fragment("a", step=1)) == []  # "b" trains, and is waited for
    assert all_of(MergeFragment, notice(story, "b")) == []
    assert set(inputs(the(MergeFragment, story.offers_fragment("b", step=1)))) == {"a", "b"}


def test_an_island_with_nothing_to_give_is_not_waited_for_long() -> None:
    story = leaving_together("ab", "ab")
    merge = the(MergeFragment, story.timer(the(SetTimer, story.offers_fragment("a", step=1))))
    assert (merge.reason, set(inputs(merge)), "without b" in merge.detail) == (CloseReason.LEAVING, {"a"}, True)


def test_the_last_island_of_a_quorum_merges_alone_when_it_leaves() -> None:
    story = leaving_together("ab", "", quorum=2)
    story.dies("b")
    notice(story, "a")
    assert set(inputs(the(MergeFragment, story.offers_fragment("a", step=1)))) == {"a"}


def test_the_quorum_stays_where_a_silent_island_may_still_train() -> None:
    story = leaving_together("ab", "", quorum=2)
    story.falls_silent("b")
    notice(story, "a")
    assert all_of(MergeFragment, story.offers_fragment("a", step=1)) == []
    story.happen(events.ConnectionRestored, "b", 1)
    assert set(inputs(the(MergeFragment, story.offers_fragment("b")))) == {"a", "b"}


def test_a_silent_island_whose_node_goes_too_keeps_no_round_open() -> None:
    story = leaving_together("ab", "", quorum=2)
    story.falls_silent("b")
    notice(story, "a")
    story.offers_fragment("a", step=1)
    assert set(inputs(the(MergeFragment, notice(story, "b")))) == {"a"}


def test_work_of_an_island_that_fell_silent_merges_once_it_answers_and_leaves() -> None:
    story = leaving_together("ab", "", quorum=2)
    story.offers_fragment("a", step=1)
    story.falls_silent("a")
    notice(story, "a")
    story.dies("b")
    effects = story.happen(events.ConnectionRestored, "a", 1)
    assert the(DrainIsland, effects).island == "a"
    assert set(inputs(the(MergeFragment, effects))) == {"a"}


def test_an_island_that_is_re_added_while_the_others_leave_does_not_wait_for_them() -> None:
    story = leaving_together("ab", "")
    story.command("d1", commands.Drain("a"))
    notice(story, "b")
    assert all_of(MergeFragment, story.offers_fragment("a")) == []
    merge = the(MergeFragment, story.command("r1", commands.Readd("a")))
    assert (merge.reason, set(inputs(merge))) == (CloseReason.EVERYONE_IN, {"a"})


def test_an_island_that_comes_back_in_another_process_while_the_others_leave_does_not_wait_for_them() -> None:
    story = leaving_together("ab", "")
    assert all_of(MergeFragment, story.offers_fragment("a")) == []
    story.timer(the(SetTimer, story.dies("a")))
    assert all_of(MergeFragment, notice(story, "b")) == []
    story.is_ready("a")
    versions = tuple(current.version for current in story.core.state.rounds)
    merge = the(MergeFragment, story.reports("a", 2, CaughtUp(None, versions, 0, 0.1)))
    assert (merge.reason, set(inputs(merge))) == (CloseReason.EVERYONE_IN, {"a"})


def test_a_round_that_waited_for_those_that_leave_collects_again_when_another_island_trains() -> None:
    story = leaving_together("abc", "", quorum=2)
    story.timer(the(SetTimer, story.dies("c")))
    for island in "ab":
        notice(story, island)
    wait = the(SetTimer, story.offers_fragment("a", step=1))
    story.starts("c")
    assert all_of(MergeFragment, story.timer(wait)) == []
    assert set(inputs(the(MergeFragment, story.offers_fragment("c")))) == {"a", "c"}


def test_a_tape_of_an_older_build_waits_as_it_did() -> None:
    story = Story("a")
    story.starts("a")
    notice(story, "a")
    assert all_of(MergeFragment, story.offers_fragment("a", step=1)) == []


def test_merging_is_not_said_to_wait_while_all_islands_leave() -> None:
    assert leaving_together("ab", "ab").core.state.pause_reason() is None


def test_an_island_that_ended_for_an_order_nobody_remembers_is_placed_again_without_a_failure(story: Story) -> None:
    effects = story.reports("a", 1, Flushed())
    assert the(StopIsland, effects).island == "a"
    again = the(SetTimer, effects)
    assert again.due_at == story.now
    assert placements(story.timer(again)) == [("a", 2)]
    assert story.core.state.islands["a"].failures == 0
    assert story.statistics.failures == {}
