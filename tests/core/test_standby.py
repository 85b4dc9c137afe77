"""Standbys: they come to hold a state and wait; a lost island goes on as one's process, and a new one is placed."""

from __future__ import annotations

from typing import Any

from orchestrator.core import commands, events
from orchestrator.core.effects import (
    BeginCatchUp,
    Effect,
    KillIsland,
    PlaceIsland,
    PublishFragment,
    ResolveCommand,
    SetTimer,
    StandBy,
    StartTraining,
    StopIsland,
)
from orchestrator.core.messages import CaughtUp, Ready
from orchestrator.core.vocabulary import IslandPlan, IslandState, JobOutcome
from orchestrator.tape.codec import parse_timer
from tests.harness.story import Story, all_of, placements, the

SPARE = IslandPlan("spare", "group-b", "region-b", 1)
OTHER = IslandPlan("other", "group-b", "region-b", 1)


class Tale(Story):
    """A story of islands a and b, with standbys of b's kind; its folds hear of it, too."""

    def __init__(self, *standbys: IslandPlan, **changed: Any) -> None:
        super().__init__("ab", accounted=True, standbys=standbys or (SPARE,), **changed)

    def stands_by(self, name: str = "spare") -> tuple[Effect, ...]:
        self.is_ready(name)
        versions = tuple(f.version for f in self.core.state.rounds)
        return self.reports(name, self.incarnation(name), CaughtUp(None, versions, 0, 0.1))

    def goes_on(self, name: str) -> tuple[Effect, ...]:
        """As the process of a standby."""
        request = self.is_ready(name)
        assert request is not None
        assert request.held
        versions = tuple(f.version for f in self.core.state.rounds)
        return self.reports(name, self.incarnation(name), CaughtUp(None, versions, 0, 0.0))


def ready(*standbys: IslandPlan, **changed: Any) -> Tale:
    tale = Tale(*standbys, **changed)
    tale.starts("a", "b")
    for standby in standbys or (SPARE,):
        tale.stands_by(standby.island)
    return tale


def merge_once(story: Story, name: str) -> tuple[Effect, ...]:
    for timer in all_of(SetTimer, story.offers_fragment(name)):
        story.timer(timer)
    return story.merges(0, story.core.state.rounds[0].version + 1)


def test_a_standby_is_given_a_state_and_trains_nothing() -> None:
    tale = Tale()
    tale.starts("a", "b")
    effects = tale.stands_by()
    assert the(StandBy, effects).island == "spare"
    assert not all_of(StartTraining, effects)
    assert tale.island("spare").state == IslandState.STANDBY
    assert "spare" not in tale.core.state.live


def test_a_standby_hears_what_is_published_and_is_no_donor() -> None:
    tale = ready()
    recipients = {to.island for to in the(PublishFragment, merge_once(tale, "a")).recipients}
    assert recipients == {"a", "b", "spare"}
    tale.dies("b")
    assert tale.island("b").state == IslandState.PLACING
    tale.dies("a")
    tale.timer(SetTimer(parse_timer("backoff:a"), tale.core.state.islands["a"].current.timer_serial, tale.now + 2))
    request = tale.is_ready("a")
    assert request is not None
    assert request.donor is None


def test_a_lost_island_goes_on_as_the_standbys_process_and_another_standby_is_placed() -> None:
    tale = ready()
    tale.trains("b", 400)
    effects = tale.dies("b")
    took, placed = all_of(PlaceIsland, effects)
    assert (took.island, took.incarnation, took.standby) == ("b", 2, ("spare", 1))
    assert (placed.island, placed.incarnation, placed.standby) == ("spare", 2, None)
    assert the(BeginCatchUp, tale.happen(events.IslandPlaced, "b", 2, "node", 7) + _ready(tale, "b")).held
    versions = tuple(f.version for f in tale.core.state.rounds)
    assert the(StartTraining, tale.reports("b", 2, CaughtUp(None, versions, 9, 0.0))).incarnation == 2
    assert tale.core.state.islands["b"].steps_before == 5  # its data goes on where it was


def test_the_next_standby_waits_until_the_island_has_made_its_first_steps() -> None:
    tale = ready(standby_wait_s=3.0)
    took, placed = all_of(PlaceIsland, tale.dies("b"))
    assert (took.wait_s, placed.wait_s) == (0.0, 3.0)
    assert tale.island("spare").reason == "its process is b now; placing again in 3 s"
    again = all_of(PlaceIsland, tale.happen(events.SynchroniserRestarted, 2))
    assert [(place.island, place.wait_s) for place in again if place.island == "spare"] == [("spare", 0.0)]


def test_an_island_that_waits_for_a_node_goes_on_as_a_standbys_process_at_once() -> None:
    tale = Tale()
    tale.starts("a", "b")
    tale.timer(the(SetTimer, tale.dies("b")))
    tale.happen(events.PlacementDelayed, "b", 2, "group-b has no node")
    effects = tale.stands_by()
    assert (the(StopIsland, effects).incarnation, all_of(PlaceIsland, effects)[0].standby) == (2, ("spare", 1))


def _ready(tale: Tale, name: str) -> tuple[Effect, ...]:
    return tale.reports(name, tale.incarnation(name), Ready(1, 0.0))


def test_what_the_standbys_former_name_says_is_not_listened_to() -> None:
    tale = ready()
    tale.dies("b")
    tale.goes_on("b")
    assert tale.happen(events.ConnectionLost, "spare", 1, True, "its link was closed") == ()
    assert tale.island("b").state == IslandState.TRAINING


def test_without_a_standby_of_its_kind_an_island_waits_out_its_back_off() -> None:
    tale = ready()
    effects = tale.dies("a")
    assert placements(effects) == []
    assert placements(tale.timer(the(SetTimer, effects))) == [("a", 2)]


def test_an_island_that_waits_is_taken_over_as_soon_as_a_standby_is_ready() -> None:
    tale = Tale()
    tale.starts("a", "b")
    timer = the(SetTimer, tale.dies("b"))
    assert tale.island("b").state == IslandState.LOST
    effects = tale.stands_by()
    assert [p.standby for p in all_of(PlaceIsland, effects)] == [("spare", 1), None]
    assert tale.timer(timer) == ()  # the back-off is over, and was not needed


def test_a_standby_that_dies_is_placed_again_and_costs_nobody_anything() -> None:
    tale = ready()
    assert placements(tale.timer(the(SetTimer, tale.dies("spare")))) == [("spare", 2)]
    assert {tale.island(name).state for name in "ab"} == {IslandState.TRAINING}
    assert placements(tale.timer(the(SetTimer, tale.dies("b")))) == [("b", 2)]  # cold: it was not back in time


def test_when_the_standby_dies_while_it_takes_over_the_island_is_placed_from_nothing() -> None:
    tale = ready()
    tale.dies("b")
    effects = tale.happen(events.PlacementFailed, "b", 2, "the standby spare is gone")
    assert the(StopIsland, effects).incarnation == 2
    place = the(PlaceIsland, tale.timer(the(SetTimer, effects)))
    assert (place.island, place.incarnation, place.standby) == ("b", 3, None)


def test_two_lost_islands_take_two_standbys() -> None:
    tale = ready(SPARE, OTHER)
    assert the(PlaceIsland, tale.dies("b")[:2]).standby == ("other", 1)
    tale.goes_on("b")
    assert [p.standby for p in all_of(PlaceIsland, tale.dies("b"))] == [("spare", 1), None]


def test_a_silent_island_is_taken_over_once_it_counts_as_lost() -> None:
    tale = ready()
    effects = tale.timer(the(SetTimer, tale.falls_silent("b")))
    assert the(StopIsland, effects).incarnation == 1  # it may live on somewhere
    assert all_of(PlaceIsland, effects)[0].standby == ("spare", 1)


def test_a_silent_standby_takes_nobodys_place_until_it_answers() -> None:
    tale = ready()
    merge_once(tale, "a")
    tale.falls_silent("spare")
    assert not placements(tale.dies("b"))
    effects = tale.happen(events.ConnectionRestored, "spare", 1)
    assert the(PublishFragment, effects).recipients[0].island == "spare"
    assert all_of(PlaceIsland, effects)[0].standby == ("spare", 1)


def test_a_standby_that_is_being_killed_takes_nobodys_place() -> None:
    tale = ready()
    assert the(KillIsland, tale.command("k", commands.Kill("spare", True))).island == "spare"
    assert not placements(tale.dies("b"))


def test_an_island_that_is_kept_away_or_drained_is_not_taken_over() -> None:
    tale = ready()
    tale.command("k", commands.Kill("b", False))
    assert not placements(tale.dies("b"))
    assert tale.island("b").state == IslandState.STOPPED


def test_a_standby_cannot_be_drained() -> None:
    tale = ready()
    answer = the(ResolveCommand, tale.command("d", commands.Drain("spare")))
    assert not answer.accepted
    assert "not training" in answer.detail


def test_nobody_takes_over_on_a_cordoned_node_group_until_it_takes_islands_again() -> None:
    tale = ready()
    tale.command("c", commands.Cordon("group-b"))
    timer = the(SetTimer, tale.dies("b"))
    tale.timer(timer)
    assert tale.island("b").state == IslandState.CORDONED
    assert placements(tale.command("u", commands.Uncordon("group-b"))) == [("b", 2)]


def test_standbys_are_not_among_the_islands_that_scaling_counts() -> None:
    tale = ready()
    answer = the(ResolveCommand, tale.command("s", commands.Scale("group-b", 2)))
    assert not answer.accepted
    assert "0 to 1" in answer.detail


def test_a_job_whose_islands_were_all_given_up_fails_whoever_stands_by() -> None:
    tale = Tale(restarts_max=0)
    tale.starts("a", "b")
    tale.dies("a")
    tale.dies("b")
    assert tale.core.state.outcome is JobOutcome.FAILED


def test_after_the_synchronisers_death_a_take_over_under_way_is_asked_for_again() -> None:
    tale = ready()
    tale.dies("b")
    again = all_of(PlaceIsland, tale.happen(events.SynchroniserRestarted, 2))
    assert [(p.island, p.standby) for p in again] == [("b", ("spare", 1)), ("spare", None)]


def test_after_the_synchronisers_death_a_standby_is_told_what_it_may_have_missed() -> None:
    tale = ready()
    merge_once(tale, "a")
    told = all_of(PublishFragment, tale.happen(events.SynchroniserRestarted, 2))
    assert "spare" in {to.island for publication in told for to in publication.recipients}


def test_a_standbys_time_is_told_apart_from_that_of_the_islands() -> None:
    tale = ready()
    tale.wait(10.0)
    tale.dies("b")
    tale.goes_on("b")
    tale.wait(5.0)
    assert tale.goodput is not None
    told = tale.goodput.summary(tale.now)
    assert told["standbys"] == {"ready_seconds": 10.0, "preparing_seconds": 5.0, "takeovers": 1}
    assert told["island_seconds"]["total"] == 30.0  # a and b, 15 seconds each
    assert [r["island"] for r in tale.statistics.summary(tale.now)["recoveries"]] == ["b"]
