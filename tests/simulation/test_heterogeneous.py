"""The published goodputs of mixed hardware come out of the core: nothing of them is written in."""

from __future__ import annotations

import pytest

from orchestrator.simulation import published
from orchestrator.simulation.published import MERGED, STEPPING


@pytest.fixture(scope="module")
def cells():
    return {(cell.row, cell.column): cell for cell in published.heterogeneous(seed=0)}


def test_waiting_for_everyone_costs_what_is_published(cells):
    stepping, merged = cells["K = 8, waiting", STEPPING], cells["K = 8, waiting", MERGED]
    assert stepping.ours == pytest.approx(stepping.published, abs=0.02)
    assert merged.ours == pytest.approx(stepping.ours, abs=0.01), "what is lost is waiting, not work"
    assert cells["K = 8, waiting", "islands in a merge / 8"].ours == 1.0


@pytest.mark.parametrize("setting", ["K = 1", "K = 1 with grace"])
def test_with_a_quorum_of_one_all_is_merged(cells, setting):
    stepping = cells[setting, STEPPING]
    assert stepping.ours == pytest.approx(stepping.published, abs=0.01)
    assert cells[setting, MERGED].ours == pytest.approx(1.0, abs=0.01)
    assert cells[setting, "islands in a merge / 8"].ours > 6.5 / 8


def test_with_the_papers_adoption_full_speed_and_merged_tokens_are_two_things(cells):
    assert cells["K = 1, replace", STEPPING].ours == pytest.approx(1.0, abs=0.01)
    assert cells["K = 1, replace", MERGED].ours < 0.2


def test_noise_from_step_to_step_is_hidden_by_overlap(cells):
    assert cells["K = 8, waiting", MERGED].ours + 0.05 < cells[published.NOISE, MERGED].ours < 0.95


def test_the_speeds_are_those_of_the_paper():
    times = published.step_times()
    fast, slow = times[:4], times[4:]
    assert sum(slow) / sum(fast) == pytest.approx(1.18)
    assert max(fast) / min(fast) == pytest.approx(1.1 / 0.9)
