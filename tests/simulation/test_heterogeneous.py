"""The published goodputs of mixed hardware come out of the core: nothing of them is written in."""

from __future__ import annotations

import pytest

from orchestrator.simulation import goodput_table


@pytest.fixture(scope="module")
def rows():
    return {row["setting"]: row for row in goodput_table.rows(seed=0)}


def test_waiting_for_everyone_costs_what_is_published(rows):
    row = rows["K = 8, waiting"]
    assert row["goodput"] == pytest.approx(row["published"], abs=0.02)
    assert row["goodput"] == pytest.approx(row["stepping"], abs=0.01), "what is lost is waiting, not work"
    assert row["contributors_mean"] == 8.0


@pytest.mark.parametrize("setting", ["K = 1", "K = 1 with grace"])
def test_with_a_quorum_of_one_all_is_merged(rows, setting):
    row = rows[setting]
    assert row["goodput"] == pytest.approx(row["published"], abs=0.01)
    assert row["stepping"] == pytest.approx(1.0, abs=0.01)
    assert row["contributors_mean"] > 6.5


def test_with_the_papers_adoption_full_speed_and_merged_tokens_are_two_things(rows):
    row = rows["K = 1, replace"]
    assert row["stepping"] == pytest.approx(1.0, abs=0.01)
    assert row["goodput"] < 0.2


def test_noise_from_step_to_step_is_hidden_by_overlap(rows):
    assert rows["K = 8, waiting"]["goodput"] + 0.05 < rows[goodput_table.NOISE]["goodput"] < 0.95


def test_the_speeds_are_those_of_the_paper():
    times = goodput_table.step_times()
    fast, slow = times[:4], times[4:]
    assert sum(slow) / sum(fast) == pytest.approx(1.18)
    assert max(fast) / min(fast) == pytest.approx(1.1 / 0.9)
