"""What must hold in every job. ``World`` itself checks the core's invariants and token conservation after every event."""

from __future__ import annotations

from math import fsum, isclose

from hypothesis import given, settings

from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core import messages
from orchestrator.core.vocabulary import JobOutcome
from orchestrator.simulation.world import World
from orchestrator.tape.replay import replay
from tests.soak import examples

from .jobs import CALM_AT, evacuated_jobs, jobs

LONG = 600.0
many = settings(max_examples=examples(40), deadline=None, derandomize=True, print_blob=True)


def _effects(world, kind):
    return [x for record in world.sink.records for x in record.effects if isinstance(x, kind)]


@many
@given(jobs())
def test_every_payload_is_held_or_released_and_never_both(job):
    world = World(*job)
    world.run(until=4.0)
    for _ in range(2):
        arrived = {
            record.event.contribution.payload
            for record in world.sink.records
            if isinstance(record.event, e.ContributionArrived)
        }
        released = {effect.payload for effect in _effects(world, f.ReleasePayload)}
        held = {c.payload for current in world.core.state.rounds for c in current.offered.values()}
        assert arrived == held | released
        assert not held & released
        assert world.held == held
        world.resume(until=LONG)
    assert not held


@many
@given(jobs())
def test_no_merge_is_below_quorum_and_versions_rise_by_one(job):
    policy, _, _ = job
    world = World(*job).run(until=LONG)
    asked = dict.fromkeys(range(policy.fragment_count), 0)
    for merge in _effects(world, f.MergeFragment):
        assert merge.version == asked[merge.fragment] + 1
        asked[merge.fragment] = merge.version
        assert len({item.island for item in merge.inputs}) == len(merge.inputs) >= policy.quorum
        assert all(item.weight > 0 for item in merge.inputs)
        assert isclose(fsum(item.weight for item in merge.inputs), 1.0, rel_tol=1e-9)
    published = dict.fromkeys(range(policy.fragment_count), 0)
    for publication in _effects(world, f.PublishFragment):
        assert publication.version - published[publication.fragment] in (0, 1)
        published[publication.fragment] = publication.version


@many
@given(jobs())
def test_no_work_is_merged_twice(job):
    world = World(*job).run(until=LONG)
    merged = [item.payload for merge in _effects(world, f.MergeFragment) for item in merge.inputs]
    assert len(merged) == len(set(merged))
    for island, accounts in world.goodput.ledger.accounts.items():
        for account in accounts:
            assert account.merged <= world.goodput.ledger.trained[island]


@many
@given(jobs())
def test_classes_of_time_add_up_and_nothing_stays_in_flight(job):
    world = World(*job).run(until=LONG)
    summary = world.goodput.summary()
    seconds = dict(summary["island_seconds"])
    total = seconds.pop("total")
    assert min(seconds.values()) >= 0.0
    assert isclose(fsum(seconds.values()), total, rel_tol=1e-9, abs_tol=1e-9)
    counted = [until - since for _, since, until, state in world.statistics.summary()["timeline"] if state != "stopped"]
    assert isclose(fsum(counted), total, rel_tol=1e-9, abs_tol=1e-6)
    assert isclose(fsum(summary["badput_seconds"].values()) + seconds["productive"], total, rel_tol=1e-6, abs_tol=1e-6)
    assert seconds["in_flight"] == summary["tokens"]["in_flight"] == 0.0
    tokens = summary["tokens"]
    assert isclose(tokens["merged"] + tokens["discarded"], tokens["trained"], rel_tol=1e-9, abs_tol=1e-6)


@settings(parent=many, max_examples=examples(20))
@given(jobs(calm=True))
def test_once_faults_end_every_fragment_advances_and_the_job_ends(job):
    world = World(*job).run(until=LONG)
    assert world.finished is not None
    assert world.finished.outcome is JobOutcome.COMPLETED
    late = {
        record.event.fragment
        for record in world.sink.records
        if isinstance(record.event, e.MergeCompleted) and record.event.at > CALM_AT
    }
    assert late == set(range(world.policy.fragment_count))


@settings(parent=many, max_examples=examples(15))
@given(evacuated_jobs())
def test_where_all_islands_depart_together_each_is_drained_in_a_rounds_time_and_nothing_is_lost(job):
    policy, plan, _ = job
    world = World(*job).run(until=max(fault.at for fault in plan.faults) + 10.0)
    noticed = {r.event.island: r.event.at for r in world.sink.records if isinstance(r.event, e.NoticeReceived)}
    drained = {
        r.event.island: r.event.at for r in world.sink.records if isinstance(e.report_of(r.event), messages.Drained)
    }
    assert noticed.keys() == drained.keys() == {plan.island for plan in policy.islands}
    round_s = policy.sync_interval_steps * max(plan.step_s)
    assert max(drained.values()) - max(noticed.values()) <= round_s + 2 * policy.fragment_count * max(plan.step_s) + 1.0
    for island, accounts in world.goodput.ledger.accounts.items():
        assert {account.discarded for account in accounts} == {0}, island


@settings(parent=many, max_examples=examples(25))
@given(jobs())
def test_every_tape_replays_exactly(job):
    world = World(*job).run(until=LONG)
    again = replay(world.tape)
    assert again.exact, str(again.divergence)
    assert again.matching == len(world.sink.records)
