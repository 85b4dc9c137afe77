"""The simulator against closed forms, within 0.5 pp where they apply; and where they do not, that they do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.elastic import DuringStall
from orchestrator.simulation import oracles
from orchestrator.simulation.distributions import UNITS, Constant, LogNormal, Uniform
from orchestrator.simulation.fleet import FleetPlan, System
from orchestrator.simulation.fleet_world import simulate

STDERR, MARGIN = 0.001, 0.005


def _simulated(plan, seed=1):
    """Long enough for a standard error of 0.1 pp, so that a difference of 0.5 pp is one of the models."""
    outcome = simulate(replace(plan, duration=oracles.duration_for(plan, STDERR)), seed)
    assert outcome.stderr < 1.6 * STDERR
    return outcome


def _plan(chips, system=System.DECOUPLED, learners=1, **changes):
    return FleetPlan(chips, 1.0, system, learners, **changes)


SETTINGS = {
    "no elasticity, 150k": _plan(150_000, System.DATA_PARALLEL),
    "no elasticity, 2.4M": _plan(2_400_000, System.DATA_PARALLEL),
    "no elasticity, another restart and rate": _plan(
        40_000, System.DATA_PARALLEL, restart=Uniform(200.0, 400.0), mtbi_chip=UNITS["y"] / 2
    ),
    "elastic, 300k": _plan(300_000, System.ELASTIC_DATA_PARALLEL),
    "elastic, 1.2M, D and U apart": _plan(
        1_200_000, System.ELASTIC_DATA_PARALLEL, stall_down=Constant(18.0), stall_up=Constant(5.0)
    ),
    "elastic, small slices away for long": _plan(
        600_000, System.ELASTIC_DATA_PARALLEL, chips_per_slice=16, return_time=LogNormal(4 * 3600.0, 0.5)
    ),
    "decoupled, M = 4, 1.2M": _plan(1_200_000, learners=4),
    "decoupled, M = 16, 2.4M": _plan(2_400_000, learners=16),
    "failures join a stall": _plan(300_000, during_stall=DuringStall.JOINS),
    "failures begin it anew": _plan(300_000, System.DATA_PARALLEL, during_stall=DuringStall.RESTARTS),
    "elastic, failures begin it anew": _plan(200_000, during_stall=DuringStall.RESTARTS),
    "elastic, failures and returns begin it anew": _plan(
        200_000, during_stall=DuringStall.RESTARTS, returns_join=False
    ),
    "elastic, returns begin it anew": _plan(600_000, returns_join=False),
}


@pytest.mark.parametrize("plan", SETTINGS.values(), ids=SETTINGS.keys())
def test_the_simulator_agrees_with_the_closed_form(plan):
    assert _simulated(plan).goodput == pytest.approx(oracles.goodput(plan), abs=MARGIN)


def uptime(plan: FleetPlan) -> float:
    """The part of time in which at least one of M independent learners runs: 1 − (1 − u)^M."""
    return float(1.0 - (1.0 - oracles.running(plan)) ** plan.learner_count)


def test_uptime_is_that_of_independent_learners():
    plan = _plan(2_400_000, learners=4)
    assert _simulated(plan).uptime == pytest.approx(uptime(plan), abs=MARGIN)
    assert uptime(plan) >= 0.99


def test_the_form_with_u_on_both_sides_is_solved():
    rate, down, up = 0.02, 18.0, 5.0
    u = oracles.elastic_running(rate, down, up)
    assert u == pytest.approx(1.0 / (1.0 + rate * (down + u * up)), abs=1e-12)
    assert oracles.elastic(rate, down, up, 0.03) == pytest.approx(u * (1.0 - 0.03 * u), abs=1e-12)
    assert oracles.elastic_running(0.0, down, up) == pytest.approx(1.0)
    assert oracles.no_elasticity(rate, 50.0) == pytest.approx(0.5)


def test_where_many_slices_are_away_they_do_not_fail_and_the_form_is_too_low():
    plan = _plan(600_000, chips_per_slice=1024, return_time=Constant(2 * 3600.0))
    assert 0.005 < _simulated(plan).goodput - oracles.goodput(plan) < 0.05


def test_where_slices_return_within_their_own_stall_the_form_is_too_low():
    plan = _plan(1_200_000, return_time=Constant(5.0))
    assert _simulated(plan).goodput - oracles.goodput(plan) > 0.05
    assert _simulated(plan).goodput == pytest.approx(oracles.no_elasticity(oracles.rate_of(plan), 13.1), abs=MARGIN)
