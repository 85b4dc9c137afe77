"""Which tensors of a Hugging Face checkpoint make one of ours: their names, in the order in which ours are stacked.

Theirs are one per layer and expert, and matrices are (outputs, inputs), so that each of ours is a stack of theirs turned
over. Of a model that also sees they have the same names behind a prefix. Refuses to know files and numbers.
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
"""Of a decoder with norms on both sides, where ``post_attention_layernorm`` is another one."""

TEXT_PREFIXES: Mapping[str, str] = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "lm_head.": "lm_head.",
}
"""How names of a language model begin in a model that also sees, as releases wrote it; and how where it is alone."""


@dataclass(frozen=True, slots=True)
class Sources:
    """The tensors that make one of ours: theirs by the index among ours' leading axes, of ``shape`` each.

    ``turned`` says that ours is the transpose of each.
    """

    names: Mapping[tuple[int, ...], str]
    shape: tuple[int, ...]
    turned: bool


def sources_of(decoder: DecoderSection) -> dict[str, Sources]:
    """By the name of each of our tensors."""
    return {name: _sources(decoder, name, shape) for name, shape in parameter_shapes(decoder).items()}


def text_names(names: Iterable[str]) -> dict[str, list[str]]:
    """Those tensors of a model that also sees which are its language model's, by the names that they would have alone.

    More than one of a name is a file that nobody can read in one way.
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
