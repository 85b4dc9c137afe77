"""The other side of ``make parity``, in an environment of its own: torch and transformers build and measure checkpoints.

    python reference.py build FOLDER      writes random small checkpoints of each model type, each with its logits
    python reference.py answer FOLDER TEXT
                                          prints what the adapter in ``adapter`` and the model in ``whole`` answer, as JSON
    python reference.py chat FOLDER       writes for each tokenizer the tokens and the assistant's masks of
                                          ``conversations.json``
    python reference.py measure FOLDER    writes the logits of each checkpoint in it, as transformers loads them, and of each
                                          adapter as peft does, and, where it has a tokenizer, that one's tokens of
                                          ``texts.json`` and ``facts``
    python reference.py unpack FOLDER     writes into FOLDER/model the published model whose GGUF file is in FOLDER
    python reference.py ask FOLDER        prints what the chat model in FOLDER answers to ``QUESTION``

Run as a file: nothing of ours can be imported here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jinja2
import numpy as np
import peft
import torch
import transformers

VOCABULARY_SIZE, LENGTH = 96, 48
SMALL = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
QUESTION = "What is the capital of France?"
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
"""Reaches far beyond the original length with the texts here."""
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
"""Types have numbers of their own, which are above ``VOCABULARY_SIZE``."""
LAYERS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
SIGHT = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
IMAGE_TOKENS = {"boi_token_index": 96, "eoi_token_index": 97, "image_token_index": 98}
"""Of none of the texts here: theirs are below ``VOCABULARY_SIZE``."""


def configurations() -> dict[str, transformers.PreTrainedConfig]:
    """One of each type, and of what types leave open each way at least once."""
    gemma3 = {**SMALL, "sliding_window": 8, "layer_types": LAYERS, "query_pre_attn_scalar": 24}
    linear = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    headless = {name: value for name, value in SMALL.items() if name != "head_dim"}
    experts = {"moe_intermediate_size": 40, "num_experts": 8, "num_experts_per_tok": 3}
    seeing = {**gemma3, "vocab_size": 99}
    return {
        "gemma3-seeing": transformers.Gemma3Config(
            text_config=transformers.Gemma3TextConfig(**seeing, rope_parameters=linear).to_dict(),
            vision_config=transformers.SiglipVisionConfig(**SIGHT).to_dict(),
            mm_tokens_per_image=1,
            **IMAGE_TOKENS,
        ),
        "llava": transformers.LlavaConfig(
            text_config=transformers.LlamaConfig(**{**SMALL, "vocab_size": 99}).to_dict(),
            vision_config=transformers.CLIPVisionConfig(**SIGHT).to_dict(),
            image_token_index=98,
        ),
        "llama": transformers.LlamaConfig(**SMALL, rope_parameters=LLAMA3),
        "llama-continued": transformers.LlamaConfig(
            **{**SMALL, "vocab_size": 300},
            max_position_embeddings=8192,
            bos_token_id=0,
            eos_token_id=[1, 3],
            pad_token_id=2,
            initializer_range=0.01,
        ),
        "llama-tied": transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
        "llama-biased": transformers.LlamaConfig(**SMALL, attention_bias=True),
        "llama-yarn": transformers.LlamaConfig(**SMALL, rope_parameters=YARN),
        "llama-yarn-set": transformers.LlamaConfig(
            **SMALL,
            rope_parameters={**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3, "truncate": False},
        ),
        "llama-yarn-mscale": transformers.LlamaConfig(
            **SMALL, rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 0.707}
        ),
        "mistral": transformers.MistralConfig(**{**SMALL, "head_dim": 24}, sliding_window=None),
        "mistral-window": transformers.MistralConfig(**SMALL, sliding_window=8),
        "mistral-window-yarn": transformers.MistralConfig(**SMALL, sliding_window=8, rope_parameters=YARN),
        "qwen2": transformers.Qwen2Config(**headless),
        "qwen2-tied-yarn": transformers.Qwen2Config(**headless, tie_word_embeddings=True, rope_parameters=YARN),
        "olmo2": transformers.Olmo2Config(**headless, **NO_TOKENS),
        "phi3": transformers.Phi3Config(**headless, **NO_TOKENS),
        "phi3-window": transformers.Phi3Config(**headless, **NO_TOKENS, sliding_window=8),
        "smollm3": transformers.SmolLM3Config(**headless, **NO_TOKENS),
        "smollm3-rotated": transformers.SmolLM3Config(
            **headless, **NO_TOKENS, no_rope_layers=[1] * 4, attention_bias=True
        ),
        "qwen3-biased": transformers.Qwen3Config(**SMALL, attention_bias=True),
        "qwen3": transformers.Qwen3Config(**SMALL, tie_word_embeddings=True),
        "gemma3": transformers.Gemma3TextConfig(**gemma3, rope_parameters=linear),
        "gemma3-capped": transformers.Gemma3TextConfig(**gemma3, final_logit_softcapping=3.0),
        "mixtral": transformers.MixtralConfig(**headless, sliding_window=8, num_local_experts=8, num_experts_per_tok=3),
        "moe": transformers.Qwen3MoeConfig(**SMALL, **experts, norm_topk_prob=True),
        "moe-raw": transformers.Qwen3MoeConfig(**SMALL, **experts, norm_topk_prob=False),
    }


def build(folder: Path) -> None:
    torch.manual_seed(7)
    tokens = np.random.default_rng(7).integers(0, VOCABULARY_SIZE, (2, LENGTH))
    np.save(folder / "tokens.npy", tokens)
    for name, config in configurations().items():
        model = kind_of(config).from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for parameter in model.parameters():  # gains, too, are as if trained
                parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(folder / name)
        model.to(torch.bfloat16).save_pretrained(folder / f"{name}-sharded-bfloat16", max_shard_size="60KB")
    measure(folder)


def kind_of(config: transformers.PreTrainedConfig) -> type:
    """What loads a model of this configuration, whole where it also sees."""
    sees = hasattr(config, "vision_config")
    return transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM


def unpack(folder: Path) -> None:
    (file,) = folder.rglob("*.gguf")
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(file.parent, gguf_file=file.name, dtype=torch.float32)
    model.hf_quantizer = None  # its weights are numbers again; otherwise transformers does not save them
    del model.config.quantization_config
    model.to(torch.bfloat16).save_pretrained(folder / "model", max_shard_size="100MB")
    transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder / "model")


def ask(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chat = [{"role": "user", "content": QUESTION}]
    asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    written = model.generate(**asked, max_new_tokens=24, do_sample=False)
    print(tokenizer.decode(written[0, asked["input_ids"].shape[1] :], skip_special_tokens=True))


def measure(folder: Path) -> None:
    tokens = torch.from_numpy(np.load(folder / "tokens.npy"))
    for config in sorted(folder.glob("*/config.json")):
        load = kind_of(transformers.AutoConfig.from_pretrained(config.parent)).from_pretrained
        model = load(config.parent, dtype=torch.float32, attn_implementation="eager").eval()
        with torch.no_grad():
            np.save(config.parent / "logits.npy", model(tokens).logits.numpy())
        if (config.parent / "tokenizer_config.json").exists():
            tokenizer = transformers.AutoTokenizer.from_pretrained(config.parent)
            ends = model.config.eos_token_id
            assert tokenizer.eos_token_id in (ends if isinstance(ends, list) else [ends])
            (config.parent / "facts.json").write_text(json.dumps(facts(model, tokenizer)))
            texts = json.loads((folder / "texts.json").read_text())
            ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
            (config.parent / "ids.json").write_text(json.dumps(ids))
    for config in sorted(folder.glob("*/adapter_config.json")):
        base = json.loads(config.read_text())["base_model_name_or_path"]
        load = transformers.AutoModelForCausalLM.from_pretrained
        model = peft.PeftModel.from_pretrained(
            load(base, dtype=torch.float32, attn_implementation="eager"), config.parent
        )
        with torch.no_grad():
            np.save(config.parent / "logits.npy", model.eval()(tokens).logits.numpy())


def answer(folder: Path, text: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "whole")
    chat = [{"role": "system", "content": "count"}, {"role": "user", "content": text}]
    asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    load = transformers.AutoModelForCausalLM.from_pretrained
    base = json.loads((folder / "adapter/adapter_config.json").read_text())["base_model_name_or_path"]
    adapted = peft.PeftModel.from_pretrained(load(base, dtype=torch.float32), folder / "adapter")
    answers = []
    for model in (adapted, load(folder / "whole", dtype=torch.float32)):
        said = model.eval().generate(**asked, max_new_tokens=24, do_sample=False)[0, asked["input_ids"].shape[1] :]
        answers.append(tokenizer.decode(said, skip_special_tokens=True))
    print(json.dumps(answers))


def chat(folder: Path) -> None:
    rows = json.loads((folder / "conversations.json").read_text())
    for template in sorted(folder.glob("*/chat_template.jinja")):
        tokenizer = transformers.AutoTokenizer.from_pretrained(template.parent)
        (template.parent / "chats.json").write_text(json.dumps([chatted(tokenizer, row) for row in rows]))


def chatted(tokenizer: transformers.PreTrainedTokenizerBase, row: dict) -> list[list[int]] | None:
    """A conversation's tokens, and which of them are the assistant's; None if the template refuses it."""
    options = {"return_dict": True, "return_assistant_tokens_mask": True, "date_string": "26 Jul 2024"}
    try:
        found = tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"), **options)
    except jinja2.TemplateError:
        return None
    return [found["input_ids"], found["assistant_masks"]]


def facts(model: transformers.PreTrainedModel, tokenizer: transformers.PreTrainedTokenizerBase) -> dict[str, object]:
    """What users of a checkpoint rely on besides its numbers."""
    chat = [{"role": "user", "content": "Hello"}]
    return {
        "length": model.config.max_position_embeddings,
        "ids": {name: getattr(model.config, f"{name}_token_id") for name in ("bos", "eos", "pad")},
        "initializer_range": model.config.initializer_range,
        "generation": model.generation_config.to_diff_dict(),
        "tokens": {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")},
        "text": tokenizer("Hello")["input_ids"],
        "chat": tokenizer.apply_chat_template(chat, tokenize=False) if tokenizer.chat_template else None,
    }


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    commands = {"build": build, "measure": measure, "chat": chat, "answer": answer, "unpack": unpack, "ask": ask}
    commands[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
