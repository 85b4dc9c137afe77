"""The simulated world is deterministic, its faults do what they say, and its checkers bite."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.accounting.island_time import EVALUATING
from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.messages import Adopted, CatchUpFailure, CaughtUp, Flushed, Progress
from orchestrator.core.vocabulary import (
    EvaluationPolicy,
    FragmentId,
    IslandId,
    JobOutcome,
    RefusalReason,
    ReleaseReason,
    Version,
)
from orchestrator.errors import InternalError
from orchestrator.simulation import protocol
from orchestrator.simulation.island import SimulatedIsland
from orchestrator.simulation.links import Links
from orchestrator.simulation.plan import Fault, FaultKind, WorldPlan, sample_policy
from orchestrator.simulation.world import World
from tests.harness.reports import of_kind

EVEN = WorldPlan(step_s=(0.05,) * 4)
ASIA = IslandId("asia")


def _told(world, kind, island=None):
    events = of_kind((record.event for record in world.sink.records), kind)
    return [event for event in events if island is None or event.island == island]


def _asked(world, kind):
    return [x for record in world.sink.records for x in record.effects if isinstance(x, kind)]


def _run(*faults, steps=200, **changes):
    plan = WorldPlan(step_s=(0.05,) * 4, faults=faults, **changes)
    return World(sample_policy(4, steps=steps), plan, seed=3).run()


def test_the_same_seed_gives_the_same_job_and_another_one_another():
    def digest(seed):
        return World(sample_policy(4, steps=80), EVEN, seed).run().tape.records

    assert digest(1) == digest(1)
    assert digest(1) != digest(2)


def test_an_undisturbed_job_completes_and_merges_every_fragment():
    world = _run()
    assert world.finished.outcome is JobOutcome.COMPLETED
    assert min(world.statistics.summary()["merges_per_fragment"]) >= 10
    assert not world.held


def test_a_killed_island_comes_back_from_a_peer_and_contributes():
    world = _run(Fault(4.0, FaultKind.KILL, ASIA))
    recovery = world.statistics.summary()["recovery_s"]
    assert recovery["island"] == ASIA
    assert 0.5 < recovery["total"] < 5.0
    assert _told(world, CaughtUp, ASIA)[-1].donor is not None
    assert "asia" not in world.statistics.summary()["survivors"]


def test_survivors_do_not_notice():
    world = _run(Fault(4.0, FaultKind.KILL, ASIA), Fault(5.0, FaultKind.FREEZE, IslandId("europe"), 3.0))
    assert world.statistics.summary()["survivor_gap_max_s"] <= 0.05 * 1.05 + 1e-9


def test_a_frozen_island_is_suspected_and_goes_on_as_the_same_incarnation():
    world = _run(Fault(4.0, FaultKind.FREEZE, ASIA, 3.0))
    assert len(_told(world, e.ConnectionLost, ASIA)) == len(_told(world, e.ConnectionRestored, ASIA)) == 1
    assert {placed.incarnation for placed in _told(world, e.IslandPlaced, ASIA)} == {1}
    assert max(report.gap_max_seconds for report in _told(world, Progress, ASIA)) > 2.9


def test_a_cut_island_trains_on_and_tells_so_afterwards():
    world = _run(Fault(4.0, FaultKind.CUT, ASIA, 3.0))
    reports = _told(world, Progress, ASIA)
    assert not [report for report in reports if 4.0 < report.at < 7.0]
    assert max(report.gap_max_seconds for report in reports) < 0.06
    heard_again = next(report for report in reports if report.at > 7.0)
    before = [report for report in reports if report.at < 4.0][-1]
    assert heard_again.steps_total > before.steps_total


def test_an_island_that_is_cut_off_for_too_long_is_replaced_and_fenced():
    world = _run(Fault(4.0, FaultKind.CUT, ASIA, 15.0), steps=500)
    assert {placed.incarnation for placed in _told(world, e.IslandPlaced, ASIA)} == {1, 2}
    stops = [stop for stop in _asked(world, f.StopIsland) if (stop.island, stop.incarnation) == (ASIA, 1)]
    assert stops
    assert not world.hosts[ASIA, 1].alive


def test_a_cancelled_job_ends_at_once():
    world = _run(Fault(4.0, FaultKind.CANCEL, ASIA))
    assert world.finished.outcome is JobOutcome.CANCELLED
    assert world.goodput.finished_at == 4.0


def test_an_island_that_is_kept_away_waits_for_the_operator():
    world = _run(Fault(3.0, FaultKind.KILL_AND_KEEP_AWAY, ASIA), Fault(7.0, FaultKind.READD, ASIA))
    placed = [event.at for event in _told(world, e.IslandPlaced, ASIA)]
    assert placed[0] < 3.0 < 7.0 < placed[1]


def test_corrupt_payloads_are_refused_and_never_merged():
    world = _run(corrupt=0.3)
    assert world.statistics.summary()["refusals"]["corrupt"] > 5
    merged = {item.payload for merge in _asked(world, f.MergeFragment) for item in merge.inputs}
    assert not merged & {event.contribution.payload for event in _told(world, e.ContributionUnusable)}


@pytest.mark.parametrize("kind", [FaultKind.DIVERGE, FaultKind.EXPLODE])
def test_an_island_that_goes_mad_is_never_merged_and_comes_back_with_a_peers_state(kind):
    world = _run(Fault(5.0, kind, ASIA))
    quarantined = _asked(world, f.QuarantineIsland)
    assert {(x.island, x.incarnation) for x in quarantined} == {(ASIA, 1)}
    refused = {refusal.contribution.payload for refusal in _asked(world, f.RefuseContribution)}
    merged = {item.payload for merge in _asked(world, f.MergeFragment) for item in merge.inputs}
    assert refused
    assert not refused & merged
    assert _told(world, CaughtUp, ASIA)[-1].donor is not None
    assert any(payload.startswith(f"{ASIA}.2.") for payload in merged)
    assert world.goodput.summary()["discarded_tokens"]["quarantined"] > 0
    assert world.statistics.summary()["survivor_gap_max_s"] <= 0.05 * 1.05 + 1e-9


def test_merges_that_fail_cost_work_but_not_the_job():
    world = _run(merge_failure=0.3, calm_at=6.0)
    failed = _told(world, e.MergeFailed)
    assert len(failed) > 5
    completed = {(event.fragment, event.version) for event in _told(world, e.MergeCompleted)}
    assert {(event.fragment, event.version) for event in failed} <= completed  # each was made in the end
    assert world.finished.outcome is JobOutcome.COMPLETED


def test_a_donor_that_goes_away_is_replaced_by_another_source():
    world = _run(Fault(4.0, FaultKind.KILL, ASIA), catch_up_failure=0.9, calm_at=8.0)
    assert _told(world, CatchUpFailure, ASIA)
    assert world.statistics.summary()["recovery_s"]["island"] == ASIA


def test_a_placement_that_fails_is_tried_again():
    world = _run(placement_failure=0.5, calm_at=3.0, steps=400)
    assert _told(world, e.PlacementFailed)
    assert min(world.statistics.summary()["merges_per_island"].values()) > 0


def test_merging_bytes_that_are_not_held_is_noticed():
    world = World(sample_policy(4, steps=80), EVEN, seed=1)
    world.held = _Forgetful()
    with pytest.raises(InternalError, match="not held"):
        world.run()


def test_releasing_bytes_twice_is_noticed():
    world = World(sample_policy(4, steps=80), EVEN, seed=1)
    core = world.core

    class Twice:
        state = core.state

        def handle(self, event):
            effects = core.handle(event)
            again = [x for x in effects if isinstance(x, f.ReleasePayload) and x.reason is ReleaseReason.MERGED]
            return (*effects, *again)

    world._driver.core = Twice()
    with pytest.raises(InternalError, match="released, but is not held"):
        world.run()


class _Forgetful(set):
    def add(self, item):
        pass


@pytest.mark.parametrize(("adoption", "kept"), [("replace", 0), ("rebase", 100)])
def test_an_island_keeps_what_its_adoption_says(adoption, kept):
    island = SimulatedIsland(ASIA, 1, sample_policy(1, fragment_count=1, interval=4), 100, adoption)
    letters = [island.end_step(0.1, 0.1) for _ in range(4)]
    offer = letters[-1][-1]
    assert (offer.step_count, offer.token_count, offer.step) == (4, 400, 4)
    island.deliver(FragmentId(0), Version(1), 9, merged_offer=1)
    (adopted,) = [letter for letter in island.end_step(0.1, 0.1) if isinstance(letter, Adopted)]
    assert (adopted.version, adopted.step, adopted.tokens_total, adopted.kept_tokens) == (1, 9, 500, kept)


def test_an_island_that_measures_stands_still_for_it_and_goodput_says_so():
    measured = EvaluationPolicy(sequences=24, time_ratio_max=None, on_islands=True)
    policy = replace(sample_policy(4, steps=200), evaluation=measured)
    world = World(policy, replace(EVEN, evaluate_s=(0.5, 0.5)), seed=3).run()
    assert world.finished.outcome is JobOutcome.COMPLETED
    results = _told(world, e.EvaluationCompleted)
    assert len({event.island for event in results}) > 1  # who measured falls behind, so another is furthest ahead
    while_training = [event for event in results if event.at < _told(world, Flushed)[0].at]
    spent = world.goodput.summary()["badput_seconds"][EVALUATING]
    assert spent == pytest.approx(0.5 * len(while_training), abs=0.6)


def test_an_island_that_dies_while_it_measures_is_replaced():
    policy = replace(sample_policy(4, steps=100), evaluation=EvaluationPolicy(on_islands=True))
    plan = replace(EVEN, evaluate_s=(0.5, 0.5))
    island = _asked(World(policy, plan, seed=3).run(), f.Evaluate)[0].island
    undisturbed = _told(World(policy, plan, seed=3).run(), e.EvaluationCompleted)[0].at
    world = World(policy, replace(plan, faults=(Fault(undisturbed - 0.3, FaultKind.KILL, island),)), seed=3).run()
    first, second, *_ = _asked(world, f.Evaluate)
    assert (first.island, second.island == first.island) == (island, False)
    assert _told(world, e.EvaluationCompleted)[0].island == second.island


# ── offers without their bytes ────────────────────────────────────────────────────────────────────────────────────


def _thin(seconds_a_payload, **changes):
    """Four islands on lines that carry a fragment in so long, where one is due every second."""
    policy = protocol.policy(4, fragments=8, interval_steps=8, overlap_steps=6, quorum=2, grace_cap_steps=3.0)
    line = {"payload_bytes": 1000, "bandwidth_bytes_per_s": (1000 / seconds_a_payload,) * 4}
    plan = protocol.plan([1.0, 1.01, 1.02, 1.03], **(line | changes))
    return World(policy, plan, 1).run(400.0)


def _without_bytes(world):
    return [event for event in _told(world, e.ContributionArrived) if event.displacement is None]


def test_late_offers_take_no_time_of_a_thin_line_are_refused_for_their_age_and_are_no_payloads():
    world = _thin(1.25)
    left = _without_bytes(world)
    assert len(left) > 100
    refused = {x.contribution.payload: x.reason for x in _asked(world, f.RefuseContribution)}
    assert {refused[event.contribution.payload] for event in left} <= {
        RefusalReason.LATE,
        RefusalReason.STALE_BASE,
        RefusalReason.ALREADY_MERGED,
    }
    pulled = len(_told(world, e.ContributionArrived)) - len(left)
    assert sum(world.statistics.summary()["traffic"]["payloads_up"]) == pulled
    assert pulled <= 4 * (400 / 1.25 + 1), "a line carries one payload after the other"


def test_a_thin_line_that_pulls_late_offers_keeps_islands_apart(monkeypatch):
    live = _thin(1.25).statistics.summary()
    monkeypatch.setattr(Links, "_is_outdated", lambda *_: False)
    pulls_all = _thin(1.25).statistics.summary()
    assert live["merges"] > 1.2 * pulls_all["merges"]
    assert live["contributors_mean"] > 1.5 * pulls_all["contributors_mean"]


def test_a_line_with_room_carries_every_offer():
    assert not _without_bytes(_thin(0.5))


def test_an_offer_is_too_old_even_if_the_newer_version_was_lost_on_its_way():
    world = World(sample_policy(4, steps=200), replace(EVEN, publication_loss=0.2), seed=3).run()
    assert _without_bytes(world)
    assert world.finished.outcome is JobOutcome.COMPLETED
