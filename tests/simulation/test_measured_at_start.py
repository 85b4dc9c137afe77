"""Seeds of the swarm whose jobs are measured before their first merge, in which all that the swarm checks still holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.swarm import trial
from tests.swarm.configurations import Configuration, draw


def measured_at_start(seed: int) -> Configuration:
    drawn = draw(seed)
    evaluation = replace(drawn.policy.evaluation, at_start=True)
    return replace(drawn, policy=replace(drawn.policy, evaluation=evaluation))


@pytest.mark.parametrize(("seed", "deaths"), [*((seed, 0) for seed in range(8)), *((seed, 3) for seed in range(4))])
def test_a_job_that_is_measured_at_its_start_survives_its_seed(
    monkeypatch: pytest.MonkeyPatch, seed: int, deaths: int
) -> None:
    monkeypatch.setattr(trial, "draw", measured_at_start)
    assert "Evaluate" in trial.run(seed, deaths).seen
