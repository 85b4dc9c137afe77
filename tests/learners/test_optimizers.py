from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from learners.contract import tokens_per_schedule_step
from learners.optimizers import inner, schedules
from orchestrator.config import parse_job

SECTION = {
    "lr": 0.1,
    "lr_final_ratio": 0.2,
    "warmup_steps": 10,
    "beta1": 0.9,
    "beta2": 0.95,
    "weight_decay": 0.1,
    "clip_norm": 1.0,
}


def test_the_learning_rate_is_optaxs_warm_up_and_cosine():
    reference = optax.warmup_cosine_decay_schedule(
        init_value=0.0, peak_value=0.1, warmup_steps=10, decay_steps=100, end_value=0.02
    )
    for step in range(10, 130):
        assert schedules.learning_rate(SECTION, 100, step) == pytest.approx(float(reference(step)), rel=1e-5)
    for step in range(10):  # ours trains from the first step on: its step 0 is optax's step 1
        assert schedules.learning_rate(SECTION, 100, step) == pytest.approx(float(reference(step + 1)), rel=1e-5)


def test_without_warm_up_and_past_the_horizon_the_rate_is_still_defined():
    section = SECTION | {"warmup_steps": 0}
    assert schedules.learning_rate(section, 1, 0) == pytest.approx(0.1)
    assert schedules.learning_rate(section, 100, 10**6) == pytest.approx(0.02)


def test_two_scaled_updates_equal_optaxs_own_adamw_after_clipping():
    parameters = {"embed": jnp.ones((3, 2)), "blocks.0.up": jnp.full((2, 2), 2.0), "gain": jnp.ones(2)}
    decays = {"embed": False, "blocks.0.up": True, "gain": False}
    reference = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(0.1, b1=0.9, b2=0.95, weight_decay=0.1, mask=decays)
    )
    ours = inner.build(SECTION)
    expected, got = parameters, parameters
    expected_state, got_state = reference.init(parameters), ours.init(parameters)
    generator = np.random.default_rng(0)
    for scale in (5.0, 0.1):
        gradient = {
            n: jnp.asarray(scale * generator.standard_normal(a.shape), jnp.float32) for n, a in parameters.items()
        }
        updates, expected_state = reference.update(gradient, expected_state, expected)
        expected = optax.apply_updates(expected, updates)
        updates, got_state = ours.update(gradient, got_state, got)
        got = {name: got[name] - 0.1 * updates[name] for name in got}
    for name in parameters:
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-6)


@pytest.mark.parametrize("budget", [{"steps": 70}, {"tokens": 1_000_000}])
def test_the_horizon_from_plain_data_is_the_specifications_own(budget):
    job = parse_job({"islands": [{"node_group": "a", "count": 3}, {"node_group": "b"}], "budget": budget})
    assert schedules.horizon_steps(job.model_dump(mode="json")) == job.horizon_steps


def test_a_step_of_the_schedule_is_one_of_every_island_that_the_job_begins_with(make_job) -> None:
    spec = make_job()
    assert tokens_per_schedule_step(spec) == parse_job(spec).tokens_per_schedule_step == 2 * 4 * 32
