"""The models of docs/how-to-change/model.md train through the built-in trainer, word for word as they stand there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
        (lambda head, tokens: head[tokens][..., 0], jnp.float32, r"makes \(2, 3\) of tokens \(2, 3\).*logits"),
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
