"""The outer learning rate of a merge: warm-up by merges, a line down by tokens, carried in the order and on the tape."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.effects import MergeFragment
from orchestrator.core.fragment_round import outer_lr_ratio
from orchestrator.core.vocabulary import OuterRatePolicy, Version
from orchestrator.simulation.plan import WorldPlan, sample_policy
from orchestrator.simulation.world import World
from orchestrator.tape.codec import decode_tagged, to_json
from orchestrator.tape.replay import replay
from orchestrator.tape.schema import job_steps

FALLING = OuterRatePolicy(warmup_merges=4, final_ratio=0.2)


def test_the_rate_rises_with_a_fragments_merges_and_falls_with_the_jobs_tokens() -> None:
    rates = [outer_lr_ratio(FALLING, Version(version), 0, 1000) for version in range(1, 7)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    later = [outer_lr_ratio(FALLING, Version(9), tokens, 1000) for tokens in (0, 500, 1000, 2000)]
    assert later == pytest.approx([1.0, 0.6, 0.2, 0.2])


@given(st.integers(1, 10**6), st.integers(0, 10**18), st.integers(1, 10**18))
def test_without_a_schedule_the_rate_is_what_the_specification_says_to_the_bit(version, tokens, budget) -> None:
    assert outer_lr_ratio(OuterRatePolicy(), Version(version), tokens, budget) == 1.0


@given(st.integers(0, 50), st.floats(0, 1), st.integers(1, 100), st.integers(0, 10**6), st.integers(1, 10**6))
def test_the_ratio_is_one_and_never_rises_with_tokens(warmup, final, version, tokens, budget) -> None:
    policy = OuterRatePolicy(warmup, final)
    ratios = [outer_lr_ratio(policy, Version(version), spent, budget) for spent in (tokens, tokens + 1000)]
    assert 1 >= ratios[0] >= ratios[1] >= 0


def orders_of(policy: OuterRatePolicy) -> tuple[World, list[MergeFragment]]:
    job = replace(sample_policy(2, steps=60, interval=6, fragment_count=2), outer_rate=policy)
    world = World(job, WorldPlan(step_s=(1.0, 1.0)), 0).run()
    return world, [f for _, effects in job_steps(world.tape) for f in effects if isinstance(f, MergeFragment)]


def test_orders_of_a_whole_job_carry_the_rate_and_its_tape_replays() -> None:
    world, orders = orders_of(FALLING)
    assert [order.outer_lr_ratio for order in orders if order.fragment == 0][:3] == pytest.approx(
        [0.25, 0.5, 0.75], abs=0.25
    )
    assert orders[-1].outer_lr_ratio < 0.5
    assert replay(world.tape).exact


def test_an_order_at_the_full_rate_is_written_as_before_there_was_one() -> None:
    _, orders = orders_of(OuterRatePolicy())
    written = json.loads(to_json(orders[0]))
    assert "outer_lr_ratio" not in written
    assert decode_tagged(written) == orders[0]
    slowed = replace(orders[0], outer_lr_ratio=0.5)
    assert decode_tagged(json.loads(to_json(slowed))) == slowed
