"""A world fitted to a tape is the world that made it: known parameters are found again, and it does the same job."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.events import ContributionArrived
from orchestrator.core.messages import Progress
from orchestrator.core.vocabulary import IslandId
from orchestrator.errors import DataError
from orchestrator.simulation.fit import fit, observe, speeds_of
from orchestrator.simulation.plan import Capacity, Fault, FaultKind, Pace, WorldPlan, sample_policy
from orchestrator.simulation.world import World
from orchestrator.tape.replay import replay
from orchestrator.tape.schema import Tape
from tests.harness.reports import of_kind

ASIA, EUROPE, EAST = IslandId("asia"), IslandId("europe"), IslandId("us-east")
STEPS_S = (0.05, 0.05, 0.06, 0.07)
WIDE = replace(sample_policy(4, steps=400, grace_cap_steps=3.0), overlap_steps=6)
"""A grace window so wide that chance does not decide who merges with whom."""


def _world(policy=WIDE, **changes):
    plan = WorldPlan(**{"step_s": STEPS_S, "adoption": "rebase", **changes})
    return World(policy, plan, seed=5, checked=False).run()


def _again(fitted, seed=11):
    return World(fitted.policy, fitted.plan, seed, checked=False).run(fitted.until)


@pytest.fixture(scope="module")
def calm():
    return _world()


@pytest.fixture(scope="module")
def stormy():
    """Every kind of fault but cancelling."""
    faults = (
        Fault(4.0, FaultKind.KILL, ASIA),
        Fault(6.0, FaultKind.CRASH, EUROPE),
        Fault(10.0, FaultKind.FREEZE, EAST, 4.0),
        Fault(16.0, FaultKind.CUT, ASIA, 3.0),
        Fault(20.0, FaultKind.KILL_AND_KEEP_AWAY, EUROPE),
        Fault(24.0, FaultKind.READD, EUROPE),
        *(Fault(28.0 + 3.0 * n, FaultKind.KILL, ASIA) for n in range(4)),
    )
    return _world(replace(WIDE, token_budget=3 * WIDE.token_budget // 2), faults=faults)


def test_speeds_and_sizes_are_found_again():
    plan = fit(_world(step_jitter_ratio=0.2, pause_s=(0.01,) * 4).tape).plan
    assert plan.step_s == pytest.approx(STEPS_S, rel=0.02)
    assert plan.step_jitter_ratio == pytest.approx(0.2, abs=0.02)
    assert plan.pause_s == pytest.approx((0.01,) * 4, abs=0.001)
    assert plan.tokens_per_step == 512
    assert plan.adoption == "rebase"
    assert plan.median_over == 1


def test_latencies_are_found_again(stormy):
    plan, true = fit(stormy.tape).plan, stormy.plan
    for name in ("place_s", "start_s", "transfer_s", "letter_s", "pull_s", "merge_s", "evaluate_s", "detect_s"):
        low, high = getattr(true, name)
        found = getattr(plan, name)
        assert found.mean == pytest.approx((low + high) / 2.0, abs=0.35 * (high - low)), name
        assert low - 1e-3 <= min(found.samples) <= max(found.samples) <= high + 1e-3, name
    low, high = true.delivery_s
    assert low < plan.delivery_s.mean < high


def test_faults_are_found_again_with_their_times_kinds_and_durations(stormy):
    found = fit(stormy.tape).plan.faults
    assert [(fault.kind, fault.island) for fault in found] == [
        (fault.kind, fault.island) for fault in stormy.plan.faults
    ]
    for fault, true in zip(found, stormy.plan.faults, strict=True):
        exact = true.kind in (FaultKind.KILL, FaultKind.KILL_AND_KEEP_AWAY, FaultKind.READD)
        assert fault.at == pytest.approx(true.at, abs=0.0 if exact else 0.1)
        assert fault.duration == pytest.approx(true.duration, abs=0.15)
    assert fit(stormy.tape).plan.silence_s == pytest.approx(stormy.plan.silence_s, abs=0.1)


def test_each_incarnation_starts_as_it_did(stormy):
    again = _again(fit(stormy.tape))
    lives = {(life.island, life.incarnation) for life in fit(stormy.tape).plan.lives}
    assert lives == set(stormy.hosts)
    before, after = (world.statistics.summary()["recoveries"] for world in (stormy, again))
    assert [recovery["island"] for recovery in after] == [recovery["island"] for recovery in before]
    for one, other in zip(before, after, strict=True):
        for part in ("place", "start"):
            assert other["parts"][part] == pytest.approx(one["parts"][part], abs=0.02)


def test_a_kill_that_took_its_time_is_told_from_one_that_was_heard_of_late():
    plan = fit(_world(faults=(Fault(5.0, FaultKind.KILL, ASIA),), kill_s=(1.0, 1.0), detect_s=(0.5, 0.5)).tape).plan
    assert plan.kill_s.mean == pytest.approx(1.0, abs=0.2)  # it last reports a little before
    assert plan.kill_s.mean + plan.detect_s.mean == pytest.approx(1.5, abs=1e-6)


def test_losses_are_found_again():
    policy = replace(WIDE, token_budget=2 * WIDE.token_budget)
    plan = fit(_world(policy, corrupt=0.1, duplicate=0.1, publication_loss=0.1).tape).plan
    assert plan.corrupt == pytest.approx(0.1, abs=0.04)
    assert plan.duplicate == pytest.approx(0.1, abs=0.04)
    assert plan.publication_loss == pytest.approx(0.1, abs=0.04)


def test_capacities_that_change_are_found_again():
    changes = (
        Capacity(5.0, ASIA, 0.5),
        Capacity(8.0, ASIA, 1.0),
        Capacity(10.0, EUROPE, 0.0),
        Capacity(15.0, EUROPE, 1.0),
    )
    found = fit(_world(capacity=changes).tape).plan.capacity
    for change in changes:
        near = [
            x for x in found if x.island == change.island and x.ratio == change.ratio and abs(x.at - change.at) < 0.2
        ]
        assert near, (change, found)
    assert all(x.ratio in (0.0, 0.5, 1.0) or 0.5 < x.ratio < 1.0 for x in found)  # between two reports, a mixture


def test_reports_that_come_by_time_alone_tell_how_often():
    calm = replace(WIDE, sync_interval_steps=400)
    assert fit(_world(calm, report_every_s=0.8).tape).plan.report_every_s == pytest.approx(0.8, abs=0.05)


@pytest.mark.parametrize("kind", ["calm", "stormy"])
def test_a_fitted_world_does_the_same_job(kind, request):
    world = request.getfixturevalue(kind)
    again = _again(fit(world.tape))
    before, after = world.goodput.summary(), again.goodput.summary()
    assert after["goodput_ratio"] == pytest.approx(before["goodput_ratio"], abs=0.02)
    assert after["uptime_ratio"] == pytest.approx(before["uptime_ratio"], abs=0.01)
    before, after = world.statistics.summary(), again.statistics.summary()
    assert after["merges"] == pytest.approx(before["merges"], rel=0.03)
    assert after["contributors_mean"] == pytest.approx(before["contributors_mean"], rel=0.1)


def test_speeds_that_change_over_time_are_replayed_over_time():
    def steps_between(world, since, until):
        reports = [x for x in of_kind((r.event for r in world.sink.records), Progress) if x.island == ASIA]
        inside = [report for report in reports if since < report.at < until]
        return (inside[-1].steps_total - inside[0].steps_total) / (inside[-1].at - inside[0].at)

    world = _world(paces=((), (), (), (Pace(6.0, 12.0, 0.14),)))
    again = _again(fit(world.tape))
    assert steps_between(again, 8.5, 11.5) == pytest.approx(1 / 0.14, rel=0.05)
    assert steps_between(again, 2.0, 5.0) == pytest.approx(1 / STEPS_S[3], rel=0.05)
    assert steps_between(again, 14.5, 18.0) == pytest.approx(1 / STEPS_S[3], rel=0.05)


def test_a_report_that_was_long_under_way_makes_no_pause_of_its_delay():
    """Steps of 0.5 s without a pause; every other report comes 0.4 s late, the others at once."""

    def report(n):
        late = 0.4 if n % 2 else 0.0
        return n * 2.5 + late, Progress(5 * n, 5 * n, 5 * n, n * 2.5, 0.5, 0.5, 1.0)

    found = speeds_of([[report(n) for n in range(1, 40)]], [])
    assert found.step_s == pytest.approx(0.5)
    assert found.pausing <= 0.4 + 1e-9


def test_a_tape_that_breaks_off_is_simulated_up_to_there_and_no_further(calm):
    whole = calm.tape
    half = Tape(whole.header, whole.records[: len(whole.records) // 2])
    fitted = fit(half)
    assert fitted.until == half.records[-1].event.at
    world = _again(fitted)
    assert world.finished is None
    assert world.now <= fitted.until


def test_offers_whose_bytes_were_not_pulled_are_no_pulls_but_on_tapes_without_displacements_all_are(calm):
    def pulls(with_displacement):
        records = [
            replace(record, event=replace(record.event, displacement=None))
            if isinstance(record.event, ContributionArrived) and not with_displacement(record.event)
            else record
            for record in calm.tape.records
        ]
        return len(observe(Tape(calm.tape.header, records)).pulls)

    every = pulls(lambda event: True)
    assert every > 0
    assert 0 < pulls(lambda event: event.contribution.island != ASIA) < every
    arrivals = [r.event for r in calm.tape.records if isinstance(r.event, ContributionArrived)]
    left = sum(event.displacement is None for event in arrivals)
    assert every <= pulls(lambda event: False) <= every + left < 1.05 * every


def test_a_cancelled_job_is_cancelled_again():
    world = _world(faults=(Fault(5.0, FaultKind.CANCEL, ASIA),))
    again = _again(fit(world.tape))
    assert again.goodput.finished_at == world.goodput.finished_at == 5.0


def test_what_was_never_seen_is_assumed_and_said(calm):
    notes = fit(calm.tape).notes
    assert any("detecting a death was never observed" in note for note in notes)


def test_a_tape_without_training_shows_no_world(calm):
    whole = calm.tape
    with pytest.raises(DataError, match="no island trains on the tape"):
        fit(Tape(whole.header, whole.records[:6]))


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**16),
    step_s=st.tuples(*[st.sampled_from([0.04, 0.05, 0.08])] * 3),
    kills=st.lists(st.tuples(st.floats(2.0, 8.0), st.integers(0, 2)), max_size=3),
    quorum=st.integers(1, 2),
)
def test_whatever_the_speeds_and_kills_a_fitted_world_agrees_in_goodput(seed, step_s, kills, quorum):
    policy = replace(sample_policy(3, steps=200, quorum=quorum, grace_cap_steps=3.0), overlap_steps=6)
    faults = [Fault(at, FaultKind.KILL, policy.islands[n].island) for at, n in sorted(kills)]
    world = World(policy, WorldPlan(step_s, adoption="rebase", faults=tuple(faults)), seed).run()
    fitted = fit(world.tape)
    again = _again(fitted, seed + 1)
    assert replay(again.tape).exact
    assert fitted.plan.step_s == pytest.approx(step_s, rel=0.03)
    expected = world.goodput.summary()["goodput_ratio"]
    assert again.goodput.summary()["goodput_ratio"] == pytest.approx(expected, abs=0.03)
