from __future__ import annotations

import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learners import model
from learners.models import plain
from orchestrator.errors import ConfigurationError
from orchestrator.models.presets import PLAIN, parameter_shapes
from orchestrator.parameters import fragment_map

logits = jax.jit(plain.logits, static_argnums=(0, 1))


def tokens(batch: int, length: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (batch, length + 1)).astype(np.int32)


@pytest.fixture(scope="module")
def trained_looking() -> dict[str, np.ndarray]:
    """Nano's parameters, with an unembedding that is not zero, so that logits depend on everything."""
    parameters = plain.transformer(PLAIN["nano"], "float32").initialise(3)
    shape = parameters["unembed"].shape
    return parameters | {"unembed": np.random.default_rng(4).standard_normal(shape, np.float32)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_before_training_every_byte_is_equally_likely(make_job, dtype):
    built = model.build(make_job(model={"compute_dtype": dtype}))
    assert float(jax.jit(built.loss)(built.initialise(0), tokens(2, 16))) == pytest.approx(math.log(256), abs=1e-5)


def test_a_later_byte_never_changes_an_earlier_prediction(trained_looking):
    before = tokens(1, 9)
    after = before.copy()
    after[0, 5] = (after[0, 5] + 1) % 256
    one, other = (logits(PLAIN["nano"], jnp.float32, trained_looking, batch) for batch in (before, after))
    np.testing.assert_array_equal(one[0, :5], other[0, :5])
    assert (np.abs(one[0, 5:] - other[0, 5:]).max(axis=-1) > 1e-3).all()


def test_the_same_byte_is_read_differently_at_another_place(trained_looking):
    swapped = np.array([[1, 2, 3, 4], [2, 1, 3, 4]], np.int32)
    one, other = logits(PLAIN["nano"], jnp.float32, trained_looking, swapped)
    assert np.abs(one[3] - other[3]).max() > 1e-3


def test_the_loss_is_the_mean_surprise_of_the_next_byte(trained_looking):
    batch = tokens(2, 8)
    scores = np.asarray(logits(PLAIN["nano"], jnp.float32, trained_looking, batch[:, :-1]), np.float64)
    odds = np.exp(scores - scores.max(-1, keepdims=True))
    odds /= odds.sum(-1, keepdims=True)
    surprise = [-np.log(odds[row, place, batch[row, place + 1]]) for row in range(2) for place in range(8)]
    built = plain.transformer(PLAIN["nano"], "float32")
    assert float(jax.jit(built.loss)(trained_looking, batch)) == pytest.approx(np.mean(surprise), rel=1e-5)


def test_bfloat16_compute_stays_close_to_float32(trained_looking):
    batch = tokens(2, 32)
    exact = float(jax.jit(plain.transformer(PLAIN["nano"], "float32").loss)(trained_looking, batch))
    rounded = float(jax.jit(plain.transformer(PLAIN["nano"], "bfloat16").loss)(trained_looking, batch))
    assert rounded == pytest.approx(exact, rel=0.01)
    assert rounded != exact


@pytest.mark.parametrize(("preset", "millions"), [("nano", 0.85), ("micro", 10.0), ("small", 126.4)])
def test_presets_have_the_size_they_claim(preset, millions):
    sizes = {name: math.prod(shape) for name, shape in parameter_shapes(PLAIN[preset]).items()}
    assert sum(sizes.values()) / 1e6 == pytest.approx(millions, rel=0.01)


@pytest.mark.parametrize("preset", ["micro", "small"])
def test_the_larger_presets_cut_into_24_even_fragments(preset):
    shapes = parameter_shapes(PLAIN[preset])
    sizes = fragment_map.sizes(fragment_map.build(shapes, 24), shapes)
    assert max(sizes) <= fragment_map.PEAK_MAX * sum(sizes) / 24


def test_initial_parameters_follow_from_the_seed_alone_and_have_the_promised_shapes():
    built = plain.transformer(PLAIN["nano"], "float32")
    first, again, other = built.initialise(7), built.initialise(7), built.initialise(8)
    assert {name: array.shape for name, array in first.items()} == parameter_shapes(PLAIN["nano"])
    assert all(array.dtype == np.float32 for array in first.values())
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["embed"], other["embed"])


def test_a_users_own_model_is_called_by_name(make_job, tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text(
        "import numpy as np, jax.numpy as jnp\n"
        "from learners.model import Model\n"
        "def bigram(spec):\n"
        "    def loss(parameters, tokens):\n"
        "        rows = parameters['embed'][tokens[:, :-1]]\n"
        "        return -jnp.mean(jnp.take_along_axis(jnp.log(rows), tokens[:, 1:, None], -1))\n"
        "    return Model(lambda seed: {'embed': np.full((256, 256), 1 / 256, np.float32)}, loss)\n"
        "def nothing(spec):\n"
        "    return 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    built = model.build(make_job(model={"factory": "my_models:bigram"}))
    assert float(jax.jit(built.loss)(built.initialise(0), tokens(2, 4))) == pytest.approx(math.log(256))
    for path, complaint in [
        ("my_models:nothing", "returned int"),
        ("my_models:absent", "absent"),
        ("no_such", "no_such"),
    ]:
        with pytest.raises(ConfigurationError, match=complaint):
            model.build(make_job(model={"factory": path}))
    sys.modules.pop("my_models")
