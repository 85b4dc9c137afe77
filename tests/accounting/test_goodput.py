"""Every island-second in one class, and the classes add up to the time the island was wanted."""

from __future__ import annotations

from dataclasses import replace
from math import fsum, isclose
from random import Random

import pytest

from orchestrator.accounting.goodput import forecast
from orchestrator.accounting.island_time import AWAY, EVALUATING, NOT_STEPPING
from orchestrator.core import commands
from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.messages import Flushed, Progress
from orchestrator.core.vocabulary import Price
from orchestrator.tape.codec import parse_timer

from .dictation import POLICY, Dictation


def _only(seconds, **expected):
    given = {name: spent for name, spent in seconds.items() if abs(spent) > 1e-9}
    assert given == pytest.approx(expected)


def test_the_first_start_is_starting_and_a_later_one_recovering():
    story = Dictation().place(0.0).placed(1.0).ready(3.0).caught_up(4.0).died(4.0)
    _only(story.seconds(), starting=4.0)
    story.place(6.0, incarnation=2).placed(7.0, incarnation=2)
    _only(story.seconds(at=9.0), starting=4.0, down=2.0, recovering=3.0)


def test_causes_name_the_phase():
    story = Dictation().place(0.0).placed(1.0).ready(3.0).caught_up(4.0)
    assert story.goodput.summary()["badput_seconds"] == {
        "starting: compiling": 2.0,
        "starting: catching up": 1.0,
        "starting: placing": 1.0,
    }


def test_training_without_stepping_is_stalled():
    story = Dictation().train_from(0.0).progress(10.0, tokens=100, stepping=7.0)
    _only(story.seconds(), in_flight=7.0, stalled=3.0)


def test_stepping_is_split_as_its_tokens_are():
    story = Dictation().train_from(0.0).progress(10.0, tokens=100, stepping=10.0)
    c = story.contribution(60, total=100)
    story.admit(10.0, c).close(10.0, c).merged(10.0, c).adopted(10.0, total=100)
    _only(story.seconds(), productive=3.0, discarded=2.0, in_flight=5.0)
    story.finish(10.0)
    _only(story.seconds(), productive=3.0, discarded=7.0)


@pytest.mark.parametrize(("of_routers", "expected"), [(100, 0.1), (0, 0.0)])
def test_routers_apart_count_by_their_part_of_the_parameters(of_routers, expected):
    """Fragment 0 is the rest, of which nothing has merged; the routers, fragment 1, have merged all but the last tokens."""
    policy = replace(POLICY, sync_interval_steps=24, router_interval_steps=6)
    story = Dictation(policy).tell(e.OuterStateSeeded(0.0, 1000, "digest", of_routers)).train_from(0.0)
    story.progress(10.0, tokens=100, stepping=10.0)
    c = story.contribution(80, total=80, fragment=1)
    story.admit(10.0, c).close(10.0, c).merged(10.0, c).adopted(10.0, total=80, fragment=1)
    assert story.tokens() == pytest.approx(
        {"trained": 100, "merged": 80 * expected, "discarded": 0, "in_flight": 100 - 80 * expected}
    )
    story.finish(10.0)
    _only(story.seconds(), discarded=10.0 - 8.0 * expected, **({"productive": 8.0 * expected} if expected else {}))
    assert sum(story.goodput.summary()["discarded_tokens"].values()) == pytest.approx(100 - 80 * expected)


def test_a_fragment_counts_as_any_other_where_routers_are_merged_with_the_rest():
    """A simulation of a tape that has routers apart, without them, still knows how large they are."""
    story = Dictation().tell(e.OuterStateSeeded(0.0, 1000, "digest", 100)).train_from(0.0)
    story.progress(10.0, tokens=100, stepping=10.0)
    c = story.contribution(80, total=80, fragment=1)
    story.admit(10.0, c).close(10.0, c).merged(10.0, c)
    assert story.tokens()["merged"] == 40.0


def test_what_an_island_did_not_report_before_it_died_is_discarded():
    story = Dictation().train_from(0.0).progress(10.0, tokens=100, stepping=9.0).died(10.5)
    _only(story.seconds(), discarded=9.5, stalled=1.0)


def test_a_silent_island_is_down_unless_it_turns_out_to_have_stepped():
    story = Dictation().train_from(0.0).progress(10.0, tokens=100, stepping=10.0)
    story.tell(e.ConnectionLost(10.0, "east", 1, False, "no answer"))
    _only(story.seconds(at=14.0), in_flight=10.0, down=4.0)
    story.tell(e.ConnectionRestored(14.0, "east", 1)).progress(14.0, tokens=130, stepping=13.0)
    _only(story.seconds(), in_flight=13.0, down=1.0)


def test_a_process_that_was_stopped_in_the_middle_of_a_step_did_not_step():
    story = Dictation().train_from(0.0).progress(2.0, tokens=20, stepping=2.0)
    story.progress(11.0, tokens=30, stepping=11.0, step_s=0.1, gap=8.1, loss=3.0)
    # 90 steps of 0.1 s would fill the 9 s reported, so nothing was frozen there; in the next report 8 s were
    _only(story.seconds(), in_flight=11.0)
    frozen = e.IslandReported(20.0, "east", 1, Progress(120, 120, 40, 20.0, 0.1, 8.1, 3.0))
    story.tell(frozen)
    _only(story.seconds(), in_flight=12.0, stalled=8.0)


def test_time_kept_away_by_an_operator_is_not_counted():
    story = Dictation().train_from(0.0)
    asked = e.CommandRequested(1.0, "c1", "me", commands.Kill("east", False))
    story.tell(asked, f.ResolveCommand("c1", True, "yes"), f.KillIsland("east", 1, "killed"))
    story.tell(e.ConnectionLost(1.0, "east", 1, True, "killed"))
    _only(story.seconds(at=50.0), discarded=1.0)
    readd = e.CommandRequested(60.0, "c2", "me", commands.Readd("east"))
    story.place(60.0, incarnation=2, event=readd)
    _only(story.seconds(at=61.0), discarded=1.0, recovering=1.0)


def test_a_command_that_was_not_accepted_changes_nothing():
    story = Dictation().train_from(0.0)
    story.tell(e.CommandRequested(1.0, "c1", "me", commands.Kill("east", False)), f.ResolveCommand("c1", False, "no"))
    story.tell(e.ConnectionLost(2.0, "east", 1, True, "crash"), f.SetTimer(parse_timer("backoff:east"), 1, 3.0))
    _only(story.seconds(at=5.0), down=3.0, discarded=2.0)


def test_the_wait_for_the_end_is_stalled_and_named():
    story = Dictation().train_from(0.0).progress(5.0, tokens=50, stepping=5.0)
    story.tell(e.IslandReported(5.0, "east", 1, Flushed())).finish(7.0)
    assert story.seconds()["stalled"] == 2.0
    assert story.goodput.summary()["badput_seconds"]["waiting for the job to end"] == 2.0


def test_nothing_is_counted_after_the_end():
    story = Dictation().train_from(0.0).finish(5.0)
    before = story.goodput.summary()
    story.progress(9.0, tokens=50, stepping=5.0)
    assert story.goodput.summary(at=100.0) == before


def test_the_ratio_is_weighted_by_accelerators_and_the_seconds_are_not():
    wide = replace(POLICY, islands=(replace(POLICY.islands[0], accelerator_count=3), POLICY.islands[1]))
    story = Dictation(wide).train_from(0.0).train_from(0.0, "west")
    story.progress(10.0, tokens=100, stepping=10.0)
    for fragment in (0, 1):
        c = story.contribution(100, total=100, fragment=fragment)
        story.admit(10.0, c).close(10.0, c).merged(10.0, c)
    summary = story.goodput.summary()
    assert summary["island_seconds"]["productive"] == 10.0
    assert summary["island_seconds"]["total"] == 20.0
    assert summary["goodput_ratio"] == 0.75


def test_uptime_is_the_share_of_time_with_a_quorum_training():
    story = Dictation().place(0.0).placed(1.0).ready(1.0).caught_up(2.0).died(6.0)
    assert story.goodput.summary(at=8.0)["uptime_ratio"] == 0.5
    story.train_from(8.0, incarnation=2)
    story.tell(e.TimerFired(16.0, "x", 1), f.FlushIsland("east", 2)).finish(40.0)
    assert story.goodput.summary()["uptime_ratio"] == 0.75


def test_badput_and_classes_tell_the_same_sum():
    story = Dictation().train_from(0.0).train_from(0.0, "west").progress(10.0, tokens=100, stepping=8.0)
    c = story.contribution(60, total=100)
    story.admit(10.0, c).close(10.0, c).merged(10.0, c).adopted(10.0, total=100).died(11.0).finish(20.0)
    summary = story.goodput.summary()
    classes = dict(summary["island_seconds"])
    total = classes.pop("total")
    assert isclose(fsum(classes.values()), total)
    assert total == 40.0
    assert isclose(fsum(summary["badput_seconds"].values()), total - classes["productive"] - classes["in_flight"])


def test_the_time_in_which_an_island_measures_is_stalled_and_named_once():
    story = Dictation().train_from(0.0).progress(10.0, 100, 7.0)
    measured = e.EvaluationCompleted(10.0, 5, 2.0, 24, 2.0, "east", "", "east", 1)
    story.tell(measured).tell(measured)
    island = story.goodput.summary()["islands"]["east"]
    assert island["badput_seconds"] == {EVALUATING: pytest.approx(2.0), NOT_STEPPING: pytest.approx(1.0)}
    assert island["seconds"]["stalled"] == pytest.approx(3.0)


# ── in money ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def priced(price, other=None):
    east, west = POLICY.islands
    return replace(POLICY, token_budget=1000, islands=(replace(east, price=price), replace(west, price=other)))


def test_the_cost_is_the_time_of_every_class_and_badput_has_its_part():
    story = Dictation(priced(Price(36.0))).train_from(0.0).progress(10.0, tokens=100, stepping=7.0)
    cost = story.goodput.summary()["cost"]
    assert cost["so_far"] == pytest.approx(0.1)  # 10 s at a cent a second
    assert cost["badput"] == pytest.approx({NOT_STEPPING: 0.03})
    assert (cost["node_groups"], cost["unpriced"]) == (pytest.approx({"east": 0.1}), ["west"])


@pytest.mark.parametrize(("kind", "paid_s"), [("on_demand", 5.0), ("spot", 5.0), ("reserved", 11.0)])
def test_an_island_without_a_process_costs_only_on_reserved_machines(kind, paid_s):
    story = Dictation(priced(Price(3600.0, "EUR", kind))).train_from(0.0).died(4.0)
    story.place(10.0, incarnation=2)
    cost = story.goodput.summary(11.0)["cost"]
    assert cost["so_far"] == pytest.approx(paid_s)
    assert (AWAY in cost["badput"]) == (kind == "reserved")
    assert cost["currency"] == "EUR"


def test_the_cost_of_a_million_merged_tokens_counts_what_was_never_merged():
    story = Dictation(priced(Price(3600.0))).train_from(0.0).progress(10.0, tokens=100, stepping=10.0)
    c = story.contribution(60, total=100)
    story.admit(10.0, c).close(10.0, c).merged(10.0, c)
    figures = story.goodput.summary()
    merged = figures["tokens"]["merged"]
    assert figures["cost"]["per_merged_million_tokens"] == pytest.approx(10.0 / merged * 1e6)


def test_without_prices_there_is_no_cost():
    assert "cost" not in Dictation().train_from(0.0).goodput.summary()


def test_a_forecast_at_an_even_pace_is_exact_and_has_no_spread():
    pace = [(100 * n, 10.0 * n) for n in range(6)]
    assert forecast(5.0, 0.1, 500, pace) == pytest.approx({"expected": 10.0, "low": 10.0, "high": 10.0})


def test_a_forecast_of_few_stretches_says_that_its_spread_is_unknown():
    assert forecast(5.0, 0.1, 500, [(0, 0.0), (100, 10.0)]) == {"expected": 10.0, "low": None, "high": None}
    assert forecast(5.0, 0.1, 500, [(0, 0.0)]) is None


def test_a_forecast_holds_what_came_in_nearly_all_of_many_jobs():
    chance, inside = Random(7), 0
    for _ in range(400):
        steps = [chance.expovariate(0.1) for _ in range(400)]
        pace = [(100 * n, fsum(steps[:n])) for n in range(41)]
        expected = forecast(0.0, 1.0, 100 * 360, pace)
        inside += expected["low"] <= fsum(steps[40:]) <= expected["high"]
    assert 0.85 < inside / 400 < 0.99


def test_an_ended_job_has_no_forecast():
    story = Dictation(priced(Price(3600.0))).train_from(0.0)
    for n in range(1, 7):
        story.progress(10.0 * n, tokens=100 * n, stepping=10.0 * n)
        c = story.contribution(100, total=100 * n, offer=n, base=n - 1)
        story.admit(10.0 * n, c).close(10.0 * n, c, version=n).merged(10.0 * n, c, version=n)
    found = story.goodput.summary()["cost"]["forecast"]
    assert found["expected"] == pytest.approx(100.0)  # 600 of 1,000 tokens for 60
    story.finish(60.0)
    assert story.goodput.summary()["cost"]["forecast"] is None
