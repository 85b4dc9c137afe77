"""Merges, recoveries, gaps and curves, as told by small stories."""

from __future__ import annotations

from itertools import pairwise

import pytest

from orchestrator.accounting.report import build
from orchestrator.accounting.series import Series
from orchestrator.core import commands
from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.vocabulary import CloseReason, RefusalReason
from orchestrator.host.state_view import core_status
from orchestrator.simulation.plan import Fault, FaultKind, WorldPlan, sample_policy
from orchestrator.simulation.world import World
from orchestrator.tape.codec import parse_timer

from .dictation import POLICY, Dictation


def _kill_and_return(story, killed_at=10.0):
    command = e.CommandRequested(killed_at, "c", "me", commands.Kill("east", True))
    story.tell(command, f.ResolveCommand("c", True, "yes"), f.KillIsland("east", 1, "killed"))
    story.died(10.5).place(12.0, incarnation=2).placed(13.0, incarnation=2).ready(16.0, incarnation=2)
    story.caught_up(18.0, incarnation=2, versions=(3, 3), transfer=0.5)
    c = story.contribution(40, total=40, base=3, incarnation=2)
    return story.admit(19.0, c).close(19.5, c, version=4).merged(20.0, c, version=4)


def test_a_recovery_has_all_its_parts_and_they_add_up():
    story = _kill_and_return(Dictation().train_from(0.0))
    (recovery,) = story.statistics.summary()["recoveries"]
    assert recovery["parts"] == {
        "detect": 0.5,
        "place": 2.5,
        "start": 3.0,
        "connect": 1.5,
        "transfer": 0.5,
        "first_merge": 2.0,
    }
    assert recovery["total"] == sum(recovery["parts"].values()) == 10.0
    assert story.statistics.summary()["recovery_s"]["total"] == 10.0


def test_a_recovery_has_the_longest_gap_of_the_others_while_it_lasted():
    story = Dictation().train_from(0.0).train_from(0.0, "west").progress(9.0, 9, 9.0, "west", gap=3.0)
    assert story.died(10.5).statistics.summary()["recoveries"][0]["others_gap_max_s"] is None
    story.progress(11.0, 10, 10.0, "west", gap=0.4).progress(12.0, 11, 11.0, "west", gap=0.9)
    story.place(13.5, incarnation=2).placed(14.0, incarnation=2).ready(16.0, incarnation=2)
    story.caught_up(18.0, incarnation=2, versions=(3, 3), transfer=0.5).progress(18.5, 41, 1.0, incarnation=2, gap=7.0)
    c = story.contribution(40, total=40, base=3, incarnation=2)
    story.admit(19.0, c).close(19.5, c, version=4).merged(20.0, c, version=4).progress(21.0, 20, 20.0, "west", gap=5.0)
    assert story.statistics.summary()["recovery_s"]["others_gap_max_s"] == 0.9


def test_without_a_command_a_recovery_begins_at_the_last_report():
    story = Dictation().train_from(0.0).progress(9.8, tokens=10, stepping=9.0).died(10.0)
    (recovery,) = story.statistics.summary()["recoveries"]
    assert recovery["parts"] == {"detect": pytest.approx(0.2)}
    assert not recovery["complete"]
    assert story.statistics.summary()["recovery_s"] is None


def test_work_of_the_former_life_completes_no_recovery():
    story = Dictation().train_from(0.0)
    old = story.contribution(10, total=10)
    story.admit(1.0, old).died(2.0).train_from(3.0, incarnation=2).close(4.0, old).merged(5.0, old)
    assert not story.statistics.summary()["recoveries"][0]["complete"]


def test_an_attempt_that_fails_on_the_way_is_part_of_placing():
    story = Dictation().train_from(0.0).died(10.0).place(11.0, incarnation=2)
    story.tell(e.PlacementFailed(12.0, "east", 2, "no room"), f.SetTimer(parse_timer("backoff:east"), 2, 14.0))
    story.place(14.0, incarnation=3).placed(15.0, incarnation=3)
    (recovery,) = story.statistics.summary()["recoveries"]
    assert recovery["parts"] == {"detect": 0.0, "place": 5.0}
    assert (recovery["incarnation"], recovery["attempts"]) == (3, 2)


def test_the_end_of_the_job_is_no_loss():
    assert Dictation().train_from(0.0).finish(5.0).statistics.summary()["recoveries"] == []


def test_survivors_are_those_that_were_never_away():
    story = Dictation().train_from(0.0).train_from(0.0, "west")
    story.progress(1.0, 10, 1.0, gap=0.9).progress(1.0, 10, 1.0, island="west", step_s=0.2, gap=0.25)
    story.tell(e.ConnectionLost(2.0, "east", 1, False, "silent"))
    summary = story.statistics.summary()
    assert summary["survivors"] == ["west"]
    assert summary["survivor_gap_max_s"] == 0.25
    assert summary["survivor_step_time_median_s"] == 0.2
    assert summary["step_time_median_s"] == pytest.approx(0.15)


def test_merges_are_counted_with_their_contributors_reasons_and_waits():
    story = Dictation().train_from(0.0).train_from(0.0, "west")
    a, b = story.contribution(10, total=10), story.contribution(10, total=10, island="west")
    story.admit(1.0, a).admit(1.25, b).close(1.5, a, b, reason=CloseReason.EVERYONE_IN).merged(1.75, a, b)
    c = story.contribution(10, total=20, fragment=1)
    story.admit(2.0, c).close(3.0, c).merged(3.1, c)
    story.refuse(3.2, story.contribution(10, total=20, fragment=1, island="west"), RefusalReason.LATE)
    summary = story.statistics.summary()
    assert summary["merges"] == 2
    assert summary["contributors_mean"] == 1.5
    assert summary["merges_per_fragment"] == [1, 1]
    assert summary["merges_per_island"] == {"east": 2, "west": 1}
    assert summary["refusals"] == {"late": 1}
    waits = {row["reason"]: row["waited_mean_s"] for row in summary["close_reasons"]}
    assert waits == {"everyone_in": 0.5, "grace_over": 1.0}


def test_a_merge_reported_twice_counts_once():
    story = Dictation().train_from(0.0)
    c = story.contribution(10, total=10)
    story.admit(1.0, c).close(1.5, c).merged(1.75, c).merged(1.8, c)
    assert story.statistics.summary()["merges"] == 1


def test_the_loss_curve_is_against_the_tokens_of_all_islands_and_lives():
    story = Dictation().train_from(0.0).train_from(0.0, "west")
    story.progress(1.0, 100, 1.0).progress(1.0, 50, 1.0, island="west")
    story.tell(e.EvaluationCompleted(1.5, 3, 4.5))
    story.died(2.0).train_from(3.0, incarnation=2).progress(4.0, 30, 1.0, incarnation=2)
    story.tell(e.EvaluationCompleted(5.0, 6, 3.5))
    summary = story.statistics.summary()
    assert summary["loss_curve"] == [[150.0, 4.5, 1.5], [180.0, 3.5, 5.0]]
    assert summary["loss_final"] == 3.5


def test_a_loss_counts_for_the_tokens_at_which_its_parameters_were_current_and_the_first_is_the_initial_one():
    story = Dictation().tell(e.OuterStateSeeded(0.0, 1000, "d"), f.Evaluate(0)).train_from(0.0)
    story.progress(1.0, 100, 1.0).tell(e.EvaluationCompleted(1.5, 0, 5.5))  # it took until others had trained
    c = story.contribution(10, total=10)
    story.admit(2.0, c).close(2.5, c).tell(e.MergeCompleted(3.0, 0, 1, "d", 0.01), f.Evaluate(1))
    story.progress(4.0, 180, 1.0).tell(e.EvaluationCompleted(5.0, 1, 3.5))
    summary = story.statistics.summary()
    assert summary["loss_curve"] == [[0.0, 5.5, 1.5], [100.0, 3.5, 5.0]]
    assert (summary["loss_initial"], summary["loss_final"]) == (5.5, 3.5)


def test_a_job_that_was_not_measured_at_its_start_has_no_initial_loss():
    story = Dictation().train_from(0.0)
    c = story.contribution(10, total=10)
    story.admit(1.0, c).close(1.5, c).tell(e.MergeCompleted(1.75, 0, 1, "d", 0.01), f.Evaluate(1))
    summary = story.tell(e.EvaluationCompleted(2.0, 1, 4.0)).statistics.summary()
    assert (summary["loss_initial"], summary["loss_final"]) == (None, 4.0)


def test_the_timeline_covers_each_island_without_holes():
    story = _kill_and_return(Dictation().train_from(0.0)).finish(30.0)
    spans = [span for span in story.statistics.summary()["timeline"] if span[0] == "east"]
    assert spans[0][1] == 0.0
    assert spans[-1][2] == 30.0
    assert all(before[2] == after[1] for before, after in pairwise(spans))
    assert [span[3] for span in spans] == [
        "training",
        "lost",
        "placing",
        "starting",
        "catching_up",
        "training",
    ]


def test_a_series_stays_short_and_keeps_both_ends():
    series = Series(16)
    for n in range(1000):
        series.add(n)
    assert len(series.points) < 16
    kept = series.all()
    assert (kept[0], kept[-1]) == (0, 999)
    steps = {b - a for a, b in pairwise(kept[:-1])}
    assert len(steps) == 1


def test_the_report_has_every_name_that_users_were_promised():
    story = _kill_and_return(Dictation().train_from(0.0)).finish(30.0)
    report = build(POLICY, story.goodput, story.statistics, {"job_id": "j1", "loss_unigram": 3.1})
    promised = {
        "loss_final",
        "loss_unigram",
        "tokens_trained",
        "tokens_merged",
        "goodput_ratio",
        "island_seconds",
        "step_time_median_s",
        "survivor_gap_max_s",
        "recovery_s",
        "merges",
        "contributors_mean",
    }
    assert promised <= report.keys()
    assert report["loss_unigram"] == 3.1
    assert set(report["recovery_s"]) >= {"detect", "place", "start", "connect", "transfer", "first_merge", "total"}


def test_only_incarnations_that_failed_are_failures_not_those_that_left_after_a_notice():
    """The real core in the simulated world: some islands die, others are told in time that their node goes."""
    weather = [
        Fault(2.0, FaultKind.NOTICE, "asia", duration=10.0),
        Fault(3.0, FaultKind.CRASH, "europe"),
        Fault(12.0, FaultKind.NOTICE, "asia", duration=10.0),
        Fault(13.0, FaultKind.CRASH, "europe"),
        Fault(14.0, FaultKind.NOTICE, "us-west", duration=0.1),  # too short to hand over its work
        Fault(22.0, FaultKind.CRASH, "asia"),
    ]
    world = World(sample_policy(4, steps=1000), WorldPlan((0.05,) * 4, faults=tuple(weather)), seed=3).run(until=40.0)
    restarts = {island.island: island.restarts for island in core_status(world.core.state, world.now).islands}
    assert restarts == {"us-east": 0, "us-west": 1, "europe": 2, "asia": 3}
    assert world.statistics.summary()["failures"] == {"asia": 1, "europe": 2}
