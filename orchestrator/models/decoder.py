"""A decoder-only transformer as a configuration that covers Gemma 3, Llama, Mistral, OLMo 2, Phi 3, Qwen, SmolLM 3 and
mixtures of experts.

It defines the fields with their bounds, and the names and shapes of the tensors that follow from them. How a decoder is
computed is in ``learners.models.decoder``; what others call its tensors is in ``huggingface``.

Names and shapes, with L layers, E experts, matrices as (inputs, outputs):

    embed                            (vocabulary, width)       unembed, unless tied, alike
    final_norm                       (width,)
    layers.attention.norm            (L, width)                post_norm alike
    layers.attention.query           (L, width, heads · size)  key, value with their own heads
    layers.attention.query_bias      (L, heads · size)         key_bias, value_bias alike
    layers.attention.query_norm      (L, size)                 key_norm alike; or (L, heads · size), over all heads
    layers.attention.output          (L, heads · size, width)
    layers.attention.output_bias     (L, width)
    layers.feedforward.norm          (L, width)                post_norm alike
    layers.feedforward.gate, up      (L, width, hidden)        down (L, hidden, width)
    layers.feedforward.router        (L, width, E)             of a mixture, and instead of the three above
    layers.experts.gate, up          (L, E, width, hidden)     down (L, E, hidden, width)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from orchestrator.specification.bounds import Section

Width = Annotated[int, Field(strict=True, ge=1, le=2**17)]
LayerCount = Annotated[int, Field(strict=True, ge=1, le=1024)]
HeadCount = Annotated[int, Field(strict=True, ge=1, le=1024)]
ExpertCount = Annotated[int, Field(strict=True, ge=1, le=4096)]
VocabularySize = Annotated[int, Field(strict=True, ge=2, le=2**24)]
Positive = Annotated[float, Field(strict=True, gt=0, le=1e9, allow_inf_nan=False)]
Weight = Annotated[float, Field(strict=True, ge=0, le=1e3, allow_inf_nan=False)]

AXES_BY_NAME: Mapping[str, tuple[str | None, ...]] = {
    "embed": ("vocabulary", "width"),
    "unembed": ("vocabulary", "width"),
    "query": ("width", "heads"),
    "key": ("width", "heads"),
    "value": ("width", "heads"),
    "output": ("heads", "width"),
    "router": ("width", None),
    "gate": ("width", "hidden"),
    "up": ("width", "hidden"),
    "down": ("hidden", "width"),
    "query_bias": ("heads",),
    "key_bias": ("heads",),
    "value_bias": ("heads",),
    "output_bias": ("width",),
    "query_norm": (None,),
    "key_norm": (None,),
    "norm": ("width",),
    "post_norm": ("width",),
    "final_norm": ("width",),
}
"""The names of a tensor's dimensions, by the last part of its name; stacked tensors have more before these."""

PARAMETERS_MAX = 10**12
"""The limit of one model. Larger counts and sizes have never been tried."""


class RopeScalingSection(Section):
    """Scales the frequencies of rotary positions for longer texts: all of them divided by ``factor`` (``linear``), or only
    those whose waves are long relative to ``original_length``, with a transition between, as in Llama 3.1 (``llama3``) and
    in YaRN (``yarn``, arXiv:2309.00071).
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: Positive
    low_frequency_factor: Positive = 1.0
    high_frequency_factor: Positive = 4.0
    original_length: Annotated[int, Field(strict=True, ge=1, le=2**24)] = 8192
    beta_fast: Positive = Field(default=32.0, description="for yarn: waves that turn more often than this are kept")
    beta_slow: Positive = Field(default=1.0, description="for yarn: waves that turn less often are divided by factor")
    whole_bounds: bool = Field(default=True, description="for yarn: the transition begins and ends at whole dimensions")
    attention_factor: Positive | None = Field(
        default=None, description="for yarn: multiplies queries and keys; if absent, 1 + ln(factor) / 10"
    )

    @model_validator(mode="after")
    def _a_transition(self) -> RopeScalingSection:
        if self.kind == "llama3" and self.low_frequency_factor >= self.high_frequency_factor:
            raise ValueError("low_frequency_factor is not below high_frequency_factor; use 1 and 4, as Llama 3 does")
        if self.kind == "yarn" and self.beta_slow >= self.beta_fast:
            raise ValueError("beta_slow is not below beta_fast; use 1 and 32, as YaRN does")
        return self

    @property
    def amplitude(self) -> float:
        """The factor of rotated queries and keys."""
        if self.kind != "yarn":
            return 1.0
        return self.attention_factor or 1 + 0.1 * math.log(max(1.0, self.factor))


class ExpertsSection(Section):
    """Replaces the hidden layer by ``count`` of them. Each token passes through the ``active`` ones that its router rates
    highest (Qwen 3 MoE; Switch Transformers, arXiv:2101.03961).
    """

    count: ExpertCount
    active: ExpertCount
    hidden_size: Width = Field(description="size of one expert's hidden layer")
    normalised: bool = Field(
        default=True, description="scale the weights of a token's experts so that they add up to one"
    )
    balance_weight: Weight = Field(default=0.001, description="weight of the load-balance loss in the objective")

    @model_validator(mode="after")
    def _no_more_than_there_are(self) -> ExpertsSection:
        if self.active > self.count:
            raise ValueError(
                f"active is {self.active}, but there are {self.count} experts; lower it to at most {self.count}"
            )
        return self


class DecoderSection(Section):
    """A decoder-only transformer with rotary positions, RMS norms and gated hidden layers. Defaults are Llama's.

    Attention is causal. With ``window`` a position sees that many positions, including itself, except in every
    ``global_every``-th layer. Norms are before attention and hidden layer (``pre_norms``), after them (``post_norms``, as in
    OLMo 2), or both, as in Gemma. With ``gain_from_one`` a norm's gain is one plus the trained value.
    """

    vocabulary_size: VocabularySize = 256
    width: Width
    layer_count: LayerCount
    head_count: HeadCount
    key_value_head_count: HeadCount = Field(
        description="must divide head_count; each serves an equal number of query heads"
    )
    head_size: Annotated[int, Field(strict=True, ge=2, le=4096, multiple_of=2)]
    hidden_size: Width | None = Field(default=None, description="size of the hidden layer; absent with experts")
    experts: ExpertsSection | None = None
    activation: Literal["silu", "gelu"] = Field(
        default="silu", description="activation of the gate: SwiGLU, or GeGLU (by tanh)"
    )
    tied_embeddings: bool = True
    embedding_scale: bool = Field(default=False, description="multiply embeddings by the square root of width")
    norm_epsilon: Annotated[float, Field(strict=True, ge=1e-12, le=0.1)] = 1e-6
    gain_from_one: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    query_key_norm: bool = Field(default=False, description="apply an RMS norm to each head's query and key")
    joint_heads_norm: bool = Field(default=False, description="with query_key_norm: one norm over all heads together")
    attention_bias: bool = Field(default=False, description="add biases to queries, keys and values")
    output_bias: bool = Field(default=False, description="add a bias to the output of attention")
    rope_theta: Positive = 10_000.0
    rope_scaling: RopeScalingSection | None = None
    unrotated_every: LayerCount | None = Field(
        default=None, description="every n-th layer has no rotary positions; if absent, all have them"
    )
    window: Annotated[int, Field(strict=True, ge=1, le=2**24)] | None = None
    global_every: LayerCount | None = Field(
        default=6, description="with window: every n-th layer has none; null: all have one"
    )
    window_rope_theta: Positive | None = Field(
        default=10_000.0,
        description="for layers with a window, without rope_scaling; null: they have the rotary positions of the others",
    )
    attention_scale: Positive | None = Field(
        default=None, description="scale of the scores; if absent, one over the square root of head_size"
    )
    attention_softcap: Positive | None = Field(default=None, description="scores s become c · tanh(s / c)")
    logit_softcap: Positive | None = None

    @model_validator(mode="after")
    def _parts_fit(self) -> DecoderSection:
        if self.head_count % self.key_value_head_count:
            raise ValueError(
                f"key_value_head_count is {self.key_value_head_count}, which does not divide head_count "
                f"{self.head_count}; use one that does"
            )
        if (self.hidden_size is None) == (self.experts is None):
            raise ValueError("needs exactly one of hidden_size and experts; give one of the two")
        if not self.pre_norms and not self.post_norms:
            raise ValueError("has neither pre_norms nor post_norms; set one of them")
        if self.joint_heads_norm and not self.query_key_norm:
            raise ValueError("has joint_heads_norm without query_key_norm; set both, or leave both out")
        if self.rope_scaling is not None and self.rope_scaling.kind == "yarn" and self.rope_theta <= 1:
            raise ValueError(f"rope_theta is {self.rope_theta:g}, but yarn needs one above 1; use 10000 or more")
        if self.parameter_count > PARAMETERS_MAX:
            raise ValueError(f"has {self.parameter_count:,} parameters, but the maximum is {PARAMETERS_MAX:,}")
        return self

    @property
    def parameter_count(self) -> int:
        return sum(map(math.prod, self.shapes.values()))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return parameter_shapes(self)

    @property
    def matrices(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors that adapters may have (``trainable``)."""
        return {name: shape for name, shape in self.shapes.items() if len(shape) - (stacked_axes(name) or 2) == 2}

    @property
    def dimensions(self) -> dict[str, tuple[str | None, ...]]:
        """The names of each tensor's dimensions, by which a mesh splits them."""
        leading = ("layers", "experts")
        return {name: (*leading[: stacked_axes(name)], *AXES_BY_NAME[name.rpartition(".")[2]]) for name in self.shapes}

    def is_global(self, layer: int) -> bool:
        """Return whether a position of this layer (from 0) sees all earlier positions."""
        return self.window is None or (self.global_every is not None and (layer + 1) % self.global_every == 0)

    def is_rotated(self, layer: int) -> bool:
        """Return whether this layer (from 0) has rotary positions."""
        return self.unrotated_every is None or (layer + 1) % self.unrotated_every != 0


def parameter_shapes(decoder: DecoderSection) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of all tensors."""
    layers, width = decoder.layer_count, decoder.width
    queries, pairs = decoder.head_count * decoder.head_size, decoder.key_value_head_count * decoder.head_size
    shapes: dict[str, tuple[int, ...]] = {"embed": (decoder.vocabulary_size, width), "final_norm": (width,)}
    if not decoder.tied_embeddings:
        shapes["unembed"] = (decoder.vocabulary_size, width)
    for half in ("attention", "feedforward"):
        if decoder.pre_norms:
            shapes[f"layers.{half}.norm"] = (layers, width)
        if decoder.post_norms:
            shapes[f"layers.{half}.post_norm"] = (layers, width)
    shapes |= {
        "layers.attention.query": (layers, width, queries),
        "layers.attention.key": (layers, width, pairs),
        "layers.attention.value": (layers, width, pairs),
        "layers.attention.output": (layers, queries, width),
    }
    if decoder.query_key_norm:
        of_query, of_key = (queries, pairs) if decoder.joint_heads_norm else (decoder.head_size, decoder.head_size)
        shapes |= {"layers.attention.query_norm": (layers, of_query), "layers.attention.key_norm": (layers, of_key)}
    if decoder.attention_bias:
        biases = {"query": queries, "key": pairs, "value": pairs}
        shapes |= {f"layers.attention.{name}_bias": (layers, size) for name, size in biases.items()}
    if decoder.output_bias:
        shapes["layers.attention.output_bias"] = (layers, width)
    if decoder.experts is None:
        group, hidden = "feedforward", decoder.hidden_size or 0
        leading: tuple[int, ...] = (layers,)
    else:
        group, hidden, leading = "experts", decoder.experts.hidden_size, (layers, decoder.experts.count)
        shapes["layers.feedforward.router"] = (layers, width, decoder.experts.count)
    shapes |= {f"layers.{group}.{name}": (*leading, width, hidden) for name in ("gate", "up")}
    shapes[f"layers.{group}.down"] = (*leading, hidden, width)
    return shapes


def stacked_axes(name: str) -> int:
    """Return how many leading axes of a tensor number layers, or layers and experts."""
    return 2 if name.startswith("layers.experts.") else 1 if name.startswith("layers.") else 0
