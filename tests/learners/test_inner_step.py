"""The traced inner step, on a model small enough to do by hand; and states of every kind, cut into pieces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from learners import inner_step
from learners.contract import Batch
from learners.jax_trainer import JaxTrainer
from learners.model import Model
from learners.models.model import weighted_mean
from learners.optimizer_settings import WITH_MOMENTUM
from orchestrator.errors import ConfigurationError

SHAPES = {"embed": (16, 4), "wide": (128, 130), "gain": (4,)}
PIECES = (("embed[0:9]", "wide[:,0:60]"), ("gain", "embed[9:16]", "wide[:,60:130]"))


def initialise(seed: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {name: generator.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}


def loss(parameters: Mapping[str, jax.Array], tokens: jax.Array) -> jax.Array:
    """No language model: every tensor has a gradient, and sequences are averaged."""
    rows = parameters["embed"][tokens % 16] * parameters["gain"]
    return jnp.mean(rows**2) * jnp.mean(parameters["wide"] ** 2)


MODEL = Model(initialise, loss)
WITH_OBJECTIVE = Model(initialise, loss, objective=lambda *of: (2 * loss(*of), loss(*of)))
TOKENS = np.random.default_rng(0).integers(0, 256, (12, 9)).astype(np.int32)


def stepped(model: Model, accumulation: int = 1, batch: Any = TOKENS) -> tuple[Any, Any, jax.Array]:
    optimizer, parameters = optax.scale(-1.0), jax.tree.map(jnp.asarray, initialise(0))
    step = jax.jit(inner_step.build(model, optimizer, z_loss=0.0, accumulation=accumulation))
    moved, state, loss, _ = step(
        parameters, optimizer.init(parameters), jax.tree.map(jnp.asarray, batch), jnp.float32(0.1)
    )
    return moved, state, loss


@pytest.mark.parametrize("accumulation", [2, 3, 12])
def test_a_batch_in_parts_gives_what_it_gives_at_once(accumulation: int) -> None:
    parameters, _, loss_at_once = stepped(MODEL)
    in_parts, _, loss_in_parts = stepped(MODEL, accumulation)
    assert float(loss_in_parts) == pytest.approx(float(loss_at_once), rel=1e-6)
    for name in SHAPES:
        np.testing.assert_allclose(in_parts[name], parameters[name], rtol=1e-6)


@pytest.mark.parametrize("accumulation", [2, 3, 12])
def test_microbatches_count_by_the_weights_of_their_tokens(accumulation: int) -> None:
    """Some microbatches have no weight at all, and change nothing."""

    def weighted(parameters: Mapping[str, jax.Array], batch: Batch) -> jax.Array:
        rows = jnp.mean((parameters["embed"][batch.targets % 16] * parameters["gain"]) ** 2, axis=-1)
        return weighted_mean(rows, batch.target_weights) * jnp.mean(parameters["wide"] ** 2)

    weights = np.random.default_rng(1).integers(0, 3, TOKENS.shape).astype(np.float32)
    weights[::3] = 0.0
    of_weights = Model(initialise, weighted, takes_batches=True)
    at_once, _, loss_at_once = stepped(of_weights, 1, Batch(TOKENS, weights))
    in_parts, _, loss_in_parts = stepped(of_weights, accumulation, Batch(TOKENS, weights))
    assert float(loss_in_parts) == pytest.approx(float(loss_at_once), rel=1e-6)
    for name in SHAPES:
        np.testing.assert_allclose(in_parts[name], at_once[name], rtol=1e-6)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_objective_is_minimised_and_the_plain_loss_reported(accumulation: int) -> None:
    initial = initialise(0)
    plain, _, plain_loss = stepped(MODEL, accumulation)
    doubled, _, reported = stepped(WITH_OBJECTIVE, accumulation)
    assert float(reported) == float(plain_loss)
    for name in SHAPES:
        np.testing.assert_allclose(doubled[name] - initial[name], 2 * (plain[name] - initial[name]), atol=1e-6)


def test_a_z_loss_is_refused_where_nothing_takes_it() -> None:
    inner_step.build(WITH_OBJECTIVE, optax.identity(), z_loss=1e-4, accumulation=1)
    with pytest.raises(ConfigurationError, match=r"training\.z_loss is 0\.0001.*Set it to 0"):
        inner_step.build(MODEL, optax.identity(), z_loss=1e-4, accumulation=1)


def trainer_of(make_job: Any, **training: Any) -> JaxTrainer:
    spec = make_job(training={"batch_size": 12, **training}, data={"sequence_length": 8})
    return JaxTrainer(spec, MODEL, draw=lambda _: lambda number: (TOKENS + number) % 256)


@pytest.mark.parametrize("kind", ["adamw", "muon", "lion", "adafactor"])
def test_a_state_that_travelled_in_pieces_goes_on_bit_for_bit(make_job: Any, kind: str) -> None:
    """As in a catch-up by fragments: each fragment's pieces by themselves."""
    donor, receiver = (trainer_of(make_job, inner_optimizer={"kind": kind}) for _ in range(2))
    for step in range(3):
        donor.step(step)
    receiver.step(0)
    state: dict[str, np.ndarray] = {}
    for pieces in PIECES:
        state |= donor.export_state(pieces).arrays()
    receiver.import_state(state)
    receiver.seek(donor.cursor())
    assert donor.step(3) == receiver.step(3)
    mine, its = donor.export_state().arrays(), receiver.export_state().arrays()
    assert mine.keys() == its.keys()
    assert all(np.array_equal(mine[name], its[name]) for name in mine)


def test_an_island_takes_its_batch_in_as_many_parts_as_its_entry_says(make_job: Any) -> None:
    at_once, in_parts = trainer_of(make_job), trainer_of(make_job, accumulation=4)
    results = [trainer.step(0) for trainer in (at_once, in_parts)]
    assert results[0].token_count == results[1].token_count == 12 * 8
    assert results[0].loss == pytest.approx(results[1].loss, rel=1e-6)


def plain_descent(section: dict[str, Any]) -> optax.GradientTransformation:
    return optax.sgd(0.05)


def ascent(section: dict[str, Any]) -> optax.GradientTransformation:
    return optax.scale_by_adam()


def optimizer_of(function: Any) -> dict[str, Any]:
    return {"factory": f"{__name__}:{function.__name__}", "warmup_steps": 0}


def test_a_factory_of_optaxs_convention_trains_downhill(make_job: Any) -> None:
    trainer = trainer_of(make_job, inner_optimizer=optimizer_of(plain_descent))
    losses = [trainer.step(step).loss for step in range(3)]
    assert losses == sorted(losses, reverse=True)


def test_a_factory_that_ascends_ends_at_its_first_step(make_job: Any) -> None:
    with pytest.raises(ConfigurationError, match="ascent' returns an optimizer that ascends"):
        trainer_of(make_job, inner_optimizer=optimizer_of(ascent)).step(0)


def free_of_schedules(section: dict[str, Any]) -> optax.GradientTransformation:
    return optax.contrib.schedule_free_adamw(0.003, warmup_steps=10)


def test_an_update_of_rounding_alone_does_not_end_a_job() -> None:
    """Its first learning rate is 0, and what it adds then is the rounding of an average."""
    parameters = jax.tree.map(jnp.asarray, initialise(0))
    optimizer = free_of_schedules({})
    step = jax.jit(inner_step.build(MODEL, optimizer, z_loss=0.0, accumulation=1, measures_slope=True))
    state, slopes = optimizer.init(parameters), []
    for _ in range(2):
        parameters, state, _, slope = step(parameters, state, jnp.asarray(TOKENS), jnp.float32(1))
        slopes.append(float(slope))
    assert slopes[0] == 0.0 > slopes[1]


def test_a_factory_that_ascends_with_a_state_of_a_peer_ends_soon(make_job: Any) -> None:
    receiver = trainer_of(make_job, inner_optimizer=optimizer_of(ascent))
    receiver.import_state(receiver.export_state().arrays())
    for step in range(WITH_MOMENTUM - 1):
        receiver.step(step)
    with pytest.raises(ConfigurationError, match="ascends"):
        receiver.step(WITH_MOMENTUM)
