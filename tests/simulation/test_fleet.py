"""Fleets: time is accounted for to the last second, systems differ as they should, and rules do what they say."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from orchestrator.elastic import (
    AwaitSlice,
    BeginStall,
    Block,
    BlockArrived,
    BlockLeft,
    DuringStall,
    ElasticJobs,
    ElasticPolicy,
    SliceFailed,
    SliceReturned,
    Stall,
    StallEnded,
)
from orchestrator.errors import ConfigurationError
from orchestrator.simulation.distributions import Constant, Exponential, LogNormal, Uniform
from orchestrator.simulation.fleet import Cause, FleetPlan, Scavenged, System
from orchestrator.simulation.fleet_world import BATCHES, GONE, FleetWorld, LockStep, simulate

DAY = 86400.0
SMALL = FleetPlan(600_000, 2 * DAY, System.DECOUPLED, learners=4)
MIXED = replace(
    SMALL,
    return_time=LogNormal(900.0, 1.0),
    stall_down=Uniform(5.0, 30.0),
    stall_up=Exponential(8.0),
    scavenged=(Scavenged(150_000, 0.5 * DAY, 1.25 * DAY), Scavenged(40_000, 1.0 * DAY, 3.0 * DAY)),
)


def _ratio(outcome, cause):
    return next(item.ratio for item in outcome.badput if item.cause is cause)


# ── accounts ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("system", list(System))
@pytest.mark.parametrize("during", list(DuringStall))
def test_every_chip_second_is_in_exactly_one_class(system, during):
    plan = replace(MIXED, system=system, during_stall=during, returns_join=during is not DuringStall.JOINS)
    outcome = simulate(plan, 5)
    assert outcome.goodput + math.fsum(item.ratio for item in outcome.badput) == pytest.approx(1.0, abs=1e-12)
    resident = plan.slice_count * plan.duration
    scavenged = sum(
        plan.scavenged_slices(extra) * (min(plan.duration, extra.until) - extra.since) for extra in plan.scavenged
    )
    badput = math.fsum(item.chip_seconds for item in outcome.badput)
    whole = (resident + scavenged) * plan.chips_per_slice
    assert badput / (1.0 - outcome.goodput) == pytest.approx(whole, rel=1e-9)
    assert all(item.ratio >= 0.0 for item in outcome.badput)


@pytest.mark.parametrize("system", [System.DATA_PARALLEL, System.ELASTIC_DATA_PARALLEL, System.DECOUPLED])
def test_capacity_over_time_integrates_to_goodput(system):
    plan = replace(SMALL, system=system)
    outcome = simulate(plan, 2, keep_capacity=True)
    assert len(outcome.capacity) == plan.learner_count
    area = 0.0
    for block, changes in zip(plan.policy().blocks, outcome.capacity, strict=True):
        assert changes[0] == (0.0, 1.0)
        ends = [at for at, _ in changes[1:]] + [plan.duration]
        assert all(at <= end for (at, _), end in zip(changes, ends, strict=True))
        area += block.slice_count * math.fsum((end - at) * r for (at, r), end in zip(changes, ends, strict=True))
    assert area / plan.slice_count / plan.duration == pytest.approx(outcome.goodput, abs=1e-9)
    assert simulate(plan, 2).goodput == outcome.goodput


def test_a_run_that_is_broken_off_tells_of_its_whole_batches():
    whole = simulate(SMALL, 1)
    world = FleetWorld(SMALL, 1)
    for _, _ in zip(range(10), world.batches(), strict=False):
        pass
    part = world.outcome()
    assert part.duration == pytest.approx(SMALL.duration * 10 / BATCHES)
    assert part.batches == whole.batches[:10]
    assert math.isnan(FleetWorld(SMALL, 1).outcome().goodput)


def test_the_standard_error_is_the_spread_of_runs_with_other_seeds():
    plan = FleetPlan(600_000, 0.5 * DAY, System.ELASTIC_DATA_PARALLEL)
    runs = [simulate(plan, seed) for seed in range(24)]
    mean = math.fsum(run.goodput for run in runs) / len(runs)
    spread = math.sqrt(math.fsum((run.goodput - mean) ** 2 for run in runs) / (len(runs) - 1))
    claimed = math.fsum(run.stderr for run in runs) / len(runs)
    assert 0.6 < claimed / spread < 1.6


# ── systems ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_without_failures_nothing_is_lost():
    for system in System:
        outcome = simulate(FleetPlan(300_000, DAY, system, mtbi_chip=1e15), 0)
        assert (outcome.goodput, outcome.uptime) == (1.0, 1.0)


def test_systems_come_in_the_order_of_what_they_wait_for():
    of = {system: simulate(replace(SMALL, system=system), 3) for system in System}
    goodputs = {system: outcome.goodput for system, outcome in of.items()}
    assert min(goodputs, key=goodputs.__getitem__) is System.DATA_PARALLEL
    assert max(goodputs, key=goodputs.__getitem__) is System.DECOUPLED
    # A barrier every 24 steps lets stalls of different learners fall into one round; one every step does not.
    assert goodputs[System.STREAMING_DILOCO] < goodputs[System.DILOCO]
    assert of[System.DECOUPLED].uptime >= 0.999
    waiting = {system for system, outcome in of.items() if _ratio(outcome, Cause.WAITING) > 0.0}
    assert waiting == {System.DILOCO, System.STREAMING_DILOCO}


def test_one_learner_alone_waits_for_nobody():
    alone = [simulate(replace(SMALL, system=s, learners=1, duration=DAY), 3) for s in System]
    goodputs = {outcome.system: outcome.goodput for outcome in alone}
    assert goodputs[System.DILOCO] == pytest.approx(goodputs[System.STREAMING_DILOCO], abs=1e-12)
    assert goodputs[System.DILOCO] == pytest.approx(goodputs[System.DECOUPLED], abs=0.01)  # other stalls, same outages


def test_without_slack_all_must_run_at_once():
    """A limit with a closed form: independent learners all run for u^M of the time."""
    plan = replace(SMALL, system=System.STREAMING_DILOCO, fragments=24, overlap_steps=0, step_s=0.001, duration=4 * DAY)
    running = simulate(replace(plan, system=System.DECOUPLED), 3)
    u = 1.0 - sum(_ratio(running, cause) for cause in (Cause.SHRINKING, Cause.GROWING)) / (
        1 - _ratio(running, Cause.AWAY)
    )
    stiff = simulate(plan, 3)
    assert stiff.uptime == pytest.approx(u**4, abs=0.01)
    assert stiff.goodput == pytest.approx(u**4 * (1 - _ratio(running, Cause.AWAY)), abs=0.01)


def test_patience_only_helps_and_endless_patience_is_decoupled():
    goodputs = [
        simulate(replace(SMALL, system=System.STREAMING_DILOCO, overlap_steps=steps, duration=DAY), 3).goodput
        for steps in (0, 2, 8, 60, 10**7)
    ]
    assert goodputs == sorted(goodputs)
    free = simulate(replace(SMALL, system=System.STREAMING_DILOCO, overlap_steps=10**7, duration=DAY), 3)
    assert _ratio(free, Cause.WAITING) == 0.0


def test_in_lock_step_everybody_goes_at_the_slowest_pace():
    plan = FleetPlan(300_000, DAY, System.DILOCO, learners=4, mtbi_chip=1e15, step_factors=(1.0, 1.0, 1.25, 1.25))
    outcome = simulate(plan, 0)
    assert outcome.goodput == pytest.approx((2 * 0.8 + 2 * 1.0) / 4, abs=1e-3)
    assert _ratio(outcome, Cause.WAITING) == pytest.approx(0.1, abs=1e-3)
    assert simulate(replace(plan, system=System.DECOUPLED), 0).goodput == 1.0


def test_scavenged_chips_are_used_by_whoever_can():
    extra = (Scavenged(600_000, 0.5 * DAY, 1.5 * DAY),)
    quiet = replace(SMALL, mtbi_chip=1e15, scavenged=extra)
    for system in System:
        outcome = simulate(replace(quiet, system=system), 0, keep_capacity=True)
        if system is System.DATA_PARALLEL:
            assert _ratio(outcome, Cause.UNUSED) == pytest.approx(1 / 3, abs=1e-6)
        else:
            assert outcome.goodput > 0.999
    joined = simulate(replace(quiet, system=System.ELASTIC_DATA_PARALLEL), 0, keep_capacity=True)
    assert [ratio for _, ratio in joined.capacity[0]] == [1.0, 0.0, 2.0, 0.0, 1.0]
    apart = simulate(quiet, 0, keep_capacity=True)
    assert [len(changes) for changes in apart.capacity] == [1] * 4 + [3] * 4
    assert [ratio for _, ratio in apart.capacity[-1]] == [0.0, 1.0, 0.0]


# ── waiting, by hand ──────────────────────────────────────────────────────────────────────────────────────────


def test_at_a_barrier_everybody_waits_for_the_last_one():
    """Two learners, barriers every 10 s. One stands still from 3 to 8, so the other waits from 10 to 15; then both run."""
    plan = FleetPlan(1024, 100.0, System.DILOCO, learners=2, interval_steps=10)
    waited, trained = LockStep(plan, [2, 3]).advance([(3.0, 0, 0), (8.0, 0, 2)], 40.0)
    assert waited == pytest.approx(3 * 5.0)
    assert trained == pytest.approx(40.0)


def test_overlap_lets_others_run_ahead_and_then_stops_them():
    """Points every second, two seconds of patience: who stands still at 3.5 lets the other run to 4 + 2, no further."""
    plan = FleetPlan(1024, 100.0, System.STREAMING_DILOCO, learners=2, interval_steps=24, fragments=24, overlap_steps=2)
    lock = LockStep(plan, [1, 1])
    assert lock.advance([(3.5, 0, 0)], 10.0) == (pytest.approx(4.0), pytest.approx(6.0))
    # It runs again at 10: the other goes on once it has reached 4, at 10.5, and stays ahead without waiting again.
    assert lock.advance([(10.0, 0, 1)], 30.0) == (pytest.approx(0.5), pytest.approx(20.0))


def test_nobody_waits_for_a_learner_that_has_gone():
    plan = FleetPlan(1024, 100.0, System.DILOCO, learners=2, interval_steps=10)
    assert LockStep(plan, [1, 1]).advance([(5.0, 0, GONE)], 50.0) == (0.0, pytest.approx(50.0))


# ── rules ─────────────────────────────────────────────────────────────────────────────────────────────────────

TWO = ElasticPolicy((Block(0, 2), Block(1, 2), Block(0, 1, resident=False)))


def _tell(policy, *events):
    jobs = ElasticJobs(policy)
    return jobs, [jobs.handle(event) for event in events]


def test_a_failure_shrinks_its_own_learner_only():
    jobs, decided = _tell(TWO, SliceFailed(1.0, 3))
    assert decided == [(AwaitSlice(3), BeginStall(1, Stall.SHRINKING))]
    assert (jobs.training, jobs.away, jobs.live) == (2, 1, 1)


def test_a_return_grows_and_one_during_a_stall_joins_it_for_free():
    _, decided = _tell(TWO, SliceFailed(1.0, 3), SliceReturned(2.0, 3), StallEnded(3.0, 1), SliceReturned(4.0, 3))
    assert decided[1:] == [(), (), ()]
    _, decided = _tell(TWO, SliceFailed(1.0, 3), StallEnded(2.0, 1), SliceReturned(4.0, 3))
    assert decided[-1] == (BeginStall(1, Stall.GROWING),)
    _, decided = _tell(replace(TWO, returns_join=False), SliceFailed(1.0, 3), SliceReturned(2.0, 3))
    assert decided[-1] == (BeginStall(1, Stall.GROWING),)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (DuringStall.ABSORBED, ()),
        (DuringStall.JOINS, (AwaitSlice(1),)),
        (DuringStall.RESTARTS, (AwaitSlice(1), BeginStall(0, Stall.SHRINKING))),
    ],
)
def test_a_failure_during_a_stall_is_as_the_policy_says(rule, expected):
    _, decided = _tell(replace(TWO, during_stall=rule), SliceFailed(1.0, 0), SliceFailed(2.0, 1))
    assert decided[-1] == expected


def test_a_slice_that_is_away_or_absent_cannot_fail():
    _, decided = _tell(TWO, SliceFailed(1.0, 0), StallEnded(2.0, 0), SliceFailed(3.0, 0), SliceFailed(4.0, 4))
    assert decided[2:] == [(), ()]


def test_without_elasticity_the_whole_job_restarts_and_keeps_its_slices():
    jobs, decided = _tell(replace(TWO, elastic=False), SliceFailed(1.0, 0), StallEnded(2.0, 0))
    assert decided[0] == (BeginStall(0, Stall.RESTARTING),)
    assert (jobs.training, jobs.away) == (4, 0)


def test_scavenged_slices_join_a_learner_and_leave_it():
    jobs, decided = _tell(TWO, BlockArrived(1.0, 2), StallEnded(2.0, 0), SliceFailed(3.0, 4), StallEnded(4.0, 0))
    assert decided[0] == (BeginStall(0, Stall.GROWING),)
    assert (jobs.training, jobs.away) == (4, 1)
    assert jobs.handle(BlockLeft(5.0, 2)) == (BeginStall(0, Stall.SHRINKING),)
    assert jobs.away == 0
    assert jobs.handle(SliceReturned(6.0, 4)) == ()
    assert jobs.handle(StallEnded(7.0, 0)) == ()
    assert jobs.training == 4


def test_slices_are_shared_out_evenly_and_systems_number_them_alike():
    for system in System:
        plan = FleetPlan(150_000, DAY, system, learners=16, scavenged=(Scavenged(30_000, 1.0, 2.0),))
        counts = [block.slice_count for block in plan.policy().blocks if block.resident]
        assert sum(counts) == 586
        assert max(counts) - min(counts) <= 1
        assert plan.policy().slice_count == plan.trace_slices == 586 + 117


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"chips": 0}, "at least 1"),
        ({"chips": 1000, "learners": 8}, "too few for 8 learners"),
        ({"duration": 0.0}, "more than 0"),
        ({"step_factors": (1.0, 1.2)}, "names 2 learners, but there are 4"),
        ({"fragments": 0}, "at least 1"),
        ({"scavenged": (Scavenged(10, 5.0, 5.0),)}, "0 ≤ since < until"),
    ],
)
def test_a_fleet_that_cannot_be_is_refused(changes, said):
    with pytest.raises(ConfigurationError, match=said):
        replace(SMALL, **changes)


def test_constant_return_times_are_honoured_to_the_second():
    plan = FleetPlan(25_600, 30 * DAY, System.ELASTIC_DATA_PARALLEL, return_time=Constant(600.0))
    changes = simulate(plan, 4, keep_capacity=True).capacity[0]
    first, lost, shrunk, back, grown = changes[:5]
    assert (first, lost[1], shrunk[1], back[1], grown[1]) == ((0.0, 1.0), 0.0, 0.99, 0.0, 1.0)
    assert shrunk[0] - lost[0] == pytest.approx(13.1)
    assert back[0] - lost[0] == pytest.approx(600.0)
