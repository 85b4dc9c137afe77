"""The protocol level: the same goodput as the fleet level where both run, and islands that wait where they should."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.simulation import protocol, run, spec
from orchestrator.simulation.plan import Capacity
from orchestrator.simulation.world import World

QUICK_LINKS = {"latency": 0, "bandwidth": "1Tbps", "parameters": 1_000_000}
FLEET_600K = {"chips": 600_000, "learners": 4}
SETTINGS = {
    "two learners": ({"chips": 300_000, "learners": 2}, {}, {}),
    "a quorum of two": (FLEET_600K, {"quorum": 2}, {}),
    "a quorum of all": (FLEET_600K, {"quorum": 4}, {}),
    "long stalls": ({**FLEET_600K, "stall_down": 60, "stall_up": 40}, {}, {}),
    "a long interval": (FLEET_600K, {"interval_steps": 48, "fragments": 12}, {}),
    "slow steps": ({"chips": 1_200_000, "learners": 8}, {"interval_steps": 8}, {"step_time": 4}),
    "more failures": ({"chips": 1_200_000, "learners": 4}, {}, {}),
    "stalls and steps by chance": (
        {**FLEET_600K, "stall_down": {"exponential": 20}, "return_time": {"lognormal": {"median": "5min", "sigma": 1}}},
        {},
        {"step_time": {"uniform": [0.8, 1.2]}},
    ),
}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_both_levels_give_the_same_goodput(setting):
    fleet, synchroniser, steps = setting
    document = {
        "duration": "1800s",
        "level": "both",
        "systems": ["decoupled"],
        "fleet": fleet,
        "steps": steps,
        "synchroniser": {"fragments": 8, "interval_steps": 24, **synchroniser},
        "links": QUICK_LINKS,
    }
    fleet_row, protocol_row = run.simulate(spec.parse(document)).rows
    assert fleet_row["goodput"] < 0.95, "nothing failed, so nothing is compared"
    assert abs(protocol_row["goodput"] - fleet_row["goodput"]) < 0.01
    assert 1.0 < protocol_row["contributors_mean"] <= fleet["learners"]


def _outcome(world, plan, stop=260.0):
    return protocol.run(world, 60.0, stop, protocol.at_full_speed(plan))


def test_without_failures_everything_is_merged():
    plan = protocol.plan((1.0, 1.1, 0.9), step_jitter_ratio=0.05)
    outcome = _outcome(World(protocol.policy(3, fragments=4), plan, 1), plan, stop=660.0)
    assert outcome.goodput == pytest.approx(1.0, abs=0.01)
    assert outcome.uptime > 0.99


def test_an_island_at_half_capacity_gives_half_its_tokens():
    plan = protocol.plan((1.0, 1.0), step_jitter_ratio=0.05)
    policy = protocol.policy(2, fragments=4)
    plan = replace(plan, capacity=(Capacity(0.5, policy.islands[0].island, 0.5),))
    assert _outcome(World(policy, plan, 1), plan, stop=660.0).goodput == pytest.approx(0.75, abs=0.02)


@pytest.mark.parametrize("overlap", [0, 2])
def test_islands_in_lock_step_go_at_the_pace_of_the_slowest(overlap):
    plan = protocol.plan((1.0, 1.0, 1.25))
    policy = protocol.policy(3, quorum=3, fragments=4, overlap_steps=overlap, grace_cap_steps=None)
    full = 2.0 + 1.0 / 1.25
    outcome = _outcome(protocol.LockStepWorld(policy, plan, 1), plan)
    assert outcome.goodput == pytest.approx(3.0 / 1.25 / full, abs=0.02)
    assert outcome.contributors_mean == 3.0


def test_islands_that_do_not_wait_lose_nothing_to_the_slowest():
    plan = protocol.plan((1.0, 1.0, 1.25))
    policy = protocol.policy(3, quorum=3, fragments=4, grace_cap_steps=None)
    assert _outcome(World(policy, plan, 1), plan).trained_ratio == pytest.approx(1.0, abs=0.03)


def test_islands_in_lock_step_stand_still_while_one_of_them_does():
    plan = protocol.plan((1.0,) * 3)
    policy = protocol.policy(3, quorum=3, fragments=4, overlap_steps=2, grace_cap_steps=None)
    still = tuple(Capacity(at, policy.islands[2].island, ratio) for at, ratio in ((100.0, 0.0), (150.0, 1.0)))
    plan = replace(plan, capacity=still)
    waiting = _outcome(protocol.LockStepWorld(policy, plan, 1), plan)
    alone = _outcome(World(policy, plan, 1), plan)
    assert waiting.trained_ratio == pytest.approx(0.75, abs=0.05), "all three stand still for 50 s of 200 s"
    assert alone.trained_ratio == pytest.approx(1.0 - 50.0 / 200.0 / 3.0, abs=0.03)


def test_an_interrupted_run_tells_how_far_it_got():
    plan = protocol.plan((1.0, 1.0))

    def stop(ratio):
        if ratio > 0.5:
            raise KeyboardInterrupt

    world = World(protocol.policy(2, fragments=2, interval_steps=6), plan, 1)
    outcome = protocol.run(world, 20.0, 260.0, protocol.at_full_speed(plan), stop)
    assert 130.0 <= outcome.until < 260.0
    assert outcome.goodput > 0.9
