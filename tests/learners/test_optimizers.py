from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers

from learners import optimizers
from learners.jax_trainer import OPTAX
from learners.optimizer_settings import DescentCheck, learning_rate, update_scale
from orchestrator.errors import ConfigurationError
from orchestrator.parameters.pieces import Role
from orchestrator.specification.config import parse_job
from orchestrator.specification.training_sections import InnerOptimizerSection

section = InnerOptimizerSection


SECTION = section(lr=0.1, lr_final_ratio=0.2, warmup_steps=10)


def test_the_learning_rate_is_optaxs_warm_up_and_cosine():
    reference = optax.warmup_cosine_decay_schedule(
        init_value=0.0, peak_value=0.1, warmup_steps=10, decay_steps=100, end_value=0.02
    )
    for step in range(10, 130):
        assert learning_rate(SECTION, 100, step) == pytest.approx(float(reference(step)), rel=1e-5)
    for step in range(10):  # ours trains from the first step on: its step 0 is optax's step 1
        assert learning_rate(SECTION, 100, step) == pytest.approx(float(reference(step + 1)), rel=1e-5)


def test_without_warm_up_and_past_the_horizon_the_rate_is_still_defined():
    for schedule in ("cosine", "linear", "wsd"):
        cold = section(lr=0.1, lr_final_ratio=0.2, warmup_steps=0, schedule=schedule)
        assert learning_rate(cold, 1, 0) == pytest.approx(0.1)
        assert learning_rate(cold, 100, 10**6) == pytest.approx(0.02)


def test_the_linear_rate_is_optaxs_line() -> None:
    line = optax.linear_schedule(0.1, 0.02, transition_steps=90)
    rates = [
        learning_rate(section(lr=0.1, lr_final_ratio=0.2, warmup_steps=10, schedule="linear"), 100, step)
        for step in range(10, 120)
    ]
    assert rates == pytest.approx([float(line(step)) for step in range(110)], rel=1e-5)


def test_the_wsd_rate_is_constant_up_to_its_last_part() -> None:
    wsd = section(lr=0.1, lr_final_ratio=0.2, warmup_steps=10, schedule="wsd", decay_ratio=0.25)
    line = optax.linear_schedule(0.1, 0.02, transition_steps=25, transition_begin=75)
    rates = [learning_rate(wsd, 100, step) for step in range(10, 120)]
    assert rates == pytest.approx([float(line(step)) for step in range(10, 120)], rel=1e-5)
    never = section(lr=0.1, warmup_steps=0, schedule="wsd", decay_ratio=0.0)
    assert [learning_rate(never, 100, step) for step in (0, 99, 500)] == [0.1] * 3


TENSORS = {
    "embed": jnp.ones((3, 2)),
    "blocks.0.up": jnp.full((2, 2), 2.0),
    "gain": jnp.ones(2),
    "large": jnp.linspace(-1, 1, 128 * 130).reshape(128, 130),
}
DECAYS = {"embed": False, "blocks.0.up": True, "gain": False, "large": True}
MATRICES = {"embed": None, "blocks.0.up": MuonDimensionNumbers(), "gain": None, "large": MuonDimensionNumbers()}
REFERENCES = {
    "adamw": optax.adamw(0.1, b1=0.9, b2=0.95, weight_decay=0.1, mask=DECAYS),
    "lion": optax.lion(0.1, b1=0.9, b2=0.95, weight_decay=0.1, mask=DECAYS),
    "muon": optax.contrib.muon(
        0.1,
        weight_decay=0.1,
        adam_b2=0.95,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=MATRICES,
    ),
    "adafactor": optax.chain(
        optax.adafactor(0.1, multiply_by_parameter_scale=False, weight_decay_rate=0.01, weight_decay_mask=DECAYS)
    ),
}


def two_steps(optimizer: optax.GradientTransformation, scale: float, tensors: Any = None) -> tuple[Any, Any]:
    """The tensors after two updates times ``scale``, and the optimizer's state."""
    tensors = TENSORS if tensors is None else tensors
    state, generator = optimizer.init(tensors), np.random.default_rng(0)
    for size in (5.0, 0.1):
        gradient = {n: jnp.asarray(size * generator.standard_normal(a.shape), jnp.float32) for n, a in tensors.items()}
        updates, state = optimizer.update(gradient, state, tensors)
        tensors = {name: tensors[name] + scale * updates[name] for name in tensors}
    return tensors, state


@pytest.mark.parametrize("kind", REFERENCES)
def test_two_scaled_updates_equal_optaxs_own_optimizer_after_clipping(kind: str) -> None:
    expected, _ = two_steps(optax.chain(optax.clip_by_global_norm(1.0), REFERENCES[kind]), 1.0)
    if kind == "muon":  # optax's own moves all else by Adam with Nesterov's momentum
        adamw, _ = two_steps(optax.chain(optax.clip_by_global_norm(1.0), REFERENCES["adamw"]), 1.0)
        expected |= {name: adamw[name] for name in ("embed", "gain")}
    got, _ = two_steps(optimizers.build(section(kind=kind)), 0.1)
    for name in TENSORS:
        np.testing.assert_allclose(got[name], expected[name], rtol=2e-5, atol=1e-6)


def test_without_a_clip_norm_gradients_are_not_clipped() -> None:
    expected, _ = two_steps(REFERENCES["lion"], 1.0)
    got, _ = two_steps(optimizers.build(section(kind="lion", clip_norm=None)), 0.1)
    for name in TENSORS:
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-6)


def test_muon_moves_each_layer_and_expert_of_a_stack_as_a_matrix_of_its_own() -> None:
    generator = np.random.default_rng(0)
    stack = jnp.asarray(generator.standard_normal((2, 3, 4, 5)), jnp.float32)
    optimizer = optimizers.build(section(kind="muon", clip_norm=None), {"stack": Role(stacked_axes=2)})
    gradient = {"stack": jnp.asarray(generator.standard_normal(stack.shape), jnp.float32)}
    whole, _ = optimizer.update(gradient, optimizer.init({"stack": stack}), {"stack": stack})
    plain = optimizers.build(section(kind="muon", clip_norm=None))
    for index in np.ndindex(2, 3):
        one = {"w": stack[index]}
        alone, _ = plain.update({"w": gradient["stack"][index]}, plain.init(one), one)
        np.testing.assert_allclose(whole["stack"][index], alone["w"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", REFERENCES)
def test_every_moment_of_a_tensors_shape_lies_under_the_tensors_name(kind: str) -> None:
    _, state = two_steps(optimizers.build(section(kind=kind)), 0.1)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        key = getattr(path[-1], "key", None)
        assert leaf.size <= 3 or key in TENSORS  # else a count, or the coefficients of Muon's polynomial


def test_the_first_group_that_fits_a_tensor_sets_its_rate_and_its_decay() -> None:
    groups = [
        {"tensors": "blocks.*", "lr_ratio": 0.5, "weight_decay": 0.0},
        {"tensors": "[bl]*", "role": "matrix", "lr_ratio": 2.0},
        {"role": "embedding", "lr_ratio": 0.0},
    ]
    own = {**DECAYS, "blocks.0.up": False}
    rates = {"blocks.0.up": 0.5, "large": 2.0, "embed": 0.0, "gain": 1.0}
    got, _ = two_steps(optimizers.build(section(groups=groups)), 0.1)
    for name, rate in rates.items():
        reference = optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(0.1 * rate, b1=0.9, b2=0.95, weight_decay=0.1, mask=own)
        )
        np.testing.assert_allclose(got[name], two_steps(reference, 1.0)[0][name], rtol=1e-5)


def test_a_group_that_applies_to_no_tensor_is_refused() -> None:
    groups = [{"role": "matrix"}, {"tensors": "large"}]
    with pytest.raises(ConfigurationError, match=r"groups\.1 applies to no tensor.*blocks\.0\.up"):
        optimizers.build(section(groups=groups)).init(TENSORS)


def whole(section: dict[str, Any]) -> optax.GradientTransformation:
    return optax.adamw(section["lr"], weight_decay=section["weight_decay"])


def by_name(lr: float, momentum: float, **others: Any) -> optax.GradientTransformation:
    return optax.sgd(lr, momentum)


def unpacked(section: dict[str, Any]) -> optax.GradientTransformation:
    return by_name(**section)


def own_rate(section: dict[str, Any]) -> optax.GradientTransformation:
    return optax.adamw(0.1)


def nothing(section: dict[str, Any]) -> None: ...


@pytest.mark.parametrize(
    ("factory", "fields", "reference"),
    [
        ("own_rate", {}, optax.adamw(0.1)),
        ("whole", {"lr": 0.1, "weight_decay": 0.3}, optax.adamw(0.1, weight_decay=0.3)),
        ("unpacked", {"lr": 0.1, "momentum": 0.5}, optax.sgd(0.1, 0.5)),
        ("own_rate", {"clip_norm": 1.0}, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))),
    ],
)
def test_a_factorys_updates_are_added_as_they_are(factory: str, fields: dict[str, Any], reference: Any) -> None:
    """Without a second decay, and clipped only where ``clip_norm`` is written."""
    got, _ = two_steps(optimizers.build(section(factory=f"{__name__}:{factory}", **fields)), 1.0)
    expected, _ = two_steps(reference, 1.0)
    for name in TENSORS:
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-5)


def test_the_rates_of_groups_multiply_a_factorys_updates() -> None:
    own = section(factory=f"{__name__}:own_rate", groups=[{"tensors": "large", "lr_ratio": 0.0}])
    got, _ = two_steps(optimizers.build(own), 1.0)
    expected, _ = two_steps(optax.adamw(0.1), 1.0)
    np.testing.assert_array_equal(got["large"], TENSORS["large"])
    np.testing.assert_allclose(got["gain"], expected["gain"], rtol=1e-5)


def test_a_groups_decay_beside_a_factory_is_refused() -> None:
    with pytest.raises(ValueError, match="whose optimizer decays weights itself"):
        section(factory=f"{__name__}:own_rate", groups=[{"tensors": "large", "weight_decay": 0.1}])


@pytest.mark.parametrize("field", ["lr", "weight_decay", "momentum"])
def test_a_setting_that_the_factory_never_reads_is_refused(field: str) -> None:
    """It would change nothing, without a word."""
    with pytest.raises(ConfigurationError, match=rf"{field} is 0\.25, but the factory .* never reads it"):
        optimizers.build(section(factory=f"{__name__}:own_rate", **{field: 0.25}))


def test_a_factorys_updates_are_scaled_by_the_part_of_the_schedule_that_they_are_at() -> None:
    own = section(factory=f"{__name__}:whole", lr=0.1, lr_final_ratio=0.2, warmup_steps=10)
    assert update_scale(own, 100, 0) == pytest.approx(0.1)
    assert update_scale(own, 100, 10) == pytest.approx(1.0)
    assert update_scale(own, 100, 100) == pytest.approx(0.2)
    assert update_scale(SECTION, 100, 0) == learning_rate(SECTION, 100, 0)


@pytest.mark.parametrize("kind", REFERENCES)
def test_updates_of_every_kind_point_downhill(kind: str) -> None:
    optimizer = optimizers.build(section(kind=kind))
    gradient = {name: jnp.asarray(np.random.default_rng(0).standard_normal(a.shape)) for name, a in TENSORS.items()}
    updates, _ = optimizer.update(gradient, optimizer.init(TENSORS), TENSORS)
    assert sum(float(jnp.sum(updates[name] * gradient[name])) for name in TENSORS) < 0


def test_an_optimizer_whose_first_update_points_uphill_is_refused() -> None:
    check = DescentCheck("mine:build", 100, OPTAX)
    check.judge(0.0)  # as with warm-up from 0
    with pytest.raises(ConfigurationError, match=r"'mine:build' returns an optimizer that ascends.*is 2.*optax\.adamw"):
        check.judge(2.0)


@pytest.mark.parametrize("slope", [-1.0, float("nan")])
def test_after_one_update_downhill_nothing_is_judged_any_more(slope: float) -> None:
    check = DescentCheck("mine:build", 100, OPTAX)
    check.judge(slope)
    check.judge(2.0)


def test_an_imported_state_may_point_uphill_but_not_five_times_in_a_row() -> None:
    check = DescentCheck("mine:build", 100, OPTAX)
    for slopes in ((2.0, 1.0, -1.0, 3.0), (2.0, 1.0, 1.0, 1.0)):
        check.state_was_imported()
        for slope in slopes:
            check.judge(slope)
    with pytest.raises(ConfigurationError, match="ascends"):
        check.judge(1.0)


def with_noise(section: dict[str, Any]) -> optax.GradientTransformation:
    return optax.add_noise(0.1, 0.5, key=jax.random.key(0))


def test_a_state_that_is_no_numbers_is_refused_with_what_to_keep_instead() -> None:
    with pytest.raises(ConfigurationError, match=r"keeps a jax\.random\.key .* Keep jax\.random\.key_data"):
        optimizers.build(section(factory=f"{__name__}:with_noise")).init(TENSORS)


@pytest.mark.parametrize(("steps", "most"), [(1, 0), (9, 4), (10**9, 1_000)])
def test_an_optimizer_that_moves_nothing_for_half_a_job_is_refused(steps: int, most: int) -> None:
    check = DescentCheck("mine:build", steps, OPTAX)
    for _ in range(most):
        check.judge(0.0)
    with pytest.raises(ConfigurationError, match=f"did not change the parameters in {most + 1:,} steps"):
        check.judge(0.0)


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        (f"{__name__}:nothing", "returned NoneType; it must return an optax.GradientTransformation"),
        (f"{__name__}:missing", "cannot be imported"),
        ("no_such_package:build", "name its folder with `atoll up --packages FOLDER`"),
    ],
)
def test_a_factory_of_something_else_is_refused(factory: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        optimizers.build(section(factory=factory))


def test_a_step_of_the_schedule_is_one_of_every_island_that_the_job_begins_with(make_job) -> None:
    spec = make_job()
    assert parse_job(spec).tokens_per_schedule_step == 2 * 4 * 32
