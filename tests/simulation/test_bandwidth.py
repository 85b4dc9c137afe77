"""Bandwidth: the closed forms agree with a dumb simulation of steps and a link, and with what is published."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.simulation import bandwidth
from orchestrator.simulation.bandwidth import (
    PUBLISHED,
    SYSTEMS,
    Exchange,
    Traffic,
    exchange_of,
    mean_gbps,
    needed,
    utilisation,
)

PAPER = Traffic()


def _stepped(exchange: Exchange, bits_per_second: float, exchanges: int = 2000) -> float:
    """Send one exchange after the other over a link, and stand still whenever one is not back in time."""
    now = free_at = stepping = 0.0
    for _ in range(exchanges):
        free_at = max(free_at, now) + exchange.bits / bits_per_second
        waited = max(0.0, free_at - (now + exchange.slack))
        now += exchange.gap + waited
        stepping += exchange.gap
    return stepping / now


@pytest.mark.parametrize("gbps", [0.2, 0.5, 0.9, 5.0, 60.0, 150.0, 300.0])
@pytest.mark.parametrize("system", SYSTEMS[:3])
def test_utilisation_is_what_a_link_gives_step_by_step(system, gbps):
    exchange = exchange_of(system, PAPER)
    assert utilisation(exchange, gbps * 1e9) == pytest.approx(_stepped(exchange, gbps * 1e9), abs=0.005)


@pytest.mark.parametrize("wanted", [0.5, 0.8, 0.95, 0.99])
@pytest.mark.parametrize("system", SYSTEMS[:3])
def test_what_is_needed_gives_what_was_wanted(system, wanted):
    exchange = exchange_of(system, replace(PAPER, round_trip_s=0.06))
    assert utilisation(exchange, needed(exchange, wanted)) == pytest.approx(wanted)


def test_the_published_figures_follow_from_the_stated_formulas():
    ratios = bandwidth.ratios(PAPER)
    assert ratios["data_parallel_gbps"] == pytest.approx(PUBLISHED["data_parallel_gbps"], rel=0.01)
    assert ratios["decoupled_gbps"] == pytest.approx(PUBLISHED["decoupled_gbps"], rel=0.01)
    assert ratios["ratio"] == pytest.approx(PUBLISHED["ratio"], rel=0.01)
    assert ratios["ratio_without_4_bit"] == pytest.approx(PUBLISHED["ratio_without_4_bit"], rel=0.01)


def test_ratios_do_not_depend_on_what_is_not_published():
    other = replace(PAPER, parameters=12e9, step_s=3.0)
    assert bandwidth.ratios(other)["ratio"] == pytest.approx(bandwidth.ratios(PAPER)["ratio"])


def test_the_12b_run_lies_in_the_published_range():
    wide = replace(PAPER, parameters=12e9, wire_bits=16.0, learners=4)
    for step_s in (1.6, 4.0):
        gbps = needed(exchange_of("decoupled", replace(wide, step_s=step_s)), 0.9) / 1e9
        assert 2.0 - 1e-9 <= gbps <= 5.0 + 1e-9


def test_routers_that_are_due_as_often_as_the_rest_cost_what_they_did():
    plain = exchange_of("decoupled", Traffic(fragments=24))
    mixture = exchange_of("decoupled", Traffic(fragments=24, router_parameters=1e7))
    assert mixture.bits == pytest.approx(plain.bits)


@pytest.mark.parametrize("of_routers", [4, 6, 8])
def test_the_mean_traffic_is_what_all_due_points_of_an_interval_carry(of_routers):
    traffic = Traffic(fragments=9, router_parameters=2e8, router_interval_steps=of_routers)
    due = (traffic.parameters - 2e8) + 2e8 * traffic.interval_steps / of_routers
    seconds = traffic.interval_steps * traffic.step_s
    assert mean_gbps("decoupled", traffic) * 1e9 == pytest.approx(due * traffic.wire_bits / seconds)


def test_decoupled_waits_for_nothing_at_any_bandwidth():
    assert utilisation(exchange_of("decoupled", PAPER), 1.0) == 1.0


def test_a_round_trip_longer_than_the_slack_cannot_be_bought_away():
    far = exchange_of("data-parallel", replace(PAPER, round_trip_s=10.0))
    assert needed(far, 0.9) == float("inf")


def test_a_fragment_that_leaves_during_the_backward_pass_needs_a_thinner_line():
    sparse = replace(PAPER, fragments=8, overlap_steps=1.0)
    early = replace(sparse, early_steps=bandwidth.BACKWARD_RATIO)
    needs = [needed(exchange_of("streaming-diloco", traffic), 0.95) for traffic in (sparse, early)]
    gap = sparse.interval_steps / sparse.fragments
    extra = gap * (1 / 0.95 - 1)
    assert needs[0] / needs[1] == pytest.approx((1 + 2 / 3 + extra) / (1 + extra))
    assert needed(exchange_of("diloco", replace(PAPER, early_steps=0.5)), 0.95) < needed(
        exchange_of("diloco", PAPER), 0.95
    )
