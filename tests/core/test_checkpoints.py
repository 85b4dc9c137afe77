"""Checkpoints as the core decides on them: when one begins, what is in its cut, when it is whole, and what goes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from orchestrator.core import commands, events, saving
from orchestrator.core.checkpoints import BACK_OFF_S, FAILURES_AT_ONCE
from orchestrator.core.effects import FinishJob, FlushIsland, MergeFragment, ResolveCommand, SetTimer
from orchestrator.core.messages import NotSaved, Saved
from orchestrator.core.vocabulary import CheckpointPolicy, IslandState, JobTimer
from tests.harness.story import Story, all_of, the


def asked(story: Story, command: str = "c1"):
    return story.command(command, commands.Checkpoint())


def saves(story: Story, island: str, checkpoint: int = 1):
    return story.reports(island, story.incarnation(island), Saved(checkpoint, f"of {island}", 100, 0.001))


def sealed(effects):
    return tuple((part.island, part.incarnation) for part in the(saving.SealCheckpoint, effects).parts)


def test_a_checkpoint_asked_for_begins_with_everyone_who_trains_and_is_sealed_when_all_have_answered() -> None:
    story = Story("abc")
    story.starts("a", "b")
    begun = asked(story)
    assert the(ResolveCommand, begun).accepted
    cut = the(saving.BeginCheckpoint, begun)
    assert cut.islands == (("a", 1), ("b", 1))
    assert cut.versions == (0, 0)
    assert not saves(story, "b")
    assert sealed(saves(story, "a")) == (("a", 1), ("b", 1))
    assert not story.happen(saving.CheckpointTaken, 1, 1000, 0.5)
    assert [kept.number for kept in story.core.state.checkpoints.retained] == [1]


def test_what_is_merging_is_in_the_cut_and_what_is_only_offered_is_not() -> None:
    story = Story("ab", quorum=2)
    story.starts("a", "b")
    story.offers_fragment("a", 0)
    merging = story.offers_fragment("b", 0)
    assert all_of(MergeFragment, merging)
    story.offers_fragment("a", 1)
    assert the(saving.BeginCheckpoint, asked(story)).versions == (1, 0)


def test_an_island_that_dies_is_left_out() -> None:
    story = Story("ab")
    story.starts("a", "b")
    asked(story)
    saves(story, "a")
    assert sealed(story.dies("b")) == (("a", 1),)


def test_an_island_that_cannot_save_is_left_out() -> None:
    story = Story("ab")
    story.starts("a", "b")
    asked(story)
    saves(story, "a")
    assert sealed(story.reports("b", 1, NotSaved(1, "its disk is full"))) == (("a", 1),)


def test_an_island_that_does_not_answer_in_time_is_left_out_and_is_not_heard_afterwards() -> None:
    story = Story("ab", checkpoints=CheckpointPolicy(timeout_s=7.0))
    story.starts("a", "b")
    deadline = the(SetTimer, asked(story))
    assert deadline.due_at == story.now + 7.0
    saves(story, "a")
    story.falls_silent("b")
    assert sealed(story.timer(deadline)) == (("a", 1),)
    assert not saves(story, "b")
    assert not story.timer(deadline)


def test_how_long_islands_may_take_to_save_is_by_what_all_of_them_have_to_write() -> None:
    small, large = Story("ab"), Story("ab")
    large.core.handle(events.OuterStateSeeded(0.0, 10**9, "digest"))
    waits = []
    for story in (small, large):
        story.starts("a", "b")
        waits.append(the(SetTimer, asked(story)).due_at - story.now)
    assert waits[0] == pytest.approx(60.0, abs=0.1)
    assert waits[1] == pytest.approx(60.0 + 2 * 12e9 / 5e6)


def test_without_any_state_of_an_island_there_is_no_checkpoint() -> None:
    story = Story("a")
    story.starts("a")
    asked(story)
    dropped = the(saving.DropCheckpoint, story.reports("a", 1, NotSaved(1, "its disk is full")))
    assert (dropped.checkpoint, dropped.reason) == (1, "no island saved its state (a: its disk is full)")
    assert the(saving.BeginCheckpoint, asked(story, "c2")).checkpoint == 2  # a number is used once


def test_the_next_life_of_an_island_does_not_answer_for_the_one_that_was_asked() -> None:
    story = Story("ab")
    story.starts("a", "b")
    asked(story)
    backoff = the(SetTimer, story.dies("b"))
    story.timer(backoff)
    story.starts("b")
    assert not saves(story, "b")
    assert sealed(saves(story, "a")) == (("a", 1),)


def test_only_one_is_taken_at_a_time_and_none_when_nobody_trains() -> None:
    story = Story("a")
    assert "no island trains" in the(ResolveCommand, asked(story, "c0")).detail
    story.starts("a")
    asked(story, "c1")
    refused = the(ResolveCommand, asked(story, "c2"))
    assert not refused.accepted
    assert "checkpoint 1 is being taken" in refused.detail
    assert not asked(story, "c1")  # repeated under its own id


def test_every_so_many_merges_one_begins_and_the_oldest_go() -> None:
    story = Story("a", checkpoints=CheckpointPolicy(every_merges=2, keep=2))
    story.starts("a")
    dropped = []
    for version in range(1, 9):
        story.offers_fragment("a", 0)
        begun = all_of(saving.BeginCheckpoint, story.merges(0, version))
        assert len(begun) == (version % 2 == 0)
        if begun:
            saves(story, "a", begun[0].checkpoint)
            taken = story.happen(saving.CheckpointTaken, begun[0].checkpoint, 1000, 0.5)
            dropped += [effect.checkpoint for effect in all_of(saving.DropCheckpoint, taken)]
            assert not story.happen(saving.CheckpointTaken, begun[0].checkpoint, 1000, 0.5)  # told again
    assert dropped == [1, 2]
    assert [(kept.number, kept.versions) for kept in story.core.state.checkpoints.retained] == [
        (3, (6, 0)),
        (4, (8, 0)),
    ]


def test_every_so_many_seconds_one_begins_unless_one_is_open() -> None:
    story = Story("a", checkpoints=CheckpointPolicy(every_s=5.0))
    due = SetTimer(JobTimer.CHECKPOINT_DUE, story.core.state.checkpoints.due_serial, 5.0)
    story.starts("a")
    first = story.timer(due)
    assert the(saving.BeginCheckpoint, first).checkpoint == 1
    again = next(effect for effect in all_of(SetTimer, first) if effect.timer is JobTimer.CHECKPOINT_DUE)
    assert again.due_at == story.now + 5.0
    assert not all_of(saving.BeginCheckpoint, story.timer(again))
    assert not story.timer(due)  # an old timer


def test_one_that_could_not_be_written_is_dropped_and_the_kept_ones_stay() -> None:
    story = Story("a")
    story.starts("a")
    for number, written in ((1, True), (2, False)):
        asked(story, f"c{number}")
        saves(story, "a", number)
        if written:
            story.happen(saving.CheckpointTaken, number, 1000, 0.5)
        else:
            assert (
                the(saving.DropCheckpoint, story.happen(saving.CheckpointFailed, number, "disk full")).checkpoint == 2
            )
    assert [kept.number for kept in story.core.state.checkpoints.retained] == [1]


def test_one_that_was_open_when_the_synchroniser_died_is_dropped_even_if_its_seal_is_heard_of_later() -> None:
    story = Story("a")
    story.starts("a")
    asked(story)
    saves(story, "a")
    assert the(saving.DropCheckpoint, story.happen(events.SynchroniserRestarted, 2)).checkpoint == 1
    assert the(saving.DropCheckpoint, story.happen(saving.CheckpointTaken, 1, 1000, 0.5)).checkpoint == 1
    assert story.core.state.checkpoints.retained == ()


def test_a_job_that_ends_waits_for_no_checkpoint() -> None:
    story = Story("a", token_budget=200)
    story.starts("a")
    asked(story)
    ending = story.trains("a", tokens=100)
    assert all_of(FlushIsland, ending)
    dropped = all_of(saving.DropCheckpoint, ending)
    assert [effect.reason for effect in dropped] == ["the job is ending"]
    assert not story.core.state.checkpoints.open
    cancelled = Story("a")
    cancelled.starts("a")
    asked(cancelled)
    over = cancelled.command("x", commands.Cancel())
    assert the(saving.DropCheckpoint, over).checkpoint == 1
    assert isinstance(over[-1], FinishJob)


def test_an_island_that_drains_saves_its_state_too_and_one_that_has_flushed_has_none() -> None:
    story = Story("ab")
    story.starts("a", "b")
    story.command("d", commands.Drain("b"))
    assert story.island("b").state == IslandState.DRAINING
    assert the(saving.BeginCheckpoint, asked(story)).islands == (("a", 1), ("b", 1))


def test_after_some_failures_in_a_row_the_schedule_waits_longer_and_longer_and_a_request_does_not() -> None:
    story = Story("a", checkpoints=CheckpointPolicy(every_s=10.0))
    due = SetTimer(JobTimer.CHECKPOINT_DUE, story.core.state.checkpoints.due_serial, 10.0)
    story.starts("a")
    begun_at: list[float] = []
    for _ in range(100):
        effects = story.timer(due)
        due = next(effect for effect in all_of(SetTimer, effects) if effect.timer is JobTimer.CHECKPOINT_DUE)
        for begun in all_of(saving.BeginCheckpoint, effects):
            begun_at.append(story.now)
            failed = story.happen(saving.CheckpointFailed, begun.checkpoint, "not writable")
            assert the(saving.DropCheckpoint, failed).reason == "not writable"
    pauses = [after - before for before, after in pairwise(begun_at)]
    assert pauses == [10.0, 10.0, BACK_OFF_S, 2 * BACK_OFF_S, 4 * BACK_OFF_S, 8 * BACK_OFF_S]
    checkpoints, count = story.core.state.checkpoints, len(begun_at)
    assert (checkpoints.failures, checkpoints.failures_in_a_row, checkpoints.failure) == (count, count, "not writable")
    number = the(saving.BeginCheckpoint, asked(story)).checkpoint
    saves(story, "a", number)
    story.happen(saving.CheckpointTaken, number, 1000, 0.5)
    checkpoints = story.core.state.checkpoints
    assert (checkpoints.failures, checkpoints.failures_in_a_row, checkpoints.failure) == (count, 0, "")
    assert (checkpoints.taken_at, checkpoints.byte_count) == (story.now - 0.5, 1000)
    assert all_of(saving.BeginCheckpoint, story.timer(due)), "the schedule holds again"


def test_checkpoints_by_merges_wait_as_well_and_the_end_of_a_job_is_no_failure() -> None:
    story = Story("a", checkpoints=CheckpointPolicy(every_merges=1))
    story.starts("a")
    attempts = 0
    for version in range(1, 8):
        story.offers_fragment("a", 0)
        for begun in all_of(saving.BeginCheckpoint, story.merges(0, version)):
            attempts += 1
            story.reports("a", 1, NotSaved(begun.checkpoint, "its disk is full"))
    assert attempts == FAILURES_AT_ONCE
    assert story.core.state.checkpoints.failure == "no island saved its state (a: its disk is full)"
    story.wait(BACK_OFF_S)
    assert all_of(saving.BeginCheckpoint, story.offers_fragment("a", 0)), "it is overdue"
    story.command("c9", commands.Cancel())
    assert story.core.state.checkpoints.failures == FAILURES_AT_ONCE


# ── upgrades ──────────────────────────────────────────────────────────────────────────────────────────────────────────

UPGRADE = commands.Upgrade("0.2.0_w1", "/opt/atoll-0.2.0/bin/python")


def test_an_upgrade_hands_over_once_its_checkpoint_is_complete_and_is_answered_then() -> None:
    story = Story("ab")
    story.starts("a", "b")
    begun = story.command("up", UPGRADE)
    assert the(saving.BeginCheckpoint, begun).checkpoint == 1
    assert not all_of(ResolveCommand, begun)
    saves(story, "a")
    saves(story, "b")
    taken = story.happen(saving.CheckpointTaken, 1, 1000, 0.5)
    assert the(ResolveCommand, taken).accepted
    assert the(saving.HandOver, taken) == saving.HandOver("up", UPGRADE.build, UPGRADE.python)
    assert not all_of(saving.HandOver, story.happen(saving.CheckpointTaken, 1, 1000, 0.5)), "a repeated event"


def test_an_upgrade_waits_for_the_checkpoint_that_is_being_taken_and_is_the_only_one() -> None:
    story = Story("a")
    story.starts("a")
    asked(story)
    assert not story.command("up", UPGRADE)
    assert "it is being upgraded already" in the(ResolveCommand, story.command("again", UPGRADE)).detail
    saves(story, "a")
    assert the(saving.HandOver, story.happen(saving.CheckpointTaken, 1, 1000, 0.5)).command == "up"


@pytest.mark.parametrize("how", ["it fails", "the synchroniser dies", "the job is cancelled", "it goes back"])
def test_an_upgrade_whose_checkpoint_comes_to_nothing_is_refused_with_the_reason(how: str) -> None:
    story = Story("a")
    story.starts("a")
    asked(story, "c0")
    saves(story, "a")
    story.happen(saving.CheckpointTaken, 1, 1000, 0.5)
    story.command("up", UPGRADE)
    effects = {
        "it fails": lambda: story.happen(saving.CheckpointFailed, 2, "disk full"),
        "the synchroniser dies": lambda: story.happen(events.SynchroniserRestarted, 2),
        "the job is cancelled": lambda: story.command("x", commands.Cancel()),
        "it goes back": lambda: story.command("back", commands.Rollback(0)),
    }[how]()
    (refused,) = [one for one in all_of(ResolveCommand, effects) if one.command == "up"]
    assert not refused.accepted
    assert "the job is not upgraded: checkpoint 2 failed: " in refused.detail
    assert not all_of(saving.HandOver, story.happen(saving.CheckpointTaken, 2, 1000, 0.5))
    assert story.core.state.upgrade is None


def test_a_job_whose_islands_are_all_away_or_that_has_ended_is_not_upgraded() -> None:
    story = Story("a")
    assert "no island trains" in the(ResolveCommand, story.command("up", UPGRADE)).detail
    story.starts("a")
    story.command("x", commands.Cancel())
    assert "the job is finished" in the(ResolveCommand, story.command("late", UPGRADE)).detail
