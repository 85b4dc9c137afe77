"""The models that a specification can name: plain ones, and decoders like published ones.

A decoder with a published name has that model's shapes and constants, so that its weights fit; the smaller ones of a family
differ only in size and vocabulary. The specification sets what a name leaves open, such as another vocabulary
(``sections.ModelSection``). The shapes of the plain transformer are here, so that its memory is known without JAX;
``learners.models.plain`` computes it. Presets are not validated when this module is imported; a test does so.

Sources: the configurations published with Gemma 3 (arXiv:2503.19786), Llama 3 (arXiv:2407.21783) and Qwen 3
(arXiv:2505.09388).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from orchestrator.models.decoder import DecoderSection, ExpertsSection, RopeScalingSection

BYTE_VALUES = 256
"""Tokens are bytes unless the specification has a tokenizer."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """The sizes of a plain transformer. ``width`` is a multiple of ``head_size``; the hidden layer is four times as wide."""

    width: int
    layer_count: int
    head_size: int = 64
    vocabulary_size: int = BYTE_VALUES

    @property
    def parameter_count(self) -> int:
        return sum(map(math.prod, self.shapes.values()))

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        return parameter_shapes(self)

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Names and shapes of the tensors that adapters may have (``trainable``)."""
        return {name: shape for name, shape in self.shapes.items() if name.startswith("blocks.")}

    @property
    def dimensions(self) -> dict[str, tuple[str, str]]:
        """The names of each tensor's dimensions, by which a mesh splits them."""
        by_end = {"embed": ("vocabulary", "width"), "unembed": ("width", "vocabulary")}
        by_end |= {"output": ("heads", "width"), "up": ("width", "hidden"), "down": ("hidden", "width")}
        return {name: by_end.get(name.rpartition(".")[2], ("width", "heads")) for name in self.shapes}


def parameter_shapes(architecture: Architecture) -> dict[str, tuple[int, int]]:
    """Return names and shapes of all tensors; a matrix maps (inputs, outputs)."""
    width, hidden = architecture.width, 4 * architecture.width
    shapes = {"embed": (architecture.vocabulary_size, width)}
    for layer in range(architecture.layer_count):
        for name in ("query", "key", "value", "output"):
            shapes[f"blocks.{layer}.attention.{name}"] = (width, width)
        shapes[f"blocks.{layer}.feedforward.up"] = (width, hidden)
        shapes[f"blocks.{layer}.feedforward.down"] = (hidden, width)
    shapes["unembed"] = (width, architecture.vocabulary_size)
    return shapes


PresetName = Literal[
    "nano",
    "micro",
    "small",
    "gemma3-20m",
    "gemma3-100m",
    "gemma3-270m",
    "gemma3-1b",
    "gemma3-4b",
    "gemma3-12b",
    "llama3-20m",
    "llama3-100m",
    "llama3.2-1b",
    "llama3.2-3b",
    "llama3.1-8b",
    "qwen3-20m",
    "qwen3-100m",
    "qwen3-0.6b",
    "qwen3-1.7b",
    "qwen3-4b",
    "qwen3-8b",
    "moe-20m",
    "moe-500m",
]

PLAIN: Mapping[str, Architecture] = {
    "nano": Architecture(width=128, layer_count=4),
    "micro": Architecture(width=320, layer_count=8),
    "small": Architecture(width=1024, layer_count=10),
}
"""0.85, 10.0 and 126 million parameters."""


def _gemma3(**sizes: Any) -> DecoderSection:
    return DecoderSection.model_construct(
        activation="gelu",
        embedding_scale=True,
        gain_from_one=True,
        post_norms=True,
        query_key_norm=True,
        rope_theta=1_000_000.0,
        **{"key_value_head_count": 1, "head_size": 256, "window": 512, **sizes},
    )


def _llama3(**sizes: Any) -> DecoderSection:
    return DecoderSection.model_construct(norm_epsilon=1e-5, rope_theta=500_000.0, **sizes)


def _qwen3(**sizes: Any) -> DecoderSection:
    return DecoderSection.model_construct(query_key_norm=True, rope_theta=1_000_000.0, **sizes)


def _llama_scaling(factor: float) -> RopeScalingSection:
    return RopeScalingSection.model_construct(kind="llama3", factor=factor)


_20M: Mapping[str, int] = {
    "vocabulary_size": 16_384,
    "width": 384,
    "layer_count": 8,
    "head_count": 6,
    "key_value_head_count": 2,
    "head_size": 64,
    "hidden_size": 1_024,
}
_100M: Mapping[str, int] = {
    "vocabulary_size": 32_768,
    "width": 640,
    "layer_count": 16,
    "head_count": 10,
    "key_value_head_count": 2,
    "head_size": 64,
    "hidden_size": 1_792,
}
_GEMMA3_LONG: Mapping[str, Any] = {
    "vocabulary_size": 262_208,
    "window": 1_024,
    "rope_scaling": RopeScalingSection.model_construct(kind="linear", factor=8.0),
}
_QWEN3: Mapping[str, int] = {"vocabulary_size": 151_936, "key_value_head_count": 8, "head_size": 128}

DECODERS: Mapping[str, DecoderSection] = {
    "gemma3-20m": _gemma3(**_20M),
    "gemma3-100m": _gemma3(**_100M),
    "gemma3-270m": _gemma3(vocabulary_size=262_144, width=640, layer_count=18, head_count=4, hidden_size=2_048),
    "gemma3-1b": _gemma3(vocabulary_size=262_144, width=1_152, layer_count=26, head_count=4, hidden_size=6_912),
    "gemma3-4b": _gemma3(
        width=2_560, layer_count=34, head_count=8, key_value_head_count=4, hidden_size=10_240, **_GEMMA3_LONG
    ),
    "gemma3-12b": _gemma3(
        width=3_840, layer_count=48, head_count=16, key_value_head_count=8, hidden_size=15_360, **_GEMMA3_LONG
    ),
    "llama3-20m": _llama3(**_20M),
    "llama3-100m": _llama3(**_100M),
    "llama3.2-1b": _llama3(
        vocabulary_size=128_256,
        width=2_048,
        layer_count=16,
        head_count=32,
        key_value_head_count=8,
        head_size=64,
        hidden_size=8_192,
        rope_scaling=_llama_scaling(32.0),
    ),
    "llama3.2-3b": _llama3(
        vocabulary_size=128_256,
        width=3_072,
        layer_count=28,
        head_count=24,
        key_value_head_count=8,
        head_size=128,
        hidden_size=8_192,
        rope_scaling=_llama_scaling(32.0),
    ),
    "llama3.1-8b": _llama3(
        vocabulary_size=128_256,
        width=4_096,
        layer_count=32,
        head_count=32,
        key_value_head_count=8,
        head_size=128,
        hidden_size=14_336,
        tied_embeddings=False,
        rope_scaling=_llama_scaling(8.0),
    ),
    "qwen3-20m": _qwen3(**_20M),
    "qwen3-100m": _qwen3(**_100M),
    "qwen3-0.6b": _qwen3(width=1_024, layer_count=28, head_count=16, hidden_size=3_072, **_QWEN3),
    "qwen3-1.7b": _qwen3(width=2_048, layer_count=28, head_count=16, hidden_size=6_144, **_QWEN3),
    "qwen3-4b": _qwen3(width=2_560, layer_count=36, head_count=32, hidden_size=9_728, **_QWEN3),
    "qwen3-8b": _qwen3(width=4_096, layer_count=36, head_count=32, hidden_size=12_288, tied_embeddings=False, **_QWEN3),
    "moe-20m": _qwen3(
        vocabulary_size=16_384,
        width=256,
        layer_count=6,
        head_count=4,
        key_value_head_count=2,
        head_size=64,
        experts=ExpertsSection.model_construct(count=8, active=2, hidden_size=448),
    ),
    "moe-500m": _qwen3(
        vocabulary_size=32_768,
        width=768,
        layer_count=12,
        head_count=12,
        key_value_head_count=4,
        head_size=64,
        experts=ExpertsSection.model_construct(count=32, active=4, hidden_size=512),
    ),
}
