"""The goodput table: the published cells, the prediction, and what must hold between cells, at the preset's own error."""

from __future__ import annotations

import json
import math

import pytest

from orchestrator.simulation import goodput_table
from orchestrator.simulation.calibration import ELASTIC, NO_ELASTICITY, PREDICTED
from orchestrator.simulation.goodput_table import CHIPS, SYSTEMS, plans


@pytest.fixture(scope="module")
def rows():
    return goodput_table.run(seed=0)


def _cell(rows, learners, chips, system="decoupled"):
    (row,) = (r for r in rows if (r["system"], r["learners"], r["chips"]) == (system, learners, chips))
    return row


def test_there_are_thirty_cells_as_plain_data(rows):
    assert [(r["system"], r["learners"], r["chips"]) for r in rows] == [
        (str(system), learners, chips) for system, learners in SYSTEMS for chips in CHIPS
    ]
    assert json.loads(json.dumps(rows)) == rows
    assert all(set(r) == {"system", "learners", "chips", "goodput", "stderr", "uptime"} for r in rows)
    assert all(0.0 < r["goodput"] < 1.0 and 0.0 < r["uptime"] <= 1.0 for r in rows)


def test_every_cell_is_known_to_half_a_point(rows):
    """95 % with 64 batches: Student's t is 2.00."""
    assert max(r["stderr"] for r in rows) * 2.00 <= 0.005


def test_the_published_cells_are_met(rows):
    errors = [
        _cell(rows, 1, chips, system)["goodput"] - goodput
        for system, published in (("data-parallel", NO_ELASTICITY), ("elastic-data-parallel", ELASTIC))
        for chips, goodput in published.items()
    ]
    assert math.fsum(map(abs, errors)) / len(errors) <= 0.02
    learners, chips, goodput = PREDICTED
    assert abs(_cell(rows, learners, chips)["goodput"] - goodput) <= 0.02


def test_goodput_depends_on_chips_per_learner_only(rows):
    """Within three standard errors of the difference, and whole slices: 586 do not divide by 16."""
    groups: dict[float, list] = {}
    for row in rows:
        if row["system"] != "data-parallel":
            groups.setdefault(row["chips"] / row["learners"], []).append(row)
    assert sum(len(group) > 1 for group in groups.values()) >= 7
    for group in groups.values():
        for one in group:
            for other in group:
                error = math.hypot(one["stderr"], other["stderr"])
                assert abs(one["goodput"] - other["goodput"]) <= 3.0 * error + 0.001


def test_with_four_learners_somebody_always_trains(rows):
    assert min(r["uptime"] for r in rows if r["learners"] >= 4) >= 0.99


def test_all_systems_of_one_size_see_the_same_time():
    durations = {}
    for plan in plans():
        durations.setdefault(plan.chips, set()).add(plan.duration)
    assert all(len(found) == 1 for found in durations.values())


def test_progress_hears_of_every_cell_and_the_seed_decides():
    heard = []
    coarse = goodput_table.run(seed=4, stderr=0.02, progress=heard.append)
    assert len(heard) == 30
    assert goodput_table.run(seed=4, stderr=0.02) == coarse
    assert goodput_table.run(seed=5, stderr=0.02) != coarse
