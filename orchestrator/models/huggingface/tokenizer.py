"""A job's tokenizer as the files by which transformers' ``AutoTokenizer`` loads it, beside an exported model.

    tokenizer_config.json    the class that loads it, and the token behind a document
    tokenizer.json           as the job had it; of bytes, one that makes each byte its own token
    tokenizer.model          SentencePiece's, as the job had it

The tokens of a text are those that the job trained on, but for control tokens: what a document says was text there, and
transformers makes the token itself of a ``<|endoftext|>``. Refuses to know how the file came here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from orchestrator.tokenizer_file import TokenizerFile

CONFIG, JSON, PIECES = "tokenizer_config.json", "tokenizer.json", "tokenizer.model"
VISIBLE = (*range(33, 127), *range(161, 173), *range(174, 256))
"""Bytes that byte-level tokenizers write as the character of that number; the others follow from 256 on (GPT-2)."""


def files_of(file: TokenizerFile | None, path: str, end_of_text: int | None) -> dict[str, bytes]:
    """Their contents by name. ``path`` is the job's ``data.tokenizer``; None is the file of bytes.

    ``end_of_text`` is the token behind a document, where that is a token of the file's for nothing else.
    """
    config: dict[str, Any] = {"clean_up_tokenization_spaces": False, "tokenizer_class": "PreTrainedTokenizerFast"}
    if file is None:
        return {CONFIG: _json(config), JSON: _json(_of_bytes())}
    if end_of_text is not None:
        config["eos_token"] = file.text_of(end_of_text)
    if file.is_sentencepiece:
        # transformers' other classes split by rules of their own: this one asks SentencePiece
        return {CONFIG: _json(config | {"tokenizer_class": "SentencePieceBackend"}), PIECES: file.content}
    return {CONFIG: _json(config), JSON: file.content}


def end_of_text_of(file: TokenizerFile | None, separator: int | None) -> int | None:
    """The job's separator, where it is a control token: text, such as a line's end, is no sign that a model has ended."""
    if file is None:
        return None
    token = file.end_of_text if separator is None else separator
    return token if token in file.control_tokens else None


def _of_bytes() -> Mapping[str, Any]:
    invisible = iter(range(256, 512))
    characters = [chr(byte if byte in VISIBLE else next(invisible)) for byte in range(256)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {text: byte for byte, text in enumerate(characters)}, "merges": []},
    }


def _json(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=2) + "\n").encode()
