"""Which tensors of a Hugging Face checkpoint make up one of ours: their names, in the order of our stacks.

Theirs are one per layer and expert, and matrices are (outputs, inputs), so each of ours is a stack of their transposes.
Phi 3 has queries, keys and values in one matrix, and gate and up in another; there ours are stacks of some of its rows. In a
vision-language model they have the same names after a prefix. Files and values are handled elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product

from orchestrator.models.decoder import DecoderSection, parameter_shapes

WHOLE: Mapping[str, str] = {
    "embed": "model.embed_tokens.weight",
    "unembed": "lm_head.weight",
    "final_norm": "model.norm.weight",
}
STACKED: Mapping[str, str] = {
    "attention.norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "feedforward.norm": "post_attention_layernorm",
    "feedforward.gate": "mlp.gate_proj",
    "feedforward.up": "mlp.up_proj",
    "feedforward.down": "mlp.down_proj",
    "feedforward.router": "mlp.gate",
    "experts.gate": "mlp.experts.{}.gate_proj",
    "experts.up": "mlp.experts.{}.up_proj",
    "experts.down": "mlp.experts.{}.down_proj",
}
BY_TYPE: Mapping[str, Mapping[str, str]] = {
    "gemma3_text": {
        "attention.post_norm": "post_attention_layernorm",
        "feedforward.norm": "pre_feedforward_layernorm",
        "feedforward.post_norm": "post_feedforward_layernorm",
    },
    "mixtral": {
        "feedforward.router": "block_sparse_moe.gate",
        "experts.gate": "block_sparse_moe.experts.{}.w1",
        "experts.up": "block_sparse_moe.experts.{}.w3",
        "experts.down": "block_sparse_moe.experts.{}.w2",
    },
    "olmo2": {
        "attention.post_norm": "post_attention_layernorm",
        "feedforward.post_norm": "post_feedforward_layernorm",
    },
}
"""The names that differ in some types."""
FUSED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "phi3": {
        "self_attn.qkv_proj": ("attention.query", "attention.key", "attention.value"),
        "mlp.gate_up_proj": ("feedforward.gate", "feedforward.up"),
    },
}
"""Matrices of some types that are several of ours, one below the other."""

TEXT_PREFIXES: Mapping[str, str] = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "lm_head.": "lm_head.",
}
"""The prefixes of a language model's names in a vision-language model, in several releases; and those on its own."""


@dataclass(frozen=True, slots=True)
class Sources:
    """The tensors that make up one of ours, by their index among our leading axes, each with ``shape``.

    If ``turned``, ours is the transpose of each. If ``rows`` is not None, ours is only these rows of each, from the first to
    before the second.
    """

    names: Mapping[tuple[int, ...], str]
    shape: tuple[int, ...]
    turned: bool
    rows: tuple[int, int] | None = None


def sources_of(decoder: DecoderSection, model_type: str) -> dict[str, Sources]:
    """Return the sources of each of our tensors in a checkpoint of this type, by name."""
    shapes = parameter_shapes(decoder)
    return {name: _sources(model_type, name, shapes) for name in shapes}


def text_names(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the tensors of a vision-language model's language model, by the names that they have on its own.

    More than one tensor with the same name means that the file is ambiguous.
    """
    by_name: dict[str, list[str]] = {}
    for name in names:
        for prefix, alone in TEXT_PREFIXES.items():
            if name.startswith(prefix):
                by_name.setdefault(alone + name.removeprefix(prefix), []).append(name)
                break
    return by_name


def _sources(model_type: str, name: str, shapes: Mapping[str, tuple[int, ...]]) -> Sources:
    shape = shapes[name]
    if name in WHOLE:
        return Sources({(): WHOLE[name]}, shape, turned=False)
    own = name.removeprefix("layers.")
    leading = 2 if own.startswith("experts.") else 1
    inner = shape[leading:]
    kind = "bias" if own.endswith("_bias") else "weight"
    pattern = BY_TYPE.get(model_type, {}).get(own) or STACKED.get(own.removesuffix("_bias"), "")
    theirs, rows = inner[::-1], None
    for fused, parts in FUSED.get(model_type, {}).items():
        if own in parts:
            lengths = [shapes[f"layers.{part}"][-1] for part in parts]
            start = sum(lengths[: parts.index(own)])
            pattern, rows, theirs = fused, (start, start + inner[-1]), (sum(lengths), *inner[:-1])
    names = {
        index: f"model.layers.{index[0]}.{pattern.format(*index[1:])}.{kind}"
        for index in product(*map(range, shape[:leading]))
    }
    return Sources(names, theirs, turned=len(inner) == 2, rows=rows)
