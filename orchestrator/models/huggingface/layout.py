"""Which tensors of a Hugging Face checkpoint make up one of ours: their names, in the order of our stacks.

Theirs are one per layer and expert, and matrices are (outputs, inputs), so each of ours is a stack of their transposes.
In a vision-language model they have the same names after a prefix. Files and values are handled elsewhere.
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
WITH_POST_NORMS: Mapping[str, str] = {
    **STACKED,
    "attention.post_norm": "post_attention_layernorm",
    "feedforward.norm": "pre_feedforward_layernorm",
    "feedforward.post_norm": "post_feedforward_layernorm",
}
"""The names in a decoder with norms on both sides, in which ``post_attention_layernorm`` is another one."""

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

    If ``turned``, ours is the transpose of each.
    """

    names: Mapping[tuple[int, ...], str]
    shape: tuple[int, ...]
    turned: bool


def sources_of(decoder: DecoderSection) -> dict[str, Sources]:
    """Return the sources of each of our tensors, by name."""
    return {name: _sources(decoder, name, shape) for name, shape in parameter_shapes(decoder).items()}


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


def _sources(decoder: DecoderSection, name: str, shape: tuple[int, ...]) -> Sources:
    if name in WHOLE:
        return Sources({(): WHOLE[name]}, shape, turned=False)
    own = name.removeprefix("layers.")
    leading = 2 if own.startswith("experts.") else 1
    pattern = (WITH_POST_NORMS if decoder.post_norms else STACKED)[own]
    names = {
        index: f"model.layers.{index[0]}.{pattern.format(*index[1:])}.weight"
        for index in product(*map(range, shape[:leading]))
    }
    inner = shape[leading:]
    return Sources(names, inner[::-1], turned=len(inner) == 2)
