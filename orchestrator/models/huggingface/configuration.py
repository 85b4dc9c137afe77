"""A decoder's configuration as Hugging Face's ``config.json``, in both directions.

The supported model types are those of ``TYPES``, and the language models of vision-language models that have one of these
below ``text_config``, such as ``gemma3``. A missing field has its type's default. A field that a ``DecoderSection`` cannot
express (biases of hidden layers, quantised weights, other rotary scalings) is refused by name; so is a decoder that matches
none of the types. Files and tensors are handled elsewhere.

Both spellings of rotary positions are read: ``rope_theta`` and ``rope_scaling``, and ``rope_parameters`` of later releases.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from pydantic import ValidationError

from orchestrator.errors import UnfitWeights
from orchestrator.models.decoder import DecoderSection
from orchestrator.specification.validation import WHOLE, problems_of
from orchestrator.system.plain import brief

Document = Mapping[str, Any]

TYPES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
}
"""The class that loads each type."""
CAUSAL = ("CausalLM", "ForConditionalGeneration", "LMHead")
"""Parts of the names of classes that predict the next token."""
BIASED = frozenset({"llama", "qwen3", "gemma3_text", "olmo2", "smollm3", "qwen3_moe"})
"""Types with biases in all projections of attention, if ``attention_bias`` says so; ``qwen2`` always has three."""
WINDOWED = frozenset({"mistral", "phi3", "mixtral"})
"""Types in which all layers have a window, if ``sliding_window`` is a number."""
SEEING: Mapping[str, str] = {"gemma3": "gemma3_text", "llava": "llama"}
"""Types of vision-language models, with the type of their language model, which is the whole model for text alone."""
DEFAULTS: Mapping[str, Document] = {
    "llama": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    },
    "qwen3": {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu", "head_dim": 128},
    "gemma3_text": {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": 1_000_000.0,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "head_dim": 256,
    },
    "mistral": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "sliding_window": 4096,
    },
    "qwen2": {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 22_016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    "olmo2": {
        "vocab_size": 50_304,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    "phi3": {
        "vocab_size": 32_064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    "smollm3": {
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 11_008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "rope_theta": 2_000_000.0,
        "no_rope_layer_interval": 4,
    },
    "mixtral": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "rope_theta": 1_000_000.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu", "norm_topk_prob": False},
}
"""The defaults of each type, for fields that a document does not have."""
UNKNOWN: Mapping[str, tuple[Any, ...]] = {
    "mlp_bias": (None, False),
    "use_sliding_window": (None, False),
    "use_bidirectional_attention": (None, False),
    "mlp_only_layers": (None, []),
    "decoder_sparse_step": (None, 1),
    "partial_rotary_factor": (None, 1, 1.0),
    "quantization_config": (None,),
    "attn_logit_softcapping": (None,),  # of gemma3_text: transformers has the field but ignores it
    "hidden_act": (None, "silu"),
    "hidden_activation": (None, "gelu_pytorch_tanh"),
}
"""Fields with their supported values. A model with any other value cannot be computed here."""
TOLERANCE = 1e-6
"""The relative tolerance of decimal numbers: more than rounding to float32 changes, less than any deliberate difference."""
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
KEPT = ("attention_dropout", "initializer_range", "use_cache", "max_window_layers", "original_max_position_embeddings")
"""Fields of a continued checkpoint on which its tensors do not depend."""
LENGTHS: Mapping[str, int] = {
    "llama": 2_048,
    "mistral": 131_072,
    "qwen2": 32_768,
    "qwen3": 32_768,
    "gemma3_text": 131_072,
    "olmo2": 2_048,
    "phi3": 4_096,
    "smollm3": 32_768,
    "qwen3_moe": 32_768,
    "mixtral": 131_072,
}
"""The default context length of each type."""
LENGTH_MIN = 2_048
"""The minimum context length of an exported model."""
OTHER_MODELS = "PyTorch islands train any causal language model of transformers: `trainer: {kind: torch, model: DIR}`."
NAMES: Mapping[str, str] = {
    "vocabulary_size": "vocab_size",
    "width": "hidden_size",
    "layer_count": "num_hidden_layers",
    "head_count": "num_attention_heads",
    "key_value_head_count": "num_key_value_heads",
    "head_size": "head_dim",
    "norm_epsilon": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
    "hidden_size": "intermediate_size",
}
"""Fields of config.json by those of a decoder that are taken from them."""


def decoder_of(document: Document) -> DecoderSection:
    """Return the decoder that ``config.json`` describes. Raises UnfitWeights if it describes none that is supported."""
    document = _of_text(document) if sees(document) else document
    kind = document.get("model_type")
    own = TYPES.get(kind) if isinstance(kind, str) else None
    if (named := headless(document)) is not None:
        raise UnfitWeights(
            detail=f"config.json has architectures {brief(named)}, a class that does not predict the next token.",
            remedy=f"Save the model as {own or 'one that AutoModelForCausalLM loads'}.",
        )
    if not isinstance(kind, str) or own is None:
        raise UnfitWeights(
            detail=f"config.json has model_type {brief(kind)}; the supported types are {', '.join((*TYPES, *SEEING))}.",
            remedy=OTHER_MODELS,
        )
    for name, understood in UNKNOWN.items():
        if document.get(name) not in understood:
            raise UnfitWeights(
                detail=f"config.json has {name} {brief(document[name])}, which is not supported.",
                remedy=f"Use weights of a model that has {brief(understood[-1])}. {OTHER_MODELS}",
            )
    values = {**DEFAULTS[kind], **{name: value for name, value in document.items() if value is not None}}
    if kind in WINDOWED and "sliding_window" in document:
        values["sliding_window"] = document["sliding_window"]  # null: there is none
    try:
        return DecoderSection.model_validate(dict(_fields(kind, values)))
    except ValidationError as error:
        problems = [f"{problem.path} {problem.message}".rstrip(".") for problem in problems_of(error, unknown="")[:3]]
        wrong = re.sub(r"\w+", lambda name: NAMES.get(name[0], name[0]), "; ".join(problems).replace(f"{WHOLE} ", ""))
        detail = f"config.json describes no decoder: {wrong}."
        raise UnfitWeights(detail=detail, remedy="Correct config.json.") from error


def headless(document: Document) -> str | None:
    """Return the class that ``config.json`` names, if no such class predicts the next token; None if it names none."""
    named = document.get("architectures")
    names = [each for each in named if isinstance(each, str)] if isinstance(named, list | tuple) else []
    return None if any(part in each for each in names for part in CAUSAL) else next(iter(names), None)


def sees(document: Document) -> bool:
    """Return whether it is of a vision-language model, whose tensors have other names (``layout.text_names``)."""
    kind = document.get("model_type")
    return isinstance(kind, str) and kind in SEEING


def _of_text(document: Document) -> Document:
    """Return the document of the language model. Raises UnfitWeights if it has another type than expected."""
    wanted = SEEING[document["model_type"]]
    text = document.get("text_config")
    text = {} if text is None else text
    if not isinstance(text, Mapping) or text.get("model_type", wanted) != wanted:
        kind = text.get("model_type") if isinstance(text, Mapping) else text
        raise UnfitWeights(
            detail=f"config.json has model_type {brief(document['model_type'])} with text_config of {brief(kind)}; its "
            f"language model is only supported if it is {wanted}.",
            remedy="Export its language model on its own, if it is a supported type.",
        )
    tied = "tie_word_embeddings"
    if text.get(tied, document.get(tied)) != document.get(tied, text.get(tied)):
        raise UnfitWeights(
            detail=f"config.json has {tied} {brief(document[tied])}, but {brief(text[tied])} in text_config.",
            remedy="Set both to what the weights are: false if lm_head.weight is among them.",
        )
    inherited = {name: document[name] for name in ("quantization_config", tied) if name in document}
    return {**inherited, **text, "model_type": wanted}


def text_type(document: Document) -> str:
    """Return the model type, which is supported, of the document's language model."""
    kind: str = document["model_type"]
    return SEEING.get(kind, kind)


def text_document(document: Document) -> Document:
    """Return the fields of the language model; those of a vision-language model apply where it has none of its own."""
    text = document.get("text_config")
    return {**document, **text} if sees(document) and isinstance(text, Mapping) else document


def context_length(document: Document) -> int:
    """Return the context length of a text document; its type's default if it has none."""
    length = document.get("max_position_embeddings")
    kind = str(document.get("model_type"))
    is_whole = type(length) is int or (isinstance(length, float) and length.is_integer())
    return int(length) if is_whole else LENGTHS.get(SEEING.get(kind, kind), LENGTH_MIN)  # type: ignore[arg-type]


def document_of(
    decoder: DecoderSection, length: int, ids: Document | None = None, origin: Document | None = None
) -> dict[str, Any]:
    """Return ``config.json`` of this decoder, for texts of ``length`` tokens.

    ``ids`` are special tokens, such as ``eos_token_id``; None: there are none. ``origin`` is the text document of the
    checkpoint that was continued: fields on which no tensor depends are kept (``KEPT``), and its context length, if that
    is longer. Raises UnfitWeights if no type matches the decoder.
    """
    kind = _type_of(decoder, origin)
    length = max(length, LENGTH_MIN if origin is None else context_length(origin))
    document: dict[str, Any] = {
        "architectures": [TYPES[kind]],
        # types have numbers of their own where nothing is said
        **(dict.fromkeys(IDS) if ids is None else ids),
        "head_dim": decoder.head_size,
        "hidden_size": decoder.width,
        "intermediate_size": decoder.hidden_size or 4 * decoder.width,
        "max_position_embeddings": length,
        "model_type": kind,
        "num_attention_heads": decoder.head_count,
        "num_hidden_layers": decoder.layer_count,
        "num_key_value_heads": decoder.key_value_head_count,
        "rms_norm_eps": decoder.norm_epsilon,
        "rope_scaling": _scaling_document(decoder),
        "rope_theta": decoder.rope_theta,
        "tie_word_embeddings": decoder.tied_embeddings,
        "torch_dtype": "float32",
        "vocab_size": decoder.vocabulary_size,
    }
    if kind == "gemma3_text":
        every = [decoder.is_global(layer) for layer in range(decoder.layer_count)]
        document |= {
            "final_logit_softcapping": decoder.logit_softcap,
            "hidden_activation": "gelu_pytorch_tanh",
            "layer_types": ["full_attention" if is_global else "sliding_attention" for is_global in every],
            "query_pre_attn_scalar": _scalar(decoder),
            "rope_local_base_freq": decoder.window_rope_theta,
            "sliding_window": decoder.window or length,
        }
    else:
        document["hidden_act"] = "silu"
    if kind in BIASED:
        document["attention_bias"] = decoder.output_bias
    if kind in WINDOWED:
        document["sliding_window"] = decoder.window
    if kind in ("qwen2", "smollm3"):
        document["use_sliding_window"] = False
    if kind == "smollm3":
        document |= {
            "no_rope_layer_interval": decoder.unrotated_every or 4,
            "no_rope_layers": [int(decoder.is_rotated(layer)) for layer in range(decoder.layer_count)],
        }
    if experts := decoder.experts:
        document |= {"num_experts_per_tok": experts.active, "router_aux_loss_coef": experts.balance_weight}
        if kind == "mixtral":
            document |= {"intermediate_size": experts.hidden_size, "num_local_experts": experts.count}
        else:
            document |= {
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
                "moe_intermediate_size": experts.hidden_size,
                "norm_topk_prob": experts.normalised,
                "num_experts": experts.count,
            }
    document |= {name: origin[name] for name in KEPT if origin and name in origin}
    if unsaid := differences(decoder, decoder_of(document)):
        field, own, theirs = unsaid[0]
        raise UnfitWeights(
            detail=f"model.decoder has {field} {own}, but the nearest model type, {kind}, has {theirs}: "
            "transformers has no such model.",
            remedy="Export it as safetensors or orbax.",
        )
    return document


def differences(decoder: DecoderSection, other: DecoderSection) -> list[tuple[str, Any, Any]]:
    """Return the fields in which their computations differ, with both values. Decimals within ``TOLERANCE`` are equal."""
    own, theirs = _computed(decoder), _computed(other)
    return [(name, own[name], theirs[name]) for name in own if not _alike(own[name], theirs[name])]


def _alike(one: Any, other: Any) -> bool:
    """Compare, ignoring the last digits of decimals: 1e-5 was often written as its float32, 9.999999747378752e-06."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=TOLERANCE)
    return bool(one == other)


def _computed(decoder: DecoderSection) -> dict[str, Any]:
    """Return the fields that affect the computation, without those that have no effect or only matter in training."""
    values = decoder.model_dump()
    every = tuple(decoder.is_global(layer) for layer in range(decoder.layer_count))
    values["global_layers"] = [layer for layer, is_global in enumerate(every) if is_global]
    values["unrotated_every"] = [layer for layer in range(decoder.layer_count) if not decoder.is_rotated(layer)]
    del values["global_every"]
    if all(every):
        values["window"] = values["window_rope_theta"] = None
    elif decoder.rope_scaling is None and decoder.window_rope_theta is None:
        values["window_rope_theta"] = decoder.rope_theta
    elif not any(every) and decoder.window_rope_theta is not None:  # nobody has the scaling
        values |= {"rope_theta": decoder.window_rope_theta, "rope_scaling": None}
    values["attention_scale"] = decoder.attention_scale or decoder.head_size**-0.5
    if decoder.experts:
        del values["experts"]["balance_weight"]
    if (scaling := decoder.rope_scaling) and values["rope_scaling"]:
        values["rope_scaling"] = {name: getattr(scaling, name) for name in ("kind", "factor", *SCALINGS[scaling.kind])}
        values["rope_scaling"] |= {"attention_factor": scaling.amplitude}
    return values


def _fields(kind: str, values: Document) -> Iterator[tuple[str, Any]]:
    """Yield the decoder's fields from a document with its defaults."""
    heads = values.get("num_attention_heads")
    yield "vocabulary_size", values.get("vocab_size")
    yield "width", values.get("hidden_size")
    yield "layer_count", values.get("num_hidden_layers")
    yield "head_count", heads
    yield "key_value_head_count", values.get("num_key_value_heads", heads)
    yield "head_size", values.get("head_dim") or _quotient(values.get("hidden_size"), heads)
    yield "norm_epsilon", _number(values.get("rms_norm_eps"))
    yield "tied_embeddings", values["tie_word_embeddings"]
    if kind in ("qwen3_moe", "mixtral"):
        yield "experts", _experts(kind, values)
    else:
        yield "hidden_size", values.get("intermediate_size")
    if kind in BIASED:
        yield "attention_bias", values.get("attention_bias", False)
        yield "output_bias", values.get("attention_bias", False)
    if kind == "qwen2":
        yield "attention_bias", True
    if kind in ("qwen3", "qwen3_moe", "gemma3_text", "olmo2"):
        yield "query_key_norm", True
    if kind == "olmo2":
        yield from (("pre_norms", False), ("post_norms", True), ("joint_heads_norm", True))
    if kind == "smollm3":
        yield "unrotated_every", _unrotated_every(values)
    if kind in WINDOWED and values.get("sliding_window") is not None:
        yield from (("window", values["sliding_window"]), ("global_every", None), ("window_rope_theta", None))
    rope: Document = {
        "rope_theta": values.get("rope_theta", 10_000.0),
        **(_rotary(values, "rope_parameters") or _rotary(values, "rope_scaling")),
    }
    if kind == "gemma3_text":
        yield from _gemma3_fields(values, rope)
        rope = _rotary(rope, "full_attention") or rope
    if rope.get("partial_rotary_factor") not in UNKNOWN["partial_rotary_factor"]:
        raise UnfitWeights(
            detail=f"config.json has partial_rotary_factor {brief(rope['partial_rotary_factor'])}, which is not supported.",
            remedy=f"Use weights of a model that has 1.0. {OTHER_MODELS}",
        )
    yield "rope_theta", _number(rope.get("rope_theta"))
    yield "rope_scaling", _scaling(kind, rope, values)


def _experts(kind: str, values: Document) -> dict[str, Any]:
    return {
        "count": values.get("num_experts", values.get("num_local_experts")),
        "active": values.get("num_experts_per_tok"),
        "hidden_size": values.get("intermediate_size" if kind == "mixtral" else "moe_intermediate_size"),
        "normalised": kind == "mixtral" or values["norm_topk_prob"],
        "balance_weight": _number(values.get("router_aux_loss_coef", 0.001)),
    }


def _unrotated_every(values: Document) -> Any:
    """Return n if every n-th layer has no rotary positions, None if all have them. Raises UnfitWeights if irregular."""
    listed = values.get("no_rope_layers")
    if listed is None:
        return values["no_rope_layer_interval"]
    count = values.get("num_hidden_layers")
    layers = listed[:count] if isinstance(listed, list) and isinstance(count, int) else [None]
    if any(each not in (0, 1) for each in layers):
        layers = []
    return _every_nth([each == 0 for each in layers], "no_rope_layers", listed, "rotary positions")


def _gemma3_fields(values: Document, rope: Document) -> Iterator[tuple[str, Any]]:
    yield "activation", "gelu"
    for name in ("embedding_scale", "gain_from_one", "post_norms"):
        yield name, True
    yield "logit_softcap", _number(values.get("final_logit_softcapping"))
    scalar = values["query_pre_attn_scalar"]
    if not isinstance(scalar, int | float) or not scalar > 0:
        raise UnfitWeights(
            detail=f"config.json has query_pre_attn_scalar {brief(scalar)}.", remedy="Use a number above 0."
        )
    yield "attention_scale", scalar**-0.5
    kinds = values.get("layer_types")
    every = values["sliding_window_pattern"] if kinds is None else _period(kinds)
    if every != 1:
        yield "window", values["sliding_window"]
        yield "global_every", every
        of_window = _rotary(rope, "sliding_attention") or {"rope_theta": values.get("rope_local_base_freq", 10_000.0)}
        yield "window_rope_theta", _number(of_window.get("rope_theta"))


def _period(kinds: Any) -> int | None:
    """Return n if every n-th layer has no window, None if all have one. Raises UnfitWeights if it is irregular."""
    layers = list(kinds) if isinstance(kinds, list | tuple) else []
    if any(kind not in ("full_attention", "sliding_attention") for kind in layers):
        layers = []
    return _every_nth([kind == "full_attention" for kind in layers], "layer_types", kinds, "full attention")


def _every_nth(layers: list[bool], field: str, value: Any, what: str) -> int | None:
    """Return n if exactly every n-th layer is True, None if no layer is. Raises UnfitWeights, also without layers."""
    first = layers.index(True) + 1 if True in layers else len(layers) + 1
    if not layers or any(is_one != (number % first == 0) for number, is_one in enumerate(layers, start=1)):
        raise UnfitWeights(
            detail=f"config.json has {field} {brief(value)}, not a regular pattern of layers by their {what}.",
            remedy="Use weights of a model in which every n-th layer differs.",
        )
    return first if True in layers else None


def _rotary(values: Document, name: str) -> Document:
    """Return the document of rotary positions with this name; empty if absent. Raises UnfitWeights."""
    rope = values.get(name)
    if rope is not None and not isinstance(rope, Mapping):
        raise UnfitWeights(
            detail=f"config.json has {name} {brief(rope)}, which is not a mapping.",
            remedy="Use the config.json that transformers has written.",
        )
    return rope or {}


SCALINGS: Mapping[str, Mapping[str, str]] = {
    "linear": {},
    "llama3": {
        "low_frequency_factor": "low_freq_factor",
        "high_frequency_factor": "high_freq_factor",
        "original_length": "original_max_position_embeddings",
    },
    "yarn": {
        "original_length": "original_max_position_embeddings",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "whole_bounds": "truncate",
        "attention_factor": "attention_factor",
    },
}
"""Our fields of each kind of rotary scaling besides ``factor``, with their names in a document."""


def _scaling(kind: str, rope: Document, values: Document) -> dict[str, Any] | None:
    scaling = rope.get("rope_type", rope.get("type", "default"))
    if scaling == "default":
        return None
    if not isinstance(scaling, str) or scaling not in SCALINGS or (kind, scaling) == ("phi3", "yarn"):
        raise UnfitWeights(
            detail=f"config.json has rotary positions of type {brief(scaling)}; supported are default, "
            f"{', '.join(SCALINGS)}.",
            remedy=f"Use weights of a model with one of these. {OTHER_MODELS}",
        )
    original = "original_max_position_embeddings"
    named = {original: values.get(original, values.get("max_position_embeddings")), **rope}
    fields = {own: _number(named[theirs]) for own, theirs in SCALINGS[scaling].items() if named.get(theirs) is not None}
    if "original_length" in fields:
        fields["original_length"] = named[original]
    factor = _number(rope.get("factor"))
    if scaling == "yarn":
        if factor is None:
            length = values.get("max_position_embeddings")
            factor = length / named[original] if _is_positive(length) and _is_positive(named[original]) else None
        scales = [rope.get("mscale"), rope.get("mscale_all_dim")]
        times = math.log(max(1.0, factor)) if _is_positive(factor) else 0.0
        of_scales = [1 + 0.1 * scale * times for scale in scales if _is_positive(scale)]
        if "attention_factor" not in fields and len(of_scales) == 2:
            fields["attention_factor"] = of_scales[0] / of_scales[1]
    return {"kind": scaling, "factor": factor, **fields}


def _scaling_document(decoder: DecoderSection) -> dict[str, Any] | None:
    scaling = decoder.rope_scaling
    if scaling is None:
        return None
    named = {theirs: getattr(scaling, own) for own, theirs in SCALINGS[scaling.kind].items()}
    present = {name: value for name, value in named.items() if value is not None}
    return {"rope_type": scaling.kind, "factor": scaling.factor, **present}


def _type_of(decoder: DecoderSection, origin: Document | None) -> str:
    """Return the type of the checkpoint that was continued, if it is known; otherwise the nearest type."""
    continued = origin.get("model_type") if origin else None
    if isinstance(continued, str) and (kind := SEEING.get(continued, continued)) in TYPES:
        return kind
    if not decoder.pre_norms:
        return "olmo2"
    if decoder.post_norms:
        return "gemma3_text"
    if decoder.experts:
        return "qwen3_moe" if decoder.query_key_norm else "mixtral"
    if decoder.query_key_norm:
        return "qwen3"
    if decoder.unrotated_every is not None:
        return "smollm3"
    if decoder.window is not None:
        return "mistral"
    return "qwen2" if decoder.attention_bias and not decoder.output_bias else "llama"


def _scalar(decoder: DecoderSection) -> int | float:
    scalar = round((decoder.attention_scale or decoder.head_size**-0.5) ** -2, 6)
    return int(scalar) if scalar.is_integer() else scalar


def _number(value: Any) -> Any:
    """Return a decimal for an integer: such documents write some decimals as integers."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _is_positive(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _quotient(width: Any, heads: Any) -> Any:
    return width // heads if isinstance(width, int) and isinstance(heads, int) and heads > 0 else None
