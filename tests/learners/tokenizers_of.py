"""Small tokenizers like those of published model families: the same control tokens, files beside them, and traps."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

TEXTS = [f"<p>the {word} of number {n} is a {word}ing thing</p>\n" for n, word in enumerate(["walk", "sing"] * 60)]


@dataclass(frozen=True)
class Family:
    """``control`` and ``ordinary`` are added tokens of a tokenizer.json. ``beside`` are other files by name.

    ``end`` and ``begin`` are the texts of the tokens that must stand around a document.
    """

    control: Sequence[str]
    end: str
    begin: str | None
    ordinary: Sequence[str] = ()
    template: str | None = None
    ignore_merges: bool = False
    beside: Mapping[str, Any] | None = None

    def write(self, folder: Path) -> Path:
        """The folder has its tokenizer.json, of which this is the path."""
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        texts = [*self.control, *self.ordinary, *alphabet]
        bpe = Tokenizer(models.BPE({text: n for n, text in enumerate(texts)}, [], ignore_merges=self.ignore_merges))
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        bpe.decoder = decoders.ByteLevel()
        bpe.add_special_tokens([AddedToken(text, normalized=False) for text in self.control])
        bpe.add_tokens([AddedToken(text, normalized=False) for text in self.ordinary])
        if self.template:
            single = f"{self.template} $A"
            bpe.post_processor = processors.Sequence(
                [
                    processors.ByteLevel(trim_offsets=False),
                    processors.TemplateProcessing(
                        single=single, special_tokens=[(self.template, texts.index(self.template))]
                    ),
                ]
            )
        bpe.save(str(folder / "tokenizer.json"))
        for name, document in (self.beside or {}).items():
            (folder / name).write_text(json.dumps(self.with_ids(document)))
        return folder / "tokenizer.json"

    def with_ids(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """The document with numbers in the place of texts where a field is of ids."""
        texts = [*self.control, *self.ordinary]

        def number(value: Any) -> Any:
            return list(map(number, value)) if isinstance(value, list) else texts.index(value)

        return {name: number(value) if name.endswith("_id") else value for name, value in document.items()}


def config(eos: Any, bos: Any = None, **more: Any) -> dict[str, Any]:
    return {"eos_token": eos, "bos_token": bos, **more}


def added(text: str) -> dict[str, Any]:
    """A token as transformers writes it where more than its text matters."""
    return {"__type": "AddedToken", "content": text, "lstrip": False, "normalized": False, "rstrip": False}


GEMMA = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
GEMMA_4 = ("<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>")
HTML = ("<s>", "</s>", "<p>", "</p>")
"""Ordinary tokens of Gemma's vocabulary: tags."""
LLAMA_3 = ("<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_ENDS = ["<|im_end|>", "<|endoftext|>"]
DEEPSEEK = ("<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜begin▁of▁sentence｜>", "<|EOT|>")
FAMILIES = {
    "gemma": Family(GEMMA, "<eos>", "<bos>", HTML, "<bos>"),
    "gemma 2": Family(
        GEMMA,
        "<eos>",
        "<bos>",
        HTML,
        "<bos>",
        beside={"tokenizer_config.json": config("<eos>", "<bos>", add_bos_token=True)},
    ),
    "gemma 3, instructed": Family(
        GEMMA,
        "<eos>",
        "<bos>",
        HTML,
        "<bos>",
        beside={
            "tokenizer_config.json": config(added("<eos>"), added("<bos>"), add_bos_token=True),
            "generation_config.json": {"eos_token_id": ["<eos>", "<end_of_turn>"], "bos_token_id": "<bos>"},
        },
    ),
    "gemma 4, that names its turn": Family(
        GEMMA_4,
        "<eos>",
        "<bos>",
        HTML,
        beside={
            "tokenizer_config.json": config("<turn|>", "<bos>", add_bos_token=True),
            "generation_config.json": {"eos_token_id": ["<turn|>", "<eos>"]},
        },
    ),
    "llama 2": Family(
        ("<unk>", "<s>", "</s>"),
        "</s>",
        "<s>",
        template="<s>",
        beside={"tokenizer_config.json": config(added("</s>"), added("<s>"), add_bos_token=True)},
    ),
    "llama 2, that begins with nothing": Family(
        ("<unk>", "<s>", "</s>"),
        "</s>",
        None,
        template="<s>",
        beside={"tokenizer_config.json": config("</s>", "<s>", add_bos_token=False)},
    ),
    "llama 3": Family(
        LLAMA_3,
        "<|end_of_text|>",
        "<|begin_of_text|>",
        template="<|begin_of_text|>",
        ignore_merges=True,
        beside={"tokenizer_config.json": config("<|end_of_text|>", "<|begin_of_text|>")},
    ),
    "llama 3, instructed": Family(
        LLAMA_3,
        "<|end_of_text|>",
        "<|begin_of_text|>",
        template="<|begin_of_text|>",
        ignore_merges=True,
        beside={
            "tokenizer_config.json": config("<|eot_id|>", "<|begin_of_text|>"),
            "generation_config.json": {"eos_token_id": ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]},
        },
    ),
    "qwen 2": Family(
        QWEN,
        "<|endoftext|>",
        None,
        HTML,
        beside={"tokenizer_config.json": config("<|endoftext|>", add_bos_token=False)},
    ),
    "qwen 3, instructed": Family(
        QWEN,
        "<|endoftext|>",
        None,
        HTML,
        beside={
            "tokenizer_config.json": config("<|im_end|>", add_bos_token=False),
            "generation_config.json": {"eos_token_id": QWEN_ENDS, "bos_token_id": "<|endoftext|>"},
        },
    ),
    "qwen 3, instructed, alone": Family(QWEN, "<|endoftext|>", None, HTML),
    "qwen by deepseek": Family(
        DEEPSEEK,
        "<｜end▁of▁sentence｜>",
        "<｜begin▁of▁sentence｜>",
        HTML,
        beside={
            "tokenizer_config.json": config(
                added("<｜end▁of▁sentence｜>"), added("<｜begin▁of▁sentence｜>"), add_bos_token=True
            )
        },
    ),
    "qwen by deepseek, alone": Family(DEEPSEEK, "<｜end▁of▁sentence｜>", None, HTML),
    "mistral 3": Family(
        ("<unk>", "<s>", "</s>", "[INST]", "[/INST]"),
        "</s>",
        "<s>",
        template="<s>",
        beside={"tokenizer_config.json": config("</s>", "<s>", add_bos_token=True)},
    ),
    "a chat that names its turn's end as nobody else does": Family(
        ("<|endoftext|>", "[|assistant_turn_over|]"),
        "<|endoftext|>",
        None,
        beside={"tokenizer_config.json": config("[|assistant_turn_over|]")},
    ),
    "a chat alone": Family(
        ("<|im_start|>", "<|im_end|>"), "<|im_end|>", None, beside={"tokenizer_config.json": config("<|im_end|>")}
    ),
    "an end of its own": Family(
        ("<|start|>", "<|fin|>"), "<|fin|>", None, ("</s>",), beside={"special_tokens_map.json": config("<|fin|>")}
    ),
    "an end by number": Family(
        ("<|start|>", "<|fin|>"),
        "<|fin|>",
        None,
        ("</s>",),
        beside={"config.json": {"model_type": "x", "eos_token_id": "<|fin|>"}},
    ),
}


def pieces(**options: Any) -> bytes:
    """A small model of SentencePiece."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=model, hard_vocab_limit=False, minloglevel=2, **options
    )
    return model.getvalue()


def pieces_of_gemma(kind: str = "bpe") -> bytes:
    return pieces(
        model_type=kind,
        vocab_size=340,
        byte_fallback=True,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        eos_piece="<eos>",
        bos_piece="<bos>",
        control_symbols=["<start_of_turn>", "<end_of_turn>"],
        user_defined_symbols=list(HTML),
    )


def pieces_of_llama_2(kind: str = "bpe", control_symbols: Sequence[str] = ()) -> bytes:
    return pieces(model_type=kind, vocab_size=340, byte_fallback=True, control_symbols=list(control_symbols))
