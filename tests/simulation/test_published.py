"""Published tables: every cell, its published figure, the agreement, and what must hold between cells of goodput."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from orchestrator.simulation import published
from orchestrator.simulation.bandwidth import table_4
from orchestrator.simulation.published import CHIPS, SYSTEMS, TABLES, UPTIME, cells_of, plans


@pytest.fixture(scope="module")
def cells():
    return list(published.goodput(seed=0))


def _learners(cell):
    return int(cell.row.split()[-1]) if cell.row.startswith("decoupled") else 1


def _goodput(cells):
    return [cell for cell in cells if cell.column != UPTIME]


def test_all_thirty_published_cells_stand_beside_ours(cells):
    assert len(_goodput(cells)) == len(SYSTEMS) * len(CHIPS) == 30
    assert len(cells) == TABLES["goodput"].count
    assert all(0.0 < cell.ours < 1.0 and 0.0 < cell.published < 1.0 for cell in _goodput(cells))
    assert sum(cell.is_fitted for cell in _goodput(cells)) == 10


def test_every_cell_is_known_to_half_a_point(cells):
    """95 % with 64 batches: Student's t is 2.00."""
    assert max(cell.stderr for cell in _goodput(cells)) * 2.00 <= 0.005


def test_the_twenty_predicted_cells_are_within_a_point_on_average(cells):
    errors = [abs(cell.error) for cell in _goodput(cells) if not cell.is_fitted]
    assert len(errors) == 20
    assert math.fsum(errors) / len(errors) <= 0.01
    fitted = [abs(cell.error) for cell in _goodput(cells) if cell.is_fitted]
    assert math.fsum(fitted) / len(fitted) <= 0.02


def test_goodput_depends_on_chips_per_learner_only(cells):
    """Within three standard errors of the difference, and whole slices: 586 do not divide by 16."""
    groups: dict[float, list] = {}
    for cell in _goodput(cells):
        if cell.row != "one job, no elasticity":
            groups.setdefault(cell.at / _learners(cell), []).append(cell)
    assert sum(len(group) > 1 for group in groups.values()) >= 7
    for group in groups.values():
        for one in group:
            for other in group:
                error = math.hypot(one.stderr, other.stderr)
                assert abs(one.ours - other.ours) <= 3.0 * error + 0.001


def test_with_four_learners_somebody_always_trains(cells):
    assert min(cell.ours for cell in cells if cell.column == UPTIME and _learners(cell) >= 4) >= 0.99


def test_all_systems_of_one_size_see_the_same_time():
    durations = {}
    for plan in plans():
        durations.setdefault(plan.chips, set()).add(plan.duration)
    assert all(len(found) == 1 for found in durations.values())


def test_the_seed_decides():
    coarse = list(published.goodput(seed=4, stderr=0.02))
    assert list(published.goodput(seed=4, stderr=0.02)) == coarse
    assert list(published.goodput(seed=5, stderr=0.02)) != coarse


def test_table_4_of_streaming_diloco_is_met_if_a_fragment_leaves_during_the_backward_pass():
    table = TABLES["bandwidth"]
    cells = list(table.cells(0))
    assert len(cells) == table.count == 77
    assert table.agreement(cells).startswith("72 of 75 cells within a step")
    late = {(model, system, f"{100 * wanted:g} %"): ours for model, system, wanted, ours, _ in table_4(early_steps=0.0)}
    at_the_end = [
        replace(cell, ours=late[(*cell.row.split(", ", 1), cell.column)]) for cell in cells if not cell.is_fitted
    ]
    assert table.agreement(at_the_end).startswith("30 of 75 cells within a step")


@pytest.mark.parametrize("name", TABLES)
def test_a_table_has_the_cells_that_it_announced_and_is_read_back(name):
    table = TABLES[name]
    cells = list(table.cells(0))
    assert len(cells) == table.count
    assert len({(cell.row, cell.column) for cell in cells}) == len(cells)
    assert any(cell.published is not None for cell in cells)
    assert cells_of(json.loads(json.dumps(table.plain(cells, 0)))) == cells
    assert table.agreement(cells)
