"""The models of docs/how-to-change/model.md train through the built-in trainer, word for word as they stand there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from learners import jax_trainer, model
from orchestrator.errors import ConfigurationError
from tests.documents import DOCS, blocks

EXAMPLES = [block.text for block in blocks((DOCS / "how-to-change" / "model.md").read_text()) if block.kind == "python"]
NAMES = ("flax", "equinox", "functions")


@pytest.fixture(autouse=True, scope="module")
def compiled_quickly() -> Iterator[None]:
    """What runs a dozen times costs less than to compile it well."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package of the user's, with a module of each example."""
    mine = ModuleType("mymodels")
    monkeypatch.setitem(sys.modules, "mymodels", mine)
    for name, text in zip(NAMES, EXAMPLES, strict=True):
        module = ModuleType(f"mymodels.{name}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(text, f"{name}.py", "exec"), vars(module))
    return mine


def job(make_job: Any, factory: str) -> dict[str, Any]:
    return make_job(model={"factory": factory, "compute_dtype": "float32"})


@pytest.mark.parametrize("name", NAMES)
def test_each_example_follows_from_its_seed_and_learns_through_the_built_in_trainer(make_job: Any, name: str) -> None:
    trainer = jax_trainer.create(job(make_job, f"mymodels.{name}:build"), 0, 1)
    losses = [trainer.step(number).loss for number in range(12)]
    assert losses[-1] < losses[0] - 0.2
    built, first = model.build(job(make_job, f"mymodels.{name}:build")), trainer.initial_parameters()
    again, other = built.initialise(0), built.initialise(1)
    assert {each: array.dtype for each, array in first.items()} == dict.fromkeys(other, np.float32)
    for each in first:
        np.testing.assert_allclose(first[each], again[each], rtol=1e-5, atol=1e-7)  # one of the two was compiled
    assert any(not np.array_equal(first[each], other[each]) for each in first)
    assert built.vocabulary_size == 256


def test_a_module_with_running_statistics_is_refused(make_job: Any, package: ModuleType) -> None:
    from flax import nnx

    class Normed(nnx.Module):
        def __init__(self) -> None:
            self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))

    vars(package)["build"] = lambda spec: Normed()
    with pytest.raises(ConfigurationError, match=r"norm\.\w+, a BatchStat.*RMSNorm"):
        model.build(job(make_job, "mymodels:build"))


@pytest.mark.parametrize(
    ("call", "dtype", "complaint"),
    [
        (lambda head, tokens: head[tokens], jnp.bfloat16, r"head is bfloat16.*float32"),
        (lambda head, tokens: head[tokens][..., 0], jnp.float32, r"maps tokens \(2, 3\) to \(2, 3\).*logits"),
        (lambda head, tokens: head @ head, jnp.float32, r"cannot be called with tokens \(TypeError"),
    ],
)
def test_a_module_that_makes_no_logits_of_float32_is_refused(
    make_job: Any, package: ModuleType, call: Any, dtype: Any, complaint: str
) -> None:
    import equinox

    class Table(equinox.Module):
        head: Any

        def __call__(self, tokens: Any) -> Any:
            return call(self.head, tokens)

    vars(package)["build"] = lambda spec: Table(jnp.ones((8, 5), dtype))
    with pytest.raises(ConfigurationError, match=complaint):
        model.build(job(make_job, "mymodels:build"))


def zeros(seed: Any) -> dict[str, np.ndarray]:
    return {"rows": np.zeros((256, 4), np.float32)}


def squared(parameters: Any, tokens: Any) -> Any:
    return jnp.mean(parameters["rows"][tokens] ** 2)


def raising(*_: Any) -> Any:
    raise KeyError("rows")


@pytest.mark.parametrize(
    ("factory", "complaint"),
    [
        (3, r"model.factory 'mymodels:build' is of type int, but must be a function"),
        (lambda spec: None, r"returned NoneType; it must return"),
        (lambda: None, r"'mymodels:build' raises TypeError: .* takes 0 positional"),
        (raising, r"'mymodels:build' raises KeyError: 'rows'\. Try it outside a job"),
        (lambda spec: sys.exit(3), r"raises SystemExit: 3"),
        (lambda spec: model.Model(3, squared), r"initialise of the model .* is of type int, but must be a function"),
        (lambda spec: model.Model(raising, squared), r"initialise of the model from model.factory .* raises KeyError"),
        (lambda spec: model.Model(lambda seed: None, squared), r"initialise .* returns NoneType"),
        (lambda spec: model.Model(lambda seed: {}, squared), r"initialise .* returns no tensors"),
        (lambda spec: model.Model(lambda seed: {"rows": [1.0]}, squared), r"returns rows as list"),
        (lambda spec: model.Model(lambda seed: {"rows": np.ones(3, int)}, squared), r"returns rows of int64"),
        (
            lambda spec: model.Model(lambda seed: {"rows": np.ones((0, 3))}, squared),
            r"rows of shape \(0, 3\), which is empty",
        ),
        (lambda spec: model.Model(zeros, raising), r"loss of the model from .* raises KeyError: 'rows'"),
        (lambda spec: model.Model(zeros, lambda p, t: None), r"loss .* returns NoneType for tokens"),
        (
            lambda spec: model.Model(zeros, lambda p, t: p["rows"][t]),
            r"loss .* returns \(4, 33, 4\) for .* a scalar: the mean",
        ),
        (lambda spec: model.Model(zeros, squared, objective=squared), r"objective .* returns \(\) for .* two scalars"),
    ],
)
def test_a_factory_whose_model_cannot_be_trained_ends_as_the_specification_s_fault(
    make_job: Any, package: ModuleType, factory: Any, complaint: str
) -> None:
    vars(package)["build"] = factory
    with pytest.raises(ConfigurationError, match=complaint):
        jax_trainer.create(job(make_job, "mymodels:build"), 0, 1).step(0)


@pytest.mark.parametrize("text", ["def build(:", "1 / 0", "import sys; sys.exit(1)", "import no_such_package"])
def test_a_package_that_cannot_be_imported_is_the_specification_s_fault(
    make_job: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (tmp_path / "broken_models.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigurationError, match=r"model.factory 'broken_models:build' cannot be imported"):
        model.build(job(make_job, "broken_models:build"))


@pytest.mark.parametrize(
    ("factory", "complaint"),
    [
        (3, r"inner_optimizer.factory 'mymodels:optimizer' is of type int, but must be a function"),
        (lambda section: None, r"returned NoneType; it must return"),
        (raising, r"'mymodels:optimizer' raises KeyError"),
        (lambda section: optax.GradientTransformation(None, None), r"init of the transformation .* is None"),
        (
            lambda section: optax.GradientTransformation(raising, raising),
            r"init of the transformation .* raises KeyError",
        ),
        (
            lambda section: optax.GradientTransformation(lambda p: (), lambda u, s, p: None),
            r"update of the transformation .* returns no pair",
        ),
        (
            lambda section: optax.GradientTransformation(lambda p: (), lambda u, s, p: ({"rows": jnp.ones(3)}, s)),
            r"update of the transformation .* returns updates of other shapes",
        ),
    ],
)
def test_an_optimizer_s_factory_that_cannot_be_used_ends_as_the_specification_s_fault(
    make_job: Any, package: ModuleType, factory: Any, complaint: str
) -> None:
    vars(package).update(build=lambda spec: model.Model(zeros, squared), optimizer=factory)
    spec = job(make_job, "mymodels:build")
    spec["training"]["inner_optimizer"]["factory"] = "mymodels:optimizer"
    with pytest.raises(ConfigurationError, match=complaint):
        jax_trainer.create(spec, 0, 1).step(0)
