"""An island's life and the job's: placing, catching up, falling silent, dying, giving up, operators, ending."""

from __future__ import annotations

import pytest

from orchestrator.core import commands, events
from orchestrator.core.effects import (
    BeginCatchUp,
    Evaluate,
    FinishJob,
    FlushIsland,
    HoldIsland,
    KillIsland,
    PlaceIsland,
    PublishFragment,
    Recipient,
    RefuseContribution,
    ResolveCommand,
    SetTimer,
    StartTraining,
    StopIsland,
)
from orchestrator.core.messages import CatchUpFailure, CaughtUp, Flushed, Progress, Ready
from orchestrator.core.synchroniser import Synchroniser
from orchestrator.core.vocabulary import IslandState, JobOutcome, JobTimer, RefusalReason
from tests.harness.job import Job
from tests.harness.story import Story, all_of, placements, policy, the


def merge_once(story: Story, name: str = "a") -> None:
    for timer in all_of(SetTimer, story.offers_fragment(name)):
        story.timer(timer)
    story.merges(0, story.core.state.rounds[0].version + 1)


def test_a_job_starts_by_placing_every_island() -> None:
    job = Job(Synchroniser(policy("abc")))
    assert placements(job.happen(events.JobStarted)) == [("a", 1), ("b", 1), ("c", 1)]


def test_an_island_that_is_ready_before_there_are_parameters_waits_for_them() -> None:
    job = Job(Synchroniser(policy("a")))
    job.tell(events.JobStarted(0.0))
    job.tell(events.IslandPlaced(0.1, "a", 1, "node", 7))
    assert job.tell(events.IslandReported(0.2, "a", 1, Ready(1, 0.1))) == ()
    assert the(BeginCatchUp, job.tell(events.OuterStateSeeded(0.3, 10, "d"))).donor is None


def test_a_replacement_catches_up_from_the_peer_that_is_furthest() -> None:
    story = Story("abc")
    story.starts("a", "b", "c")
    merge_once(story)
    story.trains("b", 500)
    story.timer(the(SetTimer, story.dies("c")))
    request = story.is_ready("c")
    assert request is not None
    assert request.donor == ("b", 1)


def test_when_a_donor_fails_another_is_asked_and_in_the_end_the_synchroniser() -> None:
    story = Story("abc")
    story.starts("a", "b", "c")
    merge_once(story)
    story.timer(the(SetTimer, story.dies("c")))
    request = story.is_ready("c")
    asked = []
    while request is not None and request.donor is not None:
        asked.append(request.donor[0])
        request = the(BeginCatchUp, story.reports("c", 2, CatchUpFailure(request.donor[0], "donor died")))
    assert asked == ["a", "b"]
    assert request is not None
    assert request.donor is None


def test_data_goes_on_where_earlier_incarnations_are_known_to_have_been() -> None:
    story = Story("ab")
    story.starts("a", "b")
    story.trains("b", 400)
    story.timer(the(SetTimer, story.dies("b")))
    request = story.is_ready("b")
    assert request is not None
    assert request.cursor == 5


def test_what_was_published_during_a_catch_up_is_sent_after_it() -> None:
    story = Story("ab")
    story.starts("a")
    story.is_ready("b")
    merge_once(story)
    effects = story.reports("b", 1, CaughtUp(None, (0, 0), 0, 0.1))
    assert all_of(StartTraining, effects)
    publication = the(PublishFragment, effects)
    assert (publication.fragment, publication.version, publication.recipients) == (0, 1, (Recipient("b", 1, 0),))


def test_a_dead_island_is_placed_again_after_a_back_off_that_doubles() -> None:
    story = Story("ab", backoff_first_s=1.0, backoff_max_s=3.0, restarts_max=9)
    story.starts("a", "b")
    waits = []
    for life in range(1, 5):
        timer = the(SetTimer, story.dies("b"))
        waits.append(timer.due_at - story.now)
        assert placements(story.timer(timer)) == [("b", life + 1)]
    for wait, base in zip(waits, (1.0, 2.0, 3.0, 3.0), strict=True):
        assert base <= wait <= 1.25 * base


def test_a_node_group_that_stays_full_for_days_is_tried_for_days() -> None:
    story = Story("ab", backoff_first_s=1.0, backoff_max_s=3.0, restarts_max=5000)
    for life in range(1, 1101):
        timer = the(SetTimer, story.happen(events.PlacementFailed, "b", life, "no free cpu"))
        assert timer.due_at - story.now <= 1.25 * 3.0
        assert placements(story.timer(timer)) == [("b", life + 1)]


def waits(story: Story, island: str, reason: str = "group-b has no node"):
    return story.happen(events.PlacementDelayed, island, story.incarnation(island), reason)


def test_an_island_without_a_node_waits_for_one_and_no_failure_is_counted() -> None:
    story = Story("ab", restarts_max=0)
    story.starts("a")
    for day in range(1000):
        assert waits(story, "b", f"day {day}") == ()
        story.wait(86400.0)
    view = story.island("b")
    assert (view.state, view.reason, view.incarnation) == (IslandState.WAITING, "day 999", 1)
    story.starts("b")
    assert story.island("b").state == IslandState.TRAINING
    assert story.core.state.islands["b"].failures == 0


def test_an_island_that_waits_for_a_node_has_no_process_to_kill_and_is_named_as_what_a_quorum_lacks() -> None:
    story = Story("ab", quorum=2)
    story.starts("a")
    waits(story, "b")
    answer = the(ResolveCommand, story.command("k1", commands.Kill("b")))
    assert (answer.accepted, "waiting for a node (group-b has no node)" in answer.detail) == (False, True)
    assert "b is waiting for a node" in story.core.state.pause_reason()


def test_an_island_that_is_not_wanted_any_more_stops_waiting() -> None:
    story = Story("ab")
    story.starts("a")
    waits(story, "b")
    assert the(StopIsland, story.command("s1", commands.Scale("group-b", 0))).island == "b"
    assert story.island("b").state == IslandState.STOPPED
    assert the(StopIsland, story.happen(events.IslandPlaced, "b", 1, "node", 7)).island == "b"  # too late


def test_a_cordon_holds_an_island_that_waits_for_a_node_there() -> None:
    story = Story("ab")
    story.starts("a")
    waits(story, "b")
    effects = story.command("c1", commands.Cordon("group-b"))
    assert (the(StopIsland, effects).island, the(HoldIsland, effects).island) == ("b", "b")
    assert waits(story, "b") == ()
    assert story.island("b").state == IslandState.CORDONED
    assert placements(story.command("u1", commands.Uncordon("group-b"))) == [("b", 2)]


def test_a_synchroniser_that_comes_back_asks_again_for_what_waits_for_a_node() -> None:
    story = Story("ab")
    waits(story, "b")
    effects = story.happen(events.SynchroniserRestarted, 2)
    assert ("b", 1) in placements(effects)
    assert story.island("b").state == IslandState.WAITING


def test_a_contribution_ends_the_row_of_failures() -> None:
    story = Story("ab", restarts_max=1)
    story.starts("a", "b")
    for _ in range(3):
        merge_once(story, "b")
        story.timer(the(SetTimer, story.dies("b")))
        story.starts("b")
    assert story.island("b").state == IslandState.TRAINING


def test_an_island_that_keeps_failing_is_given_up_with_the_reason() -> None:
    story = Story("ab", restarts_max=1)
    story.starts("a")
    story.timer(the(SetTimer, story.happen(events.PlacementFailed, "b", 1, "group-b has no free cpu")))
    assert all_of(SetTimer, story.happen(events.PlacementFailed, "b", 2, "group-b has no free cpu")) == []
    view = story.island("b")
    assert view.state == IslandState.FAILED
    assert "no free cpu" in view.reason
    assert placements(story.command("c1", commands.Readd("b"))) == [("b", 3)]


def test_when_every_island_is_given_up_the_job_fails() -> None:
    story = Story("a", restarts_max=0)
    finish = the(FinishJob, story.happen(events.PlacementFailed, "a", 1, "no such node group"))
    assert finish.outcome is JobOutcome.FAILED
    assert "no such node group" in finish.reason


def test_silence_is_a_guess_and_death_only_after_the_timeout() -> None:
    story = Story("ab")
    story.starts("a", "b")
    timer = the(SetTimer, story.falls_silent("b"))
    assert story.island("b").state == IslandState.SUSPECT
    story.wait(5.0)
    story.happen(events.ConnectionRestored, "b", 1)
    assert story.island("b").state == IslandState.TRAINING
    assert story.timer(timer) == ()
    effects = story.timer(the(SetTimer, story.falls_silent("b")))
    assert the(StopIsland, effects).incarnation == 1  # it may live on somewhere
    assert story.island("b").state == IslandState.LOST


def test_a_replaced_process_that_shows_up_is_ended() -> None:
    story = Story("ab")
    story.starts("a", "b")
    story.timer(the(SetTimer, story.dies("b")))
    effects = story.reports("b", 1, Progress(9, 9, 900, 1.0, 1.0, 1.0, 5.0))
    assert the(StopIsland, effects).incarnation == 1
    assert story.island("b").tokens_total == 100  # what it says is not believed


def test_kill_answers_and_the_island_comes_back_by_itself() -> None:
    story = Story("ab")
    story.starts("a", "b")
    effects = story.command("k1", commands.Kill("b", True))
    assert the(ResolveCommand, effects).accepted
    assert the(KillIsland, effects).incarnation == 1
    assert placements(story.timer(the(SetTimer, story.dies("b")))) == [("b", 2)]
    assert story.command("k1", commands.Kill("b", True)) == ()  # repeated under its id


def test_killed_before_there_is_a_process_an_island_is_killed_when_there_is_one() -> None:
    story = Story("ab")
    assert story.island("b").state == IslandState.PLACING
    story.command("k1", commands.Kill("b", True))
    kill = the(KillIsland, story.happen(events.IslandPlaced, "b", 1, "node", 1000))
    assert (kill.island, kill.incarnation) == ("b", 1)


def test_a_failed_placement_leaves_no_process_behind() -> None:
    story = Story("ab")
    effects = story.happen(events.PlacementFailed, "b", 1, "the controller did not answer")
    assert the(StopIsland, effects).incarnation == 1


def test_an_island_that_was_silent_when_the_parameters_came_gets_them_when_it_is_back() -> None:
    job = Job(Synchroniser(policy("ab")))
    for event in (
        events.JobStarted(0.0),
        events.IslandPlaced(0.1, "a", 1, "node", 7),
        events.IslandReported(0.2, "a", 1, Ready(1, 0.1)),
        events.ConnectionLost(0.3, "a", 1, False, "silent"),
        events.OuterStateSeeded(0.4, 10, "d"),
    ):
        job.tell(event)
    assert the(BeginCatchUp, job.tell(events.ConnectionRestored(0.5, "a", 1))).island == "a"


def test_killed_to_stay_away_an_island_waits_for_its_readd() -> None:
    story = Story("ab")
    story.starts("a", "b")
    story.command("k1", commands.Kill("b", False))
    assert all_of(SetTimer, story.dies("b")) == []
    assert story.island("b").state == IslandState.STOPPED
    assert placements(story.command("r1", commands.Readd("b"))) == [("b", 2)]


@pytest.mark.parametrize(
    ("command", "says"),
    [(commands.Kill("x"), "no island is named 'x'"), (commands.Readd("a"), "is there already")],
)
def test_a_command_that_cannot_be_done_says_why(command: commands.OperatorCommand, says: str) -> None:
    story = Story("ab")
    story.starts("a", "b")
    answer = the(ResolveCommand, story.command("c1", command))
    assert not answer.accepted
    assert says in answer.detail


def test_cancelling_stops_everything_and_ends_the_job() -> None:
    story = Story("ab")
    story.starts("a", "b")
    story.offers_fragment("a")
    effects = story.command("c1", commands.Cancel())
    assert {e.island for e in all_of(StopIsland, effects)} == {"a", "b"}
    assert isinstance(effects[-1], FinishJob)
    assert effects[-1].outcome is JobOutcome.CANCELLED
    assert not the(ResolveCommand, story.command("c2", commands.Cancel())).accepted


def test_a_job_ends_after_flush_merge_and_a_last_evaluation() -> None:
    story = Story("ab", token_budget=300)
    story.starts("a", "b")
    assert {e.island for e in all_of(FlushIsland, story.trains("a", 200))} == {"a", "b"}
    story.offers_fragment("a")
    story.reports("b", 1, Flushed())
    story.reports("a", 1, Flushed())
    evaluation = the(Evaluate, story.merges(0, 1))
    assert evaluation.global_version == 1
    effects = story.happen(events.EvaluationCompleted, 1, 3.2)
    assert isinstance(effects[-1], FinishJob)
    assert effects[-1].outcome is JobOutcome.COMPLETED
    assert {e.island for e in all_of(StopIsland, effects)} == {"a", "b"}


def test_an_island_that_does_not_flush_does_not_hold_up_the_end() -> None:
    story = Story("ab", token_budget=300)
    story.starts("a", "b")
    timer = next(e for e in all_of(SetTimer, story.trains("a", 200)) if e.timer is JobTimer.FLUSH)
    story.reports("a", 1, Flushed())
    assert all_of(Evaluate, story.timer(timer))


def test_an_island_that_trains_on_unheard_does_not_hold_up_the_end() -> None:
    story = Story("ab", token_budget=300)
    story.starts("a", "b")
    story.offers_fragment("a")
    story.offers_fragment("b")
    story.merges(0, 1)
    story.falls_silent("b")
    story.trains("a", 200)  # b is not asked to flush: it does not answer
    evaluation = the(Evaluate, story.reports("a", 1, Flushed()))
    refusal = the(RefuseContribution, story.offers_fragment("b"))
    assert refusal.reason is RefusalReason.JOB_OVER
    assert all_of(FinishJob, story.happen(events.EvaluationCompleted, evaluation.global_version, 3.2))


def test_an_island_lost_while_the_job_ends_is_not_placed_again() -> None:
    story = Story("ab", token_budget=300)
    story.starts("a", "b")
    story.trains("a", 200)
    timer = the(SetTimer, story.dies("b"))
    assert all_of(PlaceIsland, story.timer(timer)) == []
