"""Extra compute: decoupled's published row follows from one stated assumption, elastic's from none of ours but a fit."""

from __future__ import annotations

import pytest

from orchestrator.simulation import scavenging
from orchestrator.simulation.scavenging import COMES_AND_GOES, CROSSING, HALFWAY


@pytest.fixture(scope="module")
def rows():
    return list(scavenging.rows(seed=0))


def closed_form(extra: float) -> float:
    """s + (1 − s)/(1 + x): without failures."""
    return scavenging.ARRIVES + (1.0 - scavenging.ARRIVES) / (1.0 + extra)


def _of(rows, system, pattern=HALFWAY, all_reduce=None):
    chosen = [r for r in rows if (r["system"], r["pattern"], r["all_reduce"]) == (system, pattern, all_reduce)]
    assert len(chosen) == len(scavenging.EXTRAS)
    return chosen


def test_decoupled_is_near_every_published_cell(rows):
    for row in _of(rows, "decoupled"):
        assert row["wall_clock"] == pytest.approx(row["published"], abs=0.03)


def test_the_fleet_agrees_with_the_closed_form(rows):
    for row in _of(rows, "decoupled"):
        assert row["wall_clock"] == pytest.approx(closed_form(row["extra"]), abs=0.005)


def test_capacity_that_comes_and_goes_does_not_fit(rows):
    last = _of(rows, "decoupled", COMES_AND_GOES)[-1]
    assert last["wall_clock"] == pytest.approx(1 / (1 + last["extra"] / 2), abs=0.02)
    assert last["wall_clock"] < 0.62 - 0.1


def test_stalls_alone_do_not_explain_elastics_row(rows):
    for row in _of(rows, "elastic-data-parallel"):
        assert 0.1 < row["published"] - row["wall_clock"] < 0.3


def test_an_all_reduce_across_the_boundary_does(rows):
    fitted = _of(rows, "elastic-data-parallel", all_reduce=CROSSING)
    assert len({row["c"] for row in fitted}) == 1
    assert fitted[0]["c"] == pytest.approx(2.1, abs=0.1)
    for row in fitted:
        assert row["wall_clock"] == pytest.approx(row["published"], abs=0.035)


def test_there_are_as_many_rows_as_announced(rows):
    assert len(rows) == scavenging.COUNT
