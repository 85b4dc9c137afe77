"""The outer optimizers take the same steps as optax, and as the formulas in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_model
import pytest

from orchestrator.core.vocabulary import FragmentId, Version
from orchestrator.errors import ConfigurationError
from orchestrator.parameters import outer_optimizer
from orchestrator.parameters.outer_optimizer import (
    STEPS_COUNTED_MAX,
    Adam,
    Kind,
    Momentum,
    Nesterov,
    OuterOptimizer,
    Sgd,
    initial_state,
    step,
)
from orchestrator.parameters.outer_state import Averaging, OuterState, OuterStep
from orchestrator.parameters.tensors import Array
from orchestrator.parameters.wire_format import displacement
from orchestrator.specification.sections import MOMENT_COUNTS, OuterOptimizerSection

STEPS = 200
ALL = [Nesterov(0.7, 0.9), Momentum(0.7, 0.9), Sgd(0.7), Adam(0.01, 0.9, 0.99, 1e-8)]


def outer_gradients(size: int) -> Iterator[Array]:
    """Noise round a direction that turns slowly, as merged displacements do."""
    generator = np.random.default_rng(3)
    for number in range(STEPS):
        yield (generator.standard_normal(size) + 2 * np.sin(0.05 * number + np.arange(size))).astype(np.float32)


@pytest.mark.parametrize(
    ("ours", "reference"),
    [
        (Nesterov(lr=0.7, decay=0.9), optax.sgd(0.7, momentum=0.9, nesterov=True)),
        (Nesterov(lr=0.8, decay=0.6), optax.sgd(0.8, momentum=0.6, nesterov=True)),
        (Nesterov(lr=1.0, decay=0.0), optax.sgd(1.0)),
        (Momentum(lr=0.7, decay=0.9), optax.sgd(0.7, momentum=0.9)),
        (Momentum(lr=0.3, decay=0.0), optax.sgd(0.3)),
        (Sgd(lr=0.7), optax.sgd(0.7)),
        (Adam(0.01, 0.9, 0.999, 1e-8), optax.adam(0.01)),
        (Adam(0.3, 0.5, 0.95, 0.1), optax.adam(0.3, b1=0.5, b2=0.95, eps=0.1)),
        (Adam(0.3, 0.0, 0.0, 1e-3), optax.adam(0.3, b1=0.0, b2=0.0, eps=1e-3)),
    ],
    ids=[
        "nesterov",
        "nesterov-light",
        "nesterov-without-momentum",
        "momentum",
        "momentum-of-0",
        "sgd",
        "adam",
        "adam-other-settings",
        "adam-without-memory",
    ],
)
def test_equals_optax_over_many_steps(ours: OuterOptimizer, reference: optax.GradientTransformation) -> None:
    parameters = np.linspace(-1, 1, 33, dtype=np.float32)
    state = initial_state(ours, parameters.size)
    theirs, its_state = jnp.asarray(parameters), reference.init(jnp.asarray(parameters))
    for gradient in outer_gradients(33):
        decrement, state = step(ours, gradient, state)
        parameters = parameters - decrement
        updates, its_state = reference.update(jnp.asarray(gradient), its_state, theirs)
        theirs = optax.apply_updates(theirs, updates)
        np.testing.assert_allclose(parameters, theirs, rtol=2e-6, atol=2e-4)
    assert parameters.dtype == state.dtype == np.float32


SHAPES = {"embed": (7, 5), "blocks.w": (6, 11), "blocks.b": (3,)}
CLIP = 2.5


@pytest.mark.parametrize("clip_norm", [None, CLIP], ids=["unclipped", "clipped"])
@pytest.mark.parametrize(
    ("ours", "reference"),
    [
        (Nesterov(0.7, 0.9), optax.sgd(0.7, momentum=0.9, nesterov=True)),
        (Momentum(0.2, 0.9), optax.sgd(0.2, momentum=0.9)),
        (Sgd(0.7), optax.sgd(0.7)),
        (Adam(0.02, 0.9, 0.999, 1e-8), optax.adam(0.02)),
    ],
    ids=["nesterov", "momentum", "sgd", "adam"],
)
def test_merges_of_a_fragment_step_as_optax_does_element_by_element(
    ours: OuterOptimizer, reference: optax.GradientTransformation, clip_norm: float | None
) -> None:
    """150 merges by the kernels, against optax in float64 on the average that the merges' displacements have."""
    generator = np.random.default_rng(5)
    first = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    outer = OuterState(first, (tuple(SHAPES),), OuterStep(Averaging.MEAN, ours, clip_norm=clip_norm))
    clip = [] if clip_norm is None else [optax.clip_by_global_norm(clip_norm)]
    clipped = 0
    with jax.enable_x64(True):
        chained = optax.chain(*clip, reference)
        theirs = {name: jnp.asarray(array, jnp.float64) for name, array in first.items()}
        its_state = chained.init(theirs)
        for version in range(1, 151):
            anchor = outer.fragment(FragmentId(0))
            scale = 0.1 + 0.3 * (version % 3)
            moved = [
                {
                    name: a + np.float32(scale) * generator.standard_normal(a.shape).astype(np.float32)
                    for name, a in anchor.items()
                }
                for _ in range(2)
            ]
            inputs = [
                (displacement(anchor, each, version - 1), weight)
                for each, weight in zip(moved, (0.25, 0.75), strict=True)
            ]
            outer.merge(FragmentId(0), Version(version), inputs)
            decoded = [content.all_decoded() for content, _ in inputs]
            mean = {
                name: 0.25 * jnp.float64(decoded[0][name]) + 0.75 * jnp.float64(decoded[1][name]) for name in SHAPES
            }
            norm, state = float(optax.tree.norm(mean)), outer.state(FragmentId(0))
            assert (state.gradient_norm is None) == (clip_norm is None)
            if clip_norm is not None:
                assert state.gradient_norm == pytest.approx(norm, rel=1e-6)
                clipped += norm > clip_norm
            updates, its_state = chained.update(mean, its_state, theirs)
            theirs = optax.apply_updates(theirs, updates)
            for name, array in state.parameters.items():
                np.testing.assert_allclose(array, theirs[name], rtol=1e-5, atol=2e-5)
    assert clipped == (0 if clip_norm is None else 100)


def test_nesterov_equals_its_formula_in_float64() -> None:
    ours = Nesterov(lr=0.7, decay=0.9)
    parameters = np.linspace(-1, 1, 9, dtype=np.float32)
    momentum = initial_state(ours, 9)
    exact, exact_momentum = parameters.tolist(), [0.0] * 9
    for gradient in outer_gradients(9):
        decrement, momentum = step(ours, gradient, momentum)
        parameters = parameters - decrement
        exact, exact_momentum = plain_model.nesterov(exact, gradient.tolist(), exact_momentum, 0.7, 0.9)
    np.testing.assert_allclose(parameters, exact, rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(momentum, exact_momentum, rtol=1e-5, atol=1e-4)


def test_adam_equals_its_formula_in_float64() -> None:
    ours = Adam(0.3, 0.9, 0.999, 1e-8)
    parameters, state = np.linspace(-1, 1, 9, dtype=np.float32), initial_state(ours, 9)
    exact, mean, square = parameters.astype(np.float64), np.zeros(9), np.zeros(9)
    for t, gradient in enumerate(outer_gradients(9), 1):
        decrement, state = step(ours, gradient, state)
        parameters = parameters - decrement
        mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient.astype(np.float64) ** 2
        exact -= 0.3 * (mean / (1 - 0.9**t)) / (np.sqrt(square / (1 - 0.999**t)) + 1e-8)
        np.testing.assert_allclose(parameters, exact, rtol=1e-5, atol=1e-5)
    assert state[-1] == STEPS


def test_adam_with_moments_that_are_lost_begins_as_at_its_first_step() -> None:
    """Zeroed moments without a zeroed count would divide by a correction of 1, and take steps a tenth as long."""
    ours = Adam(0.01, 0.9, 0.999, 1e-8)
    state = initial_state(ours, 4)
    for gradient in outer_gradients(4):
        _, state = step(ours, gradient, state)
    again, state = step(ours, gradient, initial_state(ours, 4))
    np.testing.assert_allclose(np.abs(again), 0.01, rtol=1e-5)  # ±lr, as the first step of Adam is
    assert state[-1] == 1


def test_the_count_of_steps_stays_where_float32_can_no_longer_count() -> None:
    state = initial_state(ALL[3], 1)
    state[-1] = STEPS_COUNTED_MAX
    decrement, after = step(ALL[3], np.ones(1, np.float32), state)
    assert after[-1] == STEPS_COUNTED_MAX
    assert np.isfinite(decrement).all()


@pytest.mark.parametrize("ours", ALL)
def test_a_step_leaves_its_arguments_alone(ours: OuterOptimizer) -> None:
    gradient = np.arange(10, dtype=np.float32)
    state = initial_state(ours, 10) + np.float32(0.5)
    kept = gradient.copy(), state.copy()
    step(ours, gradient, state)
    for array, before in zip((gradient, state), kept, strict=True):
        np.testing.assert_array_equal(array, before)


def test_plain_sgd_at_rate_one_lands_on_the_average_of_the_islands() -> None:
    anchor, islands = np.float32([1.0, 2.0]), np.float32([0.5, 3.0])
    decrement, _ = step(Sgd(lr=1.0), anchor - islands, initial_state(Sgd(1.0), 2))
    np.testing.assert_array_equal(anchor - decrement, islands)


def settings_of(**fields: Any) -> OuterOptimizerSection:
    return OuterOptimizerSection.model_validate(fields)


def test_every_kind_of_the_job_specification_is_an_optimizer_with_as_many_moments() -> None:
    made = {
        kind: outer_optimizer.of(settings_of(kind=kind, lr=0.5, momentum=0.25, beta1=0.75)) for kind in MOMENT_COUNTS
    }
    assert made == {
        "sgd": Sgd(0.5),
        "momentum": Momentum(0.5, 0.25),
        "nesterov": Nesterov(0.5, 0.25),
        "adam": Adam(0.5, 0.75, 0.999, 1e-8),
    }
    assert {kind: optimizer.moment_count for kind, optimizer in made.items()} == MOMENT_COUNTS
    assert {kind.name.lower(): kind for kind in Kind} == {kind: made[kind].rule(0).kind for kind in made}
    assert settings_of(kind="adam").lr == 0.005
    unknown = OuterOptimizerSection.model_construct(kind="lamb")
    with pytest.raises(ConfigurationError, match="Set it to one of sgd, momentum, nesterov, adam"):
        outer_optimizer.of(unknown)


@pytest.mark.parametrize("optimizer", ALL)
def test_a_slowed_optimizer_takes_the_same_step_shorter_and_at_full_rate_is_itself(optimizer: OuterOptimizer) -> None:
    gradient, state = np.ones(3, np.float32), initial_state(optimizer, 3)
    decrement, after = step(optimizer, gradient, state)
    shorter, after_shorter = step(outer_optimizer.slowed(optimizer, 0.25), gradient, state)
    np.testing.assert_allclose(shorter, decrement * 0.25, rtol=1e-6)
    np.testing.assert_array_equal(after_shorter, after)
    assert outer_optimizer.slowed(optimizer, 1.0) == optimizer
