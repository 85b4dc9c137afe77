"""Causal self-attention of a decoder, by the fastest kernel that the device has for these shapes.

    xla       XLA's own fusion: every device, every shape
    cudnn     cuDNN's flash attention: GPUs of compute capability 8.0 or above
    splash    splash attention, a Pallas kernel of JAX: TPUs

``auto`` takes cuDNN's on GPUs and splash on TPUs wherever they do the same as XLA's, and XLA's otherwise. A kernel that was
named and cannot do it is refused with the reason, never replaced.

Sources: flash attention arXiv:2205.14135; splash attention in ``jax.experimental.pallas.ops.tpu``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention
from jax.sharding import PartitionSpec

from learners.mesh import split
from orchestrator.errors import ConfigurationError

Kernel = Literal["auto", "xla", "cudnn", "splash"]

HEADS = ("batch", None, "heads", None)
"""The dimensions of queries, keys and values."""
LANES = 128
"""Splash computes in tiles of so many positions and components."""
CAPABILITY_MIN, CAPABILITY_OF_LARGE_HEADS = 8.0, 9.0
HEAD_SIZE_MAX, LARGE_HEAD_SIZE_MAX = 128, 256
"""Of cuDNN, below and from ``CAPABILITY_OF_LARGE_HEADS`` on."""


@dataclass(frozen=True, slots=True)
class Device:
    """The device decides which kernels there are: ``platform`` is cpu, gpu or tpu, ``capability`` that of a GPU of CUDA."""

    platform: str
    capability: float | None = None

    @classmethod
    def here(cls) -> Device:
        device = jax.devices()[0]
        capability = getattr(device, "compute_capability", None)
        return cls(device.platform, float(capability) if capability else None)


@dataclass(frozen=True, slots=True)
class Attention:
    """The way in which a model attends, a function of queries, keys and values.

    ``softcap`` is c in c · tanh(scores / c); ``interpreted`` runs splash without a TPU, slowly, for comparisons.
    """

    kernel: Kernel
    scale: float
    softcap: float | None = None
    interpreted: bool = False

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        window: int | None = None,
        segments: jax.Array | None = None,
    ) -> jax.Array:
        """Attend to earlier positions of the same segment, and of the last ``window`` positions, itself included.

        ``query`` is (batch, length, heads, size), ``key`` and ``value`` the same with fewer heads, each shared by
        neighbouring heads of the query; ``segments`` is (batch, length) int, or None if all positions are of one. Returns
        the query's shape and dtype. Raises ConfigurationError if the named kernel cannot do this.
        """
        match self._chosen(query, segments):
            case "splash":
                return self._splash(query, key, value, window, segments)
            case kernel:
                return self._fused(kernel, query, key, value, window, segments)

    def _chosen(self, query: jax.Array, segments: jax.Array | None) -> Literal["xla", "cudnn", "splash"]:
        if self.kernel == "xla":
            return "xla"
        _, length, _, size = query.shape
        device = Device("tpu") if self.interpreted else Device.here()
        facts = (device, query.dtype, length, size, self.softcap, segments is not None)
        if self.kernel == "auto":
            fast: Literal["cudnn", "splash"] = "splash" if device.platform == "tpu" else "cudnn"
            return fast if reason_against(fast, *facts) is None else "xla"
        if reason := reason_against(self.kernel, *facts):
            raise _refused(self.kernel, reason)
        return self.kernel

    def _fused(
        self,
        kernel: Literal["xla", "cudnn"],
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        window: int | None,
        segments: jax.Array | None,
    ) -> jax.Array:
        alike = None if segments is None else segments[:, :, None] == segments[:, None, :]
        if self.softcap is not None:
            return self._capped(query, key, value, window, alike)
        sides = None if window is None else (window - 1, 0)
        mask = None if alike is None else alike[:, None]
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            mask=mask,
            scale=self.scale,
            is_causal=True,
            local_window_size=sides,
            implementation=kernel,
        )

    def _capped(
        self, query: jax.Array, key: jax.Array, value: jax.Array, window: int | None, alike: jax.Array | None
    ) -> jax.Array:
        batch, length, _, size = query.shape
        groups = query.reshape(batch, length, key.shape[2], -1, size)
        scores = jnp.einsum("btkgh,bskh->bkgts", groups, key, preferred_element_type=jnp.float32) * self.scale
        distance = np.arange(length)[:, None] - np.arange(length)[None, :]
        visible: Any = (distance >= 0) & (distance < (window or length))
        if alike is not None:
            visible = visible & alike[:, None, None]
        weights = jax.nn.softmax(jnp.where(visible, capped(scores, self.softcap), -jnp.inf), axis=-1)
        return jnp.einsum("bkgts,bskh->btkgh", weights.astype(value.dtype), value).reshape(query.shape)

    def _splash(
        self, query: jax.Array, key: jax.Array, value: jax.Array, window: int | None, segments: jax.Array | None
    ) -> jax.Array:
        """Attend by a kernel for each sequence. On several devices, each has sequences and heads of its own."""
        _, length, _, _ = query.shape
        of_query, of_key = split(query.shape, *HEADS), split(key.shape, *HEADS)
        batch_axes = of_query[0]
        head_axis = of_query[2] if of_query[2] == of_key[2] else None
        shape = (length, length)
        mask = (
            splash_attention.CausalMask(shape)
            if window is None
            else splash_attention.LocalMask(shape, window_size=(window - 1, 0), offset=0)
        )

        def of_device(query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None) -> jax.Array:
            with jax.ensure_compile_time_eval():
                kernel = splash_attention.make_splash_mha(
                    splash_attention.MultiHeadMask([mask] * query.shape[2]),
                    head_shards=1,
                    q_seq_shards=1,
                    attn_logits_soft_cap=self.softcap,
                    interpret=self.interpreted,
                )
            scaled = query * jnp.asarray(self.scale, query.dtype)
            by_head = tuple(jnp.swapaxes(x, 1, 2) for x in (scaled, key, value))

            def of_sequence(qkv: tuple[jax.Array, ...], segments: jax.Array | None) -> jax.Array:
                ids = None if segments is None else splash_attention.SegmentIds(segments, segments)
                mixed: jax.Array = kernel(*qkv, ids)
                return mixed

            mixed = jax.vmap(of_sequence)(by_head, segments)
            return jnp.swapaxes(mixed, 1, 2).astype(query.dtype)

        if batch_axes is None and head_axis is None:
            return of_device(query, key, value, segments)
        heads, rows = PartitionSpec(batch_axes, None, head_axis, None), PartitionSpec(batch_axes, None)
        mapped = jax.shard_map(
            of_device,
            in_specs=(heads, heads, heads, None if segments is None else rows),
            out_specs=heads,
            check_vma=False,
        )
        return mapped(query, key, value, segments)


def require_possible(kernel: Kernel, dtype: Any, head_size: int, softcap: float | None) -> None:
    """Raise ConfigurationError if the named kernel could compute such heads on no device."""
    if kernel in ("cudnn", "splash"):
        best = Device("tpu") if kernel == "splash" else Device("gpu", CAPABILITY_OF_LARGE_HEADS)
        if reason := reason_against(kernel, best, dtype, LANES, head_size, softcap, False):
            raise _refused(kernel, reason)


def _refused(kernel: Kernel, reason: str) -> ConfigurationError:
    return ConfigurationError(
        detail=f"model.attention is {kernel}, which cannot be used here: {reason}. Set it to xla, or to auto, which takes "
        "the fastest kernel that can."
    )


def reason_against(
    kernel: Literal["cudnn", "splash"],
    device: Device,
    dtype: Any,
    length: int,
    head_size: int,
    softcap: float | None,
    is_segmented: bool,
) -> str | None:
    """Return why a kernel cannot attend on a device, or None if it can. Pure."""
    if kernel == "splash":
        if device.platform != "tpu":
            return f"splash attention needs a TPU, and the island has {device.platform} devices"
        if length % LANES:
            return f"sequences have {length:,} positions, which is no multiple of {LANES}"
        return f"heads have {head_size} components, which is no multiple of {LANES}" if head_size % LANES else None
    if device.platform != "gpu" or device.capability is None:
        return f"cuDNN's attention needs a GPU of NVIDIA, and the island has {device.platform} devices"
    if device.capability < CAPABILITY_MIN:
        return f"the GPU's compute capability is {device.capability:g}, below {CAPABILITY_MIN:g}"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"the compute type is {jnp.dtype(dtype).name}, and it has only bfloat16"
    largest = LARGE_HEAD_SIZE_MAX if device.capability >= CAPABILITY_OF_LARGE_HEADS else HEAD_SIZE_MAX
    if head_size % 8 or head_size > largest:
        return f"heads have {head_size} components, which is no multiple of 8 up to {largest}"
    if softcap is not None:
        return "the model caps its scores (attention_softcap)"
    # As a mask it would be length² numbers a sequence, which is what the kernel is there to avoid.
    return "batches are packed documents, which it cannot keep apart" if is_segmented else None


def capped(x: jax.Array, cap: float | None) -> jax.Array:
    """Return c · tanh(x / c), or ``x`` if there is no cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)
