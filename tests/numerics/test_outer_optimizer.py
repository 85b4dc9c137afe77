"""The outer optimizers take the same steps as optax, and as the formula in float64."""

import jax.numpy as jnp
import numpy as np
import optax
import plain_model
import pytest

from orchestrator.errors import ConfigurationError
from orchestrator.parameters import outer_optimizer
from orchestrator.parameters.outer_optimizer import Nesterov, Sgd

STEPS = 200


def outer_gradients(size):
    """Noise round a direction that turns slowly, as merged displacements do."""
    generator = np.random.default_rng(3)
    for step in range(STEPS):
        yield (generator.standard_normal(size) + 2 * np.sin(0.05 * step + np.arange(size))).astype(np.float32)


@pytest.mark.parametrize(
    ("ours", "reference"),
    [
        (Nesterov(lr=0.7, decay=0.9), optax.sgd(0.7, momentum=0.9, nesterov=True)),
        (Nesterov(lr=0.8, decay=0.6), optax.sgd(0.8, momentum=0.6, nesterov=True)),
        (Nesterov(lr=1.0, decay=0.0), optax.sgd(1.0)),
        (Sgd(lr=0.7), optax.sgd(0.7)),
    ],
    ids=["nesterov", "nesterov-light", "nesterov-without-momentum", "sgd"],
)
def test_equals_optax_over_many_steps(ours, reference):
    parameters = np.linspace(-1, 1, 33, dtype=np.float32)
    momentum = ours.initial_momentum(parameters)
    theirs, state = jnp.asarray(parameters), reference.init(jnp.asarray(parameters))
    for gradient in outer_gradients(33):
        decrement, momentum = ours.step(gradient, momentum)
        parameters = parameters - decrement
        updates, state = reference.update(jnp.asarray(gradient), state, theirs)
        theirs = optax.apply_updates(theirs, updates)
        np.testing.assert_allclose(parameters, theirs, rtol=2e-6, atol=2e-4)
    assert parameters.dtype == momentum.dtype == np.float32


def test_nesterov_equals_its_formula_in_float64():
    ours = Nesterov(lr=0.7, decay=0.9)
    parameters = np.linspace(-1, 1, 9, dtype=np.float32)
    momentum = ours.initial_momentum(parameters)
    exact, exact_momentum = parameters.tolist(), [0.0] * 9
    for gradient in outer_gradients(9):
        decrement, momentum = ours.step(gradient, momentum)
        parameters = parameters - decrement
        exact, exact_momentum = plain_model.nesterov(exact, gradient.tolist(), exact_momentum, 0.7, 0.9)
    np.testing.assert_allclose(parameters, exact, rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(momentum, exact_momentum, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("ours", [Nesterov(0.7, 0.9), Sgd(0.7)])
def test_a_step_leaves_its_arguments_alone_and_may_be_taken_in_parts(ours):
    gradient = np.arange(10, dtype=np.float32)
    momentum = ours.initial_momentum(gradient) + np.float32(0.5)
    kept = gradient.copy(), momentum.copy()
    whole, _ = ours.step(gradient, momentum)
    halves = [ours.step(gradient[s], momentum[s])[0] for s in (slice(0, 5), slice(5, 10))]
    np.testing.assert_array_equal(np.concatenate(halves), whole)
    for array, before in zip((gradient, momentum), kept, strict=True):
        np.testing.assert_array_equal(array, before)


def test_plain_sgd_at_rate_one_lands_on_the_average_of_the_islands():
    anchor, islands = np.float32([1.0, 2.0]), np.float32([0.5, 3.0])
    decrement, _ = Sgd(lr=1.0).step(anchor - islands, Sgd(1.0).initial_momentum(anchor))
    np.testing.assert_array_equal(anchor - decrement, islands)


def test_create_knows_the_kinds_of_the_job_specification_and_no_others():
    assert outer_optimizer.create("nesterov", 0.7, 0.9) == Nesterov(0.7, 0.9)
    assert outer_optimizer.create("sgd", 0.5, 0.9) == Sgd(0.5)
    with pytest.raises(ConfigurationError, match="Set it to 'nesterov' or 'sgd'"):
        outer_optimizer.create("adam", 0.7, 0.9)


@pytest.mark.parametrize("optimizer", [Nesterov(0.7, 0.9), Sgd(0.5)])
def test_a_slowed_optimizer_takes_the_same_step_shorter_and_at_full_rate_is_itself(optimizer) -> None:
    gradient, momentum = np.ones(3, np.float32), optimizer.initial_momentum(np.ones(3, np.float32))
    decrement, after = optimizer.step(gradient, momentum)
    shorter, after_shorter = outer_optimizer.slowed(optimizer, 0.25).step(gradient, momentum)
    np.testing.assert_allclose(shorter, decrement * 0.25, rtol=1e-6)
    np.testing.assert_array_equal(after_shorter, after)
    assert outer_optimizer.slowed(optimizer, 1.0) == optimizer
