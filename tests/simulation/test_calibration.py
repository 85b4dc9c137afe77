"""The fit reproduces the parameters in use, sees ten cells only, and predicts the rest."""

from __future__ import annotations

import math

import pytest

from orchestrator.simulation import calibration, fleet
from orchestrator.simulation.calibration import ALTERNATIVES, ELASTIC, NO_ELASTICITY, PREDICTED, Candidate, fit
from orchestrator.simulation.distributions import Constant, Exponential
from orchestrator.simulation.fleet import FleetPlan


def test_the_fit_gives_the_parameters_that_the_simulator_uses():
    fitted = fit()
    assert round(fitted.restart, 1) == fleet.RESTART_S
    assert round(fitted.down, 1) == round(fitted.up, 1) == fleet.STALL_S
    assert fitted.parameter_count == 2
    plan = FleetPlan(150_000, 1.0)
    assert plan.restart == Constant(fleet.RESTART_S)
    assert plan.stall_down == plan.stall_up == Constant(fleet.STALL_S)
    assert plan.return_time == Exponential(fitted.return_s)


def test_ten_cells_are_met_and_the_eleventh_is_predicted():
    fitted = fit()
    assert len(fitted.errors_no_elasticity) + len(fitted.errors_elastic) == 10
    assert fitted.mean_absolute_error <= 2.0
    learners, chips, goodput = PREDICTED
    assert abs(fitted.elastic(chips / learners) - goodput) <= 0.02
    assert fitted.uptime(4, 2_400_000) >= 0.99


def test_published_cells_are_those_of_the_paper():
    assert [round(100 * g) for g in NO_ELASTICITY.values()] == [72, 57, 38, 27, 18]
    assert [round(100 * g) for g in ELASTIC.values()] == [88, 80, 69, 58, 40]


def test_no_alternative_with_as_few_parameters_is_better_by_more_than_noise():
    """And failures that begin a stall anew give the wrong shape altogether."""
    chosen = fit()
    found = {candidate.name: fit(candidate) for candidate in ALTERNATIVES}
    assert min(other.mean_absolute_error for other in found.values()) > chosen.mean_absolute_error - 0.1
    assert found["failures restart a stall"].mean_absolute_error > 3 * chosen.mean_absolute_error


def test_the_assumed_return_time_hardly_matters():
    errors = [fit(Candidate("", return_s=60.0 * minutes)).mean_absolute_error for minutes in (0, 15, 30, 45, 60)]
    assert max(errors) - min(errors) < 0.2


def test_least_squares_finds_what_made_the_cells():
    def model(parameters, chips):
        return math.exp(-chips * parameters[0]) + parameters[1]

    cells = {chips: model([0.7, 2.5], chips) for chips in range(1, 6)}
    assert calibration.least_squares(model, cells, [3.0, 1.0], 1e-6) == pytest.approx([0.7, 2.5], abs=1e-3)


def test_the_report_says_what_was_fitted_and_what_was_not():
    text = "\n".join(calibration.report())
    assert f"{fleet.RESTART_S:6.1f} s" in text
    assert f"{fleet.STALL_S:6.1f} s" in text
    assert "predicted, not fitted" in text
    for candidate in ALTERNATIVES:
        assert candidate.name in text
