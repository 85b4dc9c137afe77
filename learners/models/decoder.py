"""The decoder family in JAX: computes the model that ``orchestrator.models.decoder.DecoderSection`` describes.

Layers are stacked and run by one ``jax.lax.scan``, so that a model of 48 layers compiles like one of one layer. Parameters
are float32; matrices multiply in the compute type, to which each layer's are cast just before use. Norms, rotary
positions, softmax, routing and loss are float32. The loss never holds all positions' logits at once (``_loss``).

This module knows nothing of optimizers, devices, data or fragments. ``Model.axes`` names dimensions, by which a mesh splits.

Sources: RoPE arXiv:2104.09864; YaRN arXiv:2309.00071; GQA arXiv:2305.13245; GLU variants arXiv:2002.05202; norms of queries
and keys arXiv:2302.05442; soft-capping and mixed windows as in Gemma 2 and 3, arXiv:2408.00118, arXiv:2503.19786; balance of
experts arXiv:2101.03961, as in Qwen 3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from learners.contract import Batch
from learners.mesh import constrained
from learners.models.attention import Attention, Kernel, capped, require_possible
from learners.models.model import Model, weighted_mean
from orchestrator.models.decoder import (
    DecoderSection,
    ExpertsSection,
    RopeScalingSection,
    parameter_shapes,
    stacked_axes,
)
from orchestrator.models.trainable import A, B
from orchestrator.parameters.pieces import Role, Roles

Remat = Literal["none", "dots", "full"]
Tensors = Mapping[str, jax.Array]
Kind = tuple[jax.Array, jax.Array]
"""Of one layer: whether it sees all earlier positions, and whether it has rotary positions. Scalars."""

LOGITS_MAX = 2**25
"""Logits of one sequence computed at once: 128 MiB in float32. More positions are computed in stretches."""
VECTORS = ("norm", "bias")
"""The endings of tensors that multiply no matrix."""
ACTIVATIONS = ("batch", None, "width")
"""The dimensions of the residual stream."""


@dataclass(frozen=True, slots=True)
class Computation:
    """The way a model is computed: type of matrix products, what the gradient recomputes, kernel of attention."""

    dtype: Any
    remat: Remat = "none"
    kernel: Kernel = "auto"


def decoder(
    config: DecoderSection, compute_dtype: Any, remat: Remat = "none", z_loss: float = 0.0, kernel: Kernel = "auto"
) -> Model:
    """Return the model; see ``DecoderSection``, ``TrainingSection.z_loss``, and ``ModelSection`` for the rest.

    Raises ConfigurationError if the named kernel cannot compute its attention.
    """
    how = Computation(jnp.dtype(compute_dtype), remat, kernel)
    require_possible(kernel, how.dtype, config.head_size, config.attention_softcap)
    weight = config.experts.balance_weight if config.experts else 0.0

    def loss(parameters: Tensors, tokens: jax.Array | Batch) -> jax.Array:
        return _loss(config, how, parameters, tokens)[0]

    def every(parameters: Tensors, tokens: jax.Array | Batch) -> tuple[jax.Array, jax.Array, Any]:
        surprise, squares, balance, shares = _loss(config, how, parameters, tokens)
        whole = surprise + z_loss * squares + weight * balance if weight or z_loss else surprise
        return whole, surprise, shares

    return Model(
        initialise=lambda seed: initial_parameters(config, seed),
        loss=loss,
        objective=(lambda parameters, tokens: every(parameters, tokens)[:2]) if weight or z_loss else None,
        measured=every if config.experts else None,
        log_likelihoods=lambda parameters, batch: _log_likelihoods(config, how, parameters, batch),
        roles=roles(config),
        axes=config.dimensions,
        traceable=True,
        takes_batches=True,
        vocabulary_size=config.vocabulary_size,
        flops_per_token=lambda length: flops_per_token(config, length),
        compute_dtypes={name: how.dtype for name in config.shapes if not name.endswith("norm")},
        applies_adapters=True,
    )


def roles(config: DecoderSection) -> Roles:
    """Return the roles of stacked tensors, by layer or by layer and expert; norms and biases do not decay. Other names show
    theirs.
    """
    return {
        name: Role(stacked_axes=stacked_axes(name), decays=not name.endswith(VECTORS))
        for name in parameter_shapes(config)
        if stacked_axes(name)
    }


def flops_per_token(config: DecoderSection, length: int) -> float:
    """Return the floating-point operations of matrix products per token of such a sequence, forward and backward.

    Only active experts count, and only the positions that the masks leave. What remat computes again does not count, because
    it is not part of the model.
    """
    shapes = parameter_shapes(config)
    matrices = 0.0
    for name, shape in shapes.items():
        if name.endswith(VECTORS) or (name == "embed" and not config.tied_embeddings):
            continue
        share = config.experts.active / config.experts.count if config.experts and "experts" in name else 1.0
        matrices += share * math.prod(shape)
    positions = 0.0
    for layer in range(config.layer_count):
        seen = length if config.is_global(layer) else min(length, config.window or length)
        positions += seen * (seen + 1) / 2 / length + (length - seen) * seen / length
    return 6 * matrices + 12 * config.head_count * config.head_size * positions


def initial_parameters(config: DecoderSection, seed: Any) -> dict[str, jax.Array]:
    """Draw parameters: normal with variance 1/inputs; those added to the residual stream shrink with depth (as in GPT-2).

    A tensor depends only on its own name and shape and on the seed. A separate unembedding and biases start at zero, gains
    at one.
    """
    key = jax.random.key(seed)
    parameters = {}
    for number, (name, shape) in enumerate(sorted(parameter_shapes(config).items())):
        if name.endswith("norm"):
            parameters[name] = jnp.full(shape, 0.0 if config.gain_from_one else 1.0, jnp.float32)
        elif name == "unembed" or name.endswith("bias"):
            parameters[name] = jnp.zeros(shape, jnp.float32)
        else:
            deviation = 1 / math.sqrt(config.width if name == "embed" else shape[-2])
            if name.endswith((".output", ".down")):
                deviation /= math.sqrt(2 * config.layer_count)
            normal = jax.random.normal(jax.random.fold_in(key, number), shape, jnp.float32)
            parameters[name] = normal * np.float32(deviation)
    return parameters


def logits(config: DecoderSection, dtype: Any, parameters: Tensors, inputs: jax.Array | Batch) -> jax.Array:
    """Map (batch, length) int to (batch, length, vocabulary) float32.

    Position t sees only those of inputs 0 to t that are in its segment.
    """
    stream, *_ = _stream(config, Computation(dtype), parameters, Batch.of(inputs))
    return _scores(config, parameters, stream)


def _loss(
    config: DecoderSection, how: Computation, parameters: Tensors, tokens: jax.Array | Batch
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Return the mean cross-entropy of each next token, mean log²Z, and the balance of experts, all scalar float32; and the
    shares of experts, as ``_stream`` does.

    The means are by the weights of the batch. Balance and shares of experts are over all tokens, padding included.

    If a sequence has many logits, positions are computed in equal stretches, the last padded with zero weight. The
    logits of each stretch are computed again for the gradient instead of being kept.
    """
    rows = Batch.of(tokens)
    targets, target_weights = rows.targets, rows.target_weights
    stream, balance, shares = _stream(config, how, parameters, rows.inputs)
    batch, length = targets.shape
    count = math.ceil(length * config.vocabulary_size / LOGITS_MAX)
    if count == 1:
        surprise, log_z = _surprise(config, parameters, stream, targets)
        return weighted_mean(surprise, target_weights), weighted_mean(log_z**2, target_weights), balance, shares
    stretch = math.ceil(length / count)
    padding = ((0, 0), (0, stretch * count - length))
    weights = jnp.ones((batch, length), jnp.float32) if target_weights is None else target_weights
    total = batch * length if target_weights is None else jnp.sum(target_weights)

    def in_stretches(array: jax.Array) -> jax.Array:
        return jnp.moveaxis(array.reshape(batch, count, stretch, *array.shape[2:]), 1, 0)

    @jax.checkpoint
    def summed(totals: jax.Array, part: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        some, wanted, weight = part
        surprise, log_z = _surprise(config, parameters, some, wanted)
        return totals + jnp.stack([jnp.sum(weight * surprise), jnp.sum(weight * log_z**2)]), None

    parts = (jnp.pad(stream, (*padding, (0, 0))), jnp.pad(targets, padding), jnp.pad(weights, padding))
    totals, _ = jax.lax.scan(summed, jnp.zeros(2, jnp.float32), tuple(map(in_stretches, parts)))
    surprise, squares = totals / (total if target_weights is None else jnp.where(total > 0, total, 1.0))
    return surprise, squares, balance, shares


def _log_likelihoods(config: DecoderSection, how: Computation, parameters: Tensors, batch: Batch) -> jax.Array:
    """Return ln of each target's probability, (rows, length) float32. The logits of a row are kept one row at a time."""
    stream, *_ = _stream(config, how, parameters, batch.inputs)

    @jax.checkpoint
    def of_row(row: tuple[jax.Array, jax.Array]) -> jax.Array:
        some, wanted = row
        return -_surprise(config, parameters, some[None], wanted[None])[0][0]

    by_row: jax.Array = jax.lax.map(of_row, (stream, batch.targets))
    return by_row


def _surprise(
    config: DecoderSection, parameters: Tensors, stream: jax.Array, targets: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return −ln of each target's probability, and ln Z: (batch, length) float32 each.

    The target's score is a masked sum, not a gather, so that a vocabulary split over devices stays split.
    """
    scores = _scores(config, parameters, stream)
    is_target = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 2) == targets[..., None]
    log_z = jax.nn.logsumexp(scores, axis=-1)
    return log_z - jnp.sum(jnp.where(is_target, scores, 0.0), axis=-1), log_z


def _scores(config: DecoderSection, parameters: Tensors, stream: jax.Array) -> jax.Array:
    """Return the logits of a normalised stream, float32.

    The matrix is cast here, within each stretch of the loss, so that its gradient is summed over stretches in float32.
    """
    matrix = parameters["embed" if config.tied_embeddings else "unembed"].astype(stream.dtype)
    scores = jnp.einsum("btw,vw->btv", stream, matrix, preferred_element_type=jnp.float32)
    return capped(constrained(scores, "batch", None, "vocabulary"), config.logit_softcap)


def _stream(
    config: DecoderSection, how: Computation, parameters: Tensors, inputs: Batch
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Return the last normalised residual stream, (batch, length, width); the mean balance of experts; and the part of each
    layer's choices that each expert got, (layers, experts) float32, None without experts.
    """
    dtype, scale = how.dtype, config.attention_scale or config.head_size**-0.5
    attend = Attention(how.kernel, scale, config.attention_softcap)
    stream = constrained(parameters["embed"][inputs.tokens].astype(dtype), *ACTIVATIONS)
    if config.embedding_scale:
        stream = stream * jnp.asarray(math.sqrt(config.width), dtype)
    rotations = _rotations(config, inputs)

    def block(
        x: jax.Array, layer: tuple[dict[str, jax.Array], Kind]
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array | None]]:
        masters, kind = layer
        x = constrained(x, *ACTIVATIONS)
        tensors = {name: tensor if name.endswith("norm") else tensor.astype(dtype) for name, tensor in masters.items()}

        def normalised(wanted: bool, x: jax.Array, name: str) -> jax.Array:
            return _normalised(config, x, tensors[name]) if wanted else x

        ready = normalised(config.pre_norms, x, "attention.norm")
        mixed = _attention(config, attend, tensors, ready, kind, rotations, inputs.segments)
        x = x + normalised(config.post_norms, mixed, "attention.post_norm")
        ready = normalised(config.pre_norms, x, "feedforward.norm")
        hidden, balance, shares = _feedforward(config, tensors, ready)
        return x + normalised(config.post_norms, hidden, "feedforward.post_norm"), (balance, shares)

    if how.remat != "none":
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if how.remat == "dots" else None
        block = jax.checkpoint(block, policy=policy, prevent_cse=False)
    stacked = {name.removeprefix("layers."): parameters[name] for name in parameters if name.startswith("layers.")}
    layers = range(config.layer_count)
    kinds = jnp.array([config.is_global(layer) for layer in layers]), jnp.array([config.is_rotated(n) for n in layers])
    stream, (balances, shares) = jax.lax.scan(block, stream, (stacked, kinds))
    return _normalised(config, stream, parameters["final_norm"]), jnp.mean(balances), shares


def _attention(
    config: DecoderSection,
    attend: Attention,
    tensors: Tensors,
    x: jax.Array,
    kind: Kind,
    rotations: tuple[jax.Array, jax.Array],
    segments: jax.Array | None,
) -> jax.Array:
    """Apply causal self-attention of one layer: (batch, length, width) → the same."""
    batch, length, _ = x.shape
    is_global, is_rotated = kind

    def heads(name: str, count: int) -> jax.Array:
        mapped = _product(x, tensors, f"attention.{name}")
        if config.attention_bias:
            mapped = mapped + tensors[f"attention.{name}_bias"]
        gain = tensors[f"attention.{name}_norm"] if config.query_key_norm and name != "value" else None
        if gain is not None and config.joint_heads_norm:
            mapped = _normalised(config, mapped, gain)
        split = mapped.reshape(batch, length, count, config.head_size)
        return split if gain is None or config.joint_heads_norm else _normalised(config, split, gain)

    of_all, of_window = rotations
    rotation = of_all if config.window is None else jnp.where(is_global, of_all, of_window)
    if config.unrotated_every is not None:
        rotation = jnp.where(is_rotated, rotation, _unrotated(rotation))
    query = _rotated(heads("query", config.head_count), rotation)
    key = _rotated(heads("key", config.key_value_head_count), rotation)
    value = heads("value", config.key_value_head_count)
    if config.window is None or config.global_every is None:
        mixed = attend(query, key, value, config.window, segments)
    else:
        mixed = jax.lax.cond(
            is_global,
            lambda query, key, value: attend(query, key, value, None, segments),
            lambda query, key, value: attend(query, key, value, config.window, segments),
            *(query, key, value),
        )
    output = _product(mixed.reshape(batch, length, -1), tensors, "attention.output")
    return output + tensors["attention.output_bias"] if config.output_bias else output


def _product(x: jax.Array, tensors: Tensors, name: str) -> jax.Array:
    """Multiply by a matrix, with its adapter if it has one: x · (W + A · B), without that sum."""
    product = x @ tensors[name]
    return product if name + A not in tensors else product + (x @ tensors[name + A]) @ tensors[name + B]


def _feedforward(
    config: DecoderSection, tensors: Tensors, x: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Apply the gated hidden layer, or the token's experts. Also returns their balance, 0 without experts, and shares."""
    if config.experts is not None:
        return _experts(config, config.experts, tensors, x)
    gate, up = (_product(x, tensors, f"feedforward.{name}") for name in ("gate", "up"))
    return _product(_activated(config, gate) * up, tensors, "feedforward.down"), jnp.float32(0), None


def _experts(
    config: DecoderSection, experts: ExpertsSection, tensors: Tensors, x: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Pass each token through its ``active`` best experts, weighted. No token is dropped. Also returns the balance, 1 if
    even, and each expert's part of the choices, (experts,) float32.

        balance = E · Σ_e f_e · p_e    f_e: choices of expert e per token, over all tokens; p_e: its mean probability

    Rows of tokens are sorted by expert, and each expert multiplies its own (``jax.lax.ragged_dot``).
    """
    rows = x.reshape(-1, x.shape[-1])
    rated = jnp.dot(rows, tensors["feedforward.router"], preferred_element_type=jnp.float32)
    if "feedforward.router" + A in tensors:
        inner = rows @ tensors["feedforward.router" + A]
        rated = rated + jnp.dot(inner, tensors["feedforward.router" + B], preferred_element_type=jnp.float32)
    chances = jax.nn.softmax(rated, axis=-1)
    weights, chosen = jax.lax.top_k(chances, experts.active)
    if experts.normalised:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=experts.count).astype(jnp.int32)
    origin = order // experts.active
    sorted_rows = rows[origin]

    def product(x: jax.Array, name: str) -> jax.Array:
        whole = jax.lax.ragged_dot(x, tensors[name], sizes)
        if name + A not in tensors:
            return whole
        return whole + jax.lax.ragged_dot(jax.lax.ragged_dot(x, tensors[name + A], sizes), tensors[name + B], sizes)

    gate, up = product(sorted_rows, "experts.gate"), product(sorted_rows, "experts.up")
    down = product(_activated(config, gate) * up, "experts.down")
    weighted = down * weights.reshape(-1)[order][:, None].astype(down.dtype)
    mixed = jnp.zeros_like(rows).at[origin].add(weighted)
    balance = experts.count * jnp.sum(sizes / rows.shape[0] * jnp.mean(chances, axis=0))
    return mixed.reshape(x.shape), balance, sizes.astype(jnp.float32) / order.size


def _activated(config: DecoderSection, gate: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) if config.activation == "silu" else jax.nn.gelu(gate, approximate=True)


def _normalised(config: DecoderSection, x: jax.Array, gain: jax.Array) -> jax.Array:
    """Scale to root mean square 1 along the last axis, times the gain; computed in float32, returned in x's own type."""
    wide = x.astype(jnp.float32)
    scaled = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + config.norm_epsilon)
    return (scaled * (1 + gain if config.gain_from_one else gain)).astype(x.dtype)


def frequencies(config: DecoderSection) -> tuple[np.ndarray, np.ndarray]:
    """Return radians per position of each pair of a head's dimensions, (size / 2,) float64: global layers, then windows."""
    exponents = -np.arange(0, config.head_size, 2) / config.head_size
    of_all = config.rope_theta**exponents
    if config.rope_scaling is not None:
        of_all = of_all * _scaled(config.rope_scaling, config.rope_theta, of_all)
    return of_all, of_all if config.window_rope_theta is None else config.window_rope_theta**exponents


def _scaled(scaling: RopeScalingSection, theta: float, radians: np.ndarray) -> np.ndarray:
    """Return the factor of each frequency."""
    if scaling.kind == "linear":
        return np.full_like(radians, 1 / scaling.factor)
    if scaling.kind == "llama3":
        waves = scaling.original_length * radians / (2 * np.pi)  # of each pair, in a text of that length
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        share = np.clip((waves - low) / (high - low), 0, 1)
    else:
        size = 2 * len(radians)
        first, last = (
            size * math.log(scaling.original_length / (2 * math.pi * turns)) / (2 * math.log(theta))
            for turns in (scaling.beta_fast, scaling.beta_slow)
        )
        if scaling.whole_bounds:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, size - 1)
        share = 1 - np.clip((np.arange(len(radians)) - first) / (last - first or 1e-3), 0, 1)
    return share + (1 - share) / scaling.factor


def _rotations(config: DecoderSection, inputs: Batch) -> tuple[jax.Array, jax.Array]:
    """Return cosines and sines of global layers and of those with a window.

    (2, length, 1, size / 2) float32; where rows have positions of their own (2, batch, length, 1, size / 2).
    """
    of_row = jnp.arange(inputs.tokens.shape[1])
    positions = (of_row if inputs.positions is None else inputs.positions).astype(jnp.float32)[..., None, None]
    angles = [positions * np.float32(each) for each in frequencies(config)]
    of_all, of_window = (jnp.stack([jnp.cos(angle), jnp.sin(angle)]) for angle in angles)
    if config.rope_scaling is not None:
        of_all = of_all * np.float32(config.rope_scaling.amplitude)
    return of_all, of_all if config.window_rope_theta is None else of_window


def _unrotated(rotation: jax.Array) -> jax.Array:
    """Return a rotation that turns nothing."""
    return jnp.stack([jnp.ones_like(rotation[0]), jnp.zeros_like(rotation[1])])


def _rotated(x: jax.Array, rotation: jax.Array) -> jax.Array:
    cosines, sines = rotation
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = (first * cosines - second * sines, second * cosines + first * sines)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
