"""Speeds and capacities of simulated islands do what the plan says, and a plan that says nothing of them changes nothing."""

from __future__ import annotations

from itertools import pairwise

import pytest

from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.messages import Adopted, Flushed, Progress
from orchestrator.core.vocabulary import IslandId
from orchestrator.simulation.distributions import Empirical
from orchestrator.simulation.plan import Capacity, Fault, FaultKind, IncarnationStart, Pace, WorldPlan, sample_policy
from orchestrator.simulation.world import World
from orchestrator.tape.codec import name_of
from orchestrator.tape.replay import replay
from tests.harness.reports import of_kind

ASIA, EUROPE = IslandId("asia"), IslandId("europe")
STEADY = {"step_s": (0.05,) * 4, "step_jitter_ratio": 0.0}


def _run(steps=160, **changes):
    return World(sample_policy(4, steps=steps), WorldPlan(**{**STEADY, **changes}), seed=3, checked=False).run()


def _reports(world, island, since=0.0, until=float("inf")):
    reports = of_kind((record.event for record in world.sink.records), Progress)
    return [report for report in reports if report.island == island and since < report.at < until]


def _tokens_per_step(world, island, since, until):
    reports = _reports(world, island, since, until)
    steps = reports[-1].steps_total - reports[0].steps_total
    return (reports[-1].tokens_total - reports[0].tokens_total) / steps


def test_half_the_capacity_is_half_the_tokens_of_each_step_until_it_changes_again():
    world = _run(capacity=(Capacity(4.0, ASIA, 0.5), Capacity(7.0, ASIA, 1.0)))
    assert _tokens_per_step(world, ASIA, 1.0, 4.0) == 512
    assert _tokens_per_step(world, ASIA, 4.1, 7.0) == 256
    assert _tokens_per_step(world, ASIA, 7.1, 9.0) == 512
    assert _tokens_per_step(world, EUROPE, 4.1, 7.0) == 512


def test_an_island_without_capacity_stands_still_answers_and_goes_on_where_it_was():
    world = _run(capacity=(Capacity(4.01, ASIA, 0.0), Capacity(7.03, ASIA, 1.0)))
    assert not _reports(world, ASIA, 4.1, 7.0)
    assert _reports(world, EUROPE, 4.1, 7.0)
    assert not any(isinstance(record.event, e.ConnectionLost) for record in world.sink.records)
    reports = _reports(world, ASIA)
    assert max(report.gap_max_seconds for report in reports) == pytest.approx(3.02 + 0.05)
    idle = [b.at - a.at - (b.stepping_seconds - a.stepping_seconds) for a, b in pairwise(reports)]
    assert max(idle) == pytest.approx(3.02, abs=0.01)


@pytest.mark.parametrize(("step_s", "times"), [(2.5, (4.2, 4.5, 4.7, 5.1)), (0.05, (4.0, 4.3, 4.31, 4.6))])
def test_time_that_an_island_stood_still_is_added_once(step_s, times):
    """Two stops within one step, and two with steps between them."""
    a, b, c, d = times
    stops = (Capacity(a, ASIA, 0.0), Capacity(b, ASIA, 1.0), Capacity(c, ASIA, 0.0), Capacity(d, ASIA, 1.0))
    world = _run(capacity=stops, step_s=(0.05, 0.05, 0.05, step_s))
    reports = _reports(world, ASIA)
    first, last = reports[0], next(report for report in reports if report.at > 6.0)
    assert first.at < 4.0
    stood = (last.at - first.at) - (last.stepping_seconds - first.stepping_seconds)
    assert stood == pytest.approx((b - a) + (d - c), abs=0.004)  # letters take up to 3 ms


def test_an_island_that_stands_still_gives_its_work_when_the_job_ends():
    world = _run(capacity=(Capacity(8.0, ASIA, 0.0),), steps=200)
    flushed = of_kind((record.event for record in world.sink.records), Flushed)
    assert {event.island for event in flushed} == {"us-east", "us-west", "europe", "asia"}
    assert world.goodput.summary()["discarded_tokens"].get("unmerged when the job ended", 0.0) < 20 * 512


def test_an_island_killed_while_it_stands_still_begins_when_it_may():
    faults = (Fault(5.0, FaultKind.KILL, ASIA),)
    world = _run(capacity=(Capacity(4.0, ASIA, 0.0), Capacity(9.0, ASIA, 1.0)), faults=faults, steps=300)
    placed = [r.event for r in world.sink.records if isinstance(r.event, e.IslandPlaced) and r.event.island == ASIA]
    assert [event.incarnation for event in placed] == [1, 2]
    assert min(report.at for report in _reports(world, ASIA) if report.incarnation == 2) > 9.0


def test_steps_take_what_was_sampled():
    world = _run(step_samples=((0.05,), (0.05,), (0.05,), (0.02, 0.08)))
    told = {round(report.step_seconds_median, 6) for report in _reports(world, ASIA)}
    assert told == {0.02, 0.08}
    assert {round(report.step_seconds_median, 6) for report in _reports(world, EUROPE)} == {0.05}


def test_while_a_pace_lasts_steps_take_what_was_recorded():
    world = _run(paces=((), (), (), (Pace(3.0, 6.0, 0.1, 0.02),)))
    assert {round(x.step_seconds_median, 6) for x in _reports(world, ASIA, 3.2, 6.0)} == {0.1}
    assert {round(x.step_seconds_median, 6) for x in _reports(world, ASIA, 6.3)} == {0.05}
    slow = _reports(world, ASIA, 3.2, 6.0)
    steps = slow[-1].steps_total - slow[0].steps_total
    assert (slow[-1].at - slow[0].at) / steps == pytest.approx(0.12, abs=0.002)


def test_pauses_are_time_in_which_an_island_is_alive_and_does_not_step():
    world = _run(pause_s=(0.0, 0.0, 0.0, 0.0125))
    seconds = world.goodput.summary()["islands"][ASIA]["badput_seconds"]["alive, not stepping"]
    steps = _reports(world, ASIA)[-1].steps_total
    assert seconds == pytest.approx(steps * 0.0125, rel=0.1)


def test_a_payload_takes_its_bytes_over_the_bandwidth_each_way():
    slow = _run(payload_bytes=1_000_000, bandwidth_bytes_per_s=(1e7,) * 4)
    lags = {"slow": _lags(slow), "fast": _lags(_run())}
    assert lags["slow"]["pull"] - lags["fast"]["pull"] == pytest.approx(0.1, abs=0.01)
    later = lags["slow"]["adoption"] - lags["fast"]["adoption"]
    assert 0.09 < later < 0.2, later  # its letter may wait behind a pull


def _lags(world):
    """Mean time from a report to the contribution told with it, and from a publication to its adoption."""
    pulls, adoptions, reported, published = [], [], {}, {}
    for record in world.sink.records:
        event = record.event
        report = e.report_of(event)
        if isinstance(report, Progress):
            reported[event.island] = event.at, report.tokens_total
        elif isinstance(event, e.ContributionArrived) and event.displacement is not None:  # not without its bytes
            reported_at, tokens_total = reported[event.contribution.island]
            if tokens_total == event.contribution.tokens_total:
                pulls.append(event.at - reported_at)
        elif isinstance(report, Adopted) and (report.fragment, report.version) in published:
            adoptions.append(event.at - published[report.fragment, report.version])
        for effect in record.effects:
            if isinstance(effect, f.PublishFragment):
                published.setdefault((effect.fragment, effect.version), event.at)
    return {"pull": sum(pulls) / len(pulls), "adoption": sum(adoptions) / len(adoptions)}


def test_a_recorded_life_starts_as_it_was_recorded():
    recorded = IncarnationStart(ASIA, 1, place_s=2.0, start_s=3.0, transfer_s=0.5, begin_s=0.25)
    world = _run(lives=(recorded, IncarnationStart(EUROPE, 1, place_s=0.1, placement_fails=True)))
    at = {}
    for record in world.sink.records:
        if getattr(record.event, "island", None) == ASIA:
            at.setdefault(name_of(record.event), record.event.at)
    assert at["IslandPlaced"] == pytest.approx(2.0)
    assert at["IslandReady"] - at["IslandPlaced"] == pytest.approx(3.0, abs=0.004)
    assert at["IslandCaughtUp"] - at["IslandReady"] == pytest.approx(0.5, abs=0.004)
    first = _reports(world, ASIA)[0]
    assert first.at - at["IslandCaughtUp"] == pytest.approx(0.25 + first.stepping_seconds, abs=0.004)
    failed = [record.event for record in world.sink.records if isinstance(record.event, e.PlacementFailed)]
    assert [(event.island, event.incarnation) for event in failed] == [(EUROPE, 1)]
    assert _reports(world, EUROPE)


def test_a_kill_takes_its_time_and_so_does_hearing_of_it():
    world = _run(faults=(Fault(4.0, FaultKind.KILL, ASIA),), kill_s=(0.5, 0.5), detect_s=(0.25, 0.25))
    lost = next(record.event for record in world.sink.records if isinstance(record.event, e.ConnectionLost))
    assert lost.at == pytest.approx(4.75)
    last = [report.at for report in _reports(world, ASIA) if report.incarnation == 1][-1]
    assert 4.3 < last < 4.5


def test_the_last_evaluation_is_quicker_where_the_plan_says_so():
    def ending(**changes):
        world = _run(evaluate_s=(5.0, 5.0), **changes)
        flush = next(r.event.at for r in world.sink.records if any(isinstance(x, f.FlushIsland) for x in r.effects))
        return world.goodput.finished_at - flush

    assert ending() > 5.0
    assert ending(evaluate_alone_s=Empirical((0.5,))) < 1.5


def test_a_world_can_be_run_a_while_at_a_time():
    whole = _run()
    world = World(whole.policy, whole.plan, whole.seed)
    instants = list(world.passing(at_once=100))
    assert instants == sorted(instants)
    assert len(instants) > 10
    assert world.tape.records == whole.tape.records
    assert replay(world.tape).exact


def test_a_world_that_was_stopped_tells_what_it_came_to():
    world = World(sample_policy(4, steps=200), WorldPlan(**STEADY), seed=3)
    for now in world.passing(at_once=100):
        if now > 5.0:
            break
    assert world.finished is None
    summary = world.goodput.summary()
    assert 5.0 < summary["at"] < 6.0
    assert summary["tokens"]["merged"] > 0
