"""Kernels of attention give what XLA's gives, gradients too, and are chosen only where they do."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learners.models.attention import Attention, Device, reason_against, require_possible
from learners.models.decoder import decoder
from orchestrator.errors import ConfigurationError, InvalidJobSpec
from orchestrator.models.presets import DECODERS
from tests.learners.conftest import job

LENGTH, SIZE = 256, 128
SCALE = SIZE**-0.5


def drawn(heads: int = 2, key_value_heads: int = 1, batch: int = 2) -> tuple[jax.Array, ...]:
    random = np.random.default_rng(5)
    shapes = [(batch, LENGTH, count, SIZE) for count in (heads, key_value_heads, key_value_heads)]
    return tuple(jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in shapes)


def packed(batch: int = 2) -> jax.Array:
    ends = jnp.asarray([100, 37])[:batch, None]
    return (jnp.arange(LENGTH)[None, :] >= ends).astype(jnp.int32)


def compared(window: int | None, segments: jax.Array | None, softcap: float | None) -> None:
    arrays = drawn()
    wanted = jnp.asarray(np.random.default_rng(6).standard_normal(arrays[0].shape), jnp.float32)

    def of(attention: Attention) -> Any:
        def summed(*qkv: jax.Array) -> tuple[jax.Array, jax.Array]:
            mixed = attention(*qkv, window, segments)
            return jnp.sum(mixed * wanted), mixed

        return jax.jit(jax.value_and_grad(summed, (0, 1, 2), has_aux=True))(*arrays)

    (_, mixed), gradients = of(Attention("splash", SCALE, softcap, interpreted=True))
    (_, expected), expected_gradients = of(Attention("xla", SCALE, softcap))
    for own, other in zip((mixed, *gradients), (expected, *expected_gradients), strict=True):
        np.testing.assert_allclose(own, other, atol=2e-5 * float(jnp.abs(other).max()) + 5e-6)


def test_splash_attention_gives_what_xla_gives_with_windows_and_packed_documents() -> None:
    compared(window=70, segments=packed(), softcap=None)


@pytest.mark.soak("ten seconds of interpreting each")
@pytest.mark.parametrize(
    ("window", "is_packed", "softcap"), [(None, False, None), (None, True, 20.0), (1, False, None), (200, True, 5.0)]
)
def test_splash_attention_gives_what_xla_gives(window: int | None, is_packed: bool, softcap: float | None) -> None:
    compared(window, packed() if is_packed else None, softcap)


def test_another_segment_or_a_later_position_changes_nothing() -> None:
    query, key, value = drawn()
    attention = Attention("splash", SCALE, interpreted=True)
    before = attention(query, key, value, None, packed())
    after = attention(query, key, value.at[:, 200:].add(3.0).at[0, :100].add(1.0), None, packed())
    np.testing.assert_array_equal(before[0, 100:200], after[0, 100:200])
    np.testing.assert_array_equal(before[1, :200], after[1, :200])
    assert not np.array_equal(before[0, :100], after[0, :100])


GPU, TPU = Device("gpu", 9.0), Device("tpu")
FITS = {"dtype": jnp.bfloat16, "length": 256, "head_size": 128, "softcap": None, "is_segmented": False}


@pytest.mark.parametrize(
    ("kernel", "device", "changes", "reason"),
    [
        ("cudnn", GPU, {}, None),
        ("cudnn", GPU, {"head_size": 256}, None),
        ("cudnn", Device("gpu", 8.0), {"head_size": 256}, "256 components"),
        ("cudnn", Device("gpu", 7.5), {}, "capability is 7.5"),
        ("cudnn", Device("gpu"), {}, "a GPU of NVIDIA"),
        ("cudnn", TPU, {}, "tpu devices"),
        ("cudnn", GPU, {"dtype": jnp.float32}, "float32"),
        ("cudnn", GPU, {"head_size": 60}, "60 components"),
        ("cudnn", GPU, {"softcap": 50.0}, "attention_softcap"),
        ("cudnn", GPU, {"is_segmented": True}, "packed documents"),
        ("splash", TPU, {"softcap": 50.0, "is_segmented": True, "dtype": jnp.float32}, None),
        ("splash", TPU, {"length": 200}, "200 positions"),
        ("splash", TPU, {"head_size": 64}, "64 components"),
        ("splash", GPU, {}, "gpu devices"),
    ],
)
def test_a_kernel_is_refused_with_its_reason(
    kernel: Any, device: Device, changes: dict[str, Any], reason: str | None
) -> None:
    against = reason_against(kernel, device, **{**FITS, **changes})
    assert (against is None) if reason is None else (against is not None and reason in against)


@given(st.integers(1, 700), st.sampled_from([8, 60, 64, 128, 256]), st.booleans())
def test_auto_attends_everywhere_and_a_named_kernel_is_never_replaced(length: int, size: int, is_packed: bool) -> None:
    shape = jax.ShapeDtypeStruct((1, length, 2, size), jnp.float32)
    segments = jax.ShapeDtypeStruct((1, length), jnp.int32) if is_packed else None
    out = jax.eval_shape(lambda q, s: Attention("auto", 1.0)(q, q, q, None, s), shape, segments)
    assert out.shape == shape.shape
    with pytest.raises(ConfigurationError, match=r"model\.attention is cudnn.*cpu devices.*xla, or to auto"):
        jax.eval_shape(lambda q: Attention("cudnn", 1.0)(q, q, q), shape)


def test_a_model_names_a_kernel_that_no_device_has_for_it_before_anything_is_computed() -> None:
    with pytest.raises(ConfigurationError, match="compute type is float32"):
        require_possible("cudnn", jnp.float32, 128, None)
    gemma = next(config for config in DECODERS.values() if config.head_size % 128)
    with pytest.raises(ConfigurationError, match=r"model\.attention is splash.*no multiple of 128"):
        decoder(gemma, "bfloat16", kernel="splash")


@pytest.mark.parametrize(
    ("model", "trainer", "said"),
    [
        ({"preset": "nano", "attention": "splash"}, None, "the preset 'nano' attends in its own way"),
        ({"factory": "learners.model:build", "attention": "cudnn"}, None, "attends in its own way"),
        ({"attention": "xla"}, {"kind": "torch", "model": "/models/a"}, "torch chooses its kernel of attention itself"),
        ({"attention": "flash"}, None, "auto, xla, cudnn, splash"),
    ],
)
def test_a_kernel_is_refused_at_submission_where_it_is_known(
    model: dict[str, Any], trainer: dict[str, Any] | None, said: str
) -> None:
    sections = {"model": model} if trainer is None else {"model": model, "trainer": trainer}
    with pytest.raises(InvalidJobSpec) as refused:
        job(**sections)
    assert said in str(refused.value)
    assert "model" in {problem.path.split(".")[0] for problem in refused.value.problems}
