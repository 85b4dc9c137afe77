"""The file of a tokenizer, as far as can be known without the library that it is for: its digest and its vocabulary.

Responsible for a tokenizer being one thing for the whole job (its digest is part of the specification) and for its tokens
being ones that the model has, before anything is started. The file may be anybody's: it is read whole within a limit, and
parsed here as JSON or by the two lines of the protocol buffers' encoding that are needed. Refuses to know how text becomes
tokens (``learners.tokenizer``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from hashlib import blake2b

from orchestrator.errors import ConfigurationError
from orchestrator.roots import AllowedRoots, open_data, shown

SENTENCEPIECE = ".model"
FILE_BYTES_MAX = 64 << 20
"""The largest in use, of 260,000 tokens, have 35 MB."""
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>", "[SEP]")
"""What the families of models call the token behind a document, the likeliest first."""
_PIECES, _TEXT_OF_PIECE = 1, 1
"""Field numbers of SentencePiece's ``ModelProto.pieces`` and ``SentencePiece.piece``."""


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """``vocabulary_size`` is one more than the largest token; ``end_of_text`` the token behind a document, if it has one.

    ``tokens`` are the numbers of all by their texts; ``control_tokens`` are those that stand for no text.
    """

    content: bytes
    digest: str
    vocabulary_size: int
    end_of_text: int | None
    tokens: Mapping[str, int]
    control_tokens: Set[int]


def read(roots: AllowedRoots, path: str) -> TokenizerFile:
    """The tokenizer's file at ``path``. Raises OutsideRoots; ConfigurationError for one that is none, or not there."""
    try:
        with open_data(roots, path) as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        detail = f"data.tokenizer: {shown(path)} cannot be read here ({error.strerror or error})."
        raise ConfigurationError(detail=f"{detail} It must exist on every node.") from error
    if len(content) > FILE_BYTES_MAX:
        raise ConfigurationError(detail=f"data.tokenizer: {shown(path)} has more than {FILE_BYTES_MAX >> 20} MiB.")
    try:
        tokens, control = _sentencepiece(content) if path.endswith(SENTENCEPIECE) else _tokenizer_json(content)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        detail = (
            f"data.tokenizer: {shown(path)} is neither a tokenizer.json nor, with the ending .model, SentencePiece's"
        )
        raise ConfigurationError(detail=f"{detail} ({type(error).__name__}).") from error
    end = next((tokens[text] for text in END_OF_TEXT if text in tokens), None)
    digest = blake2b(content, digest_size=16).hexdigest()
    control = control if end is None else control | {end}
    return TokenizerFile(content, digest, max(tokens.values()) + 1, end, tokens, control)


def misfit(vocabulary_size: int, model_size: int, path: str) -> str:
    """What is wrong with a tokenizer of ``vocabulary_size`` for a model of ``model_size`` tokens; empty if nothing."""
    if vocabulary_size <= model_size:
        return ""
    return f"is {shown(path)} with {vocabulary_size:,} tokens, and the model has {model_size:,}."


MISFIT_REMEDY = "Set model.vocabulary_size to at least as many, or use the tokenizer that the model was made for."


def _tokenizer_json(content: bytes) -> tuple[dict[str, int], Set[int]]:
    document = json.loads(content)
    model = document["model"]
    listed = model["vocab"]
    # BPE and the like have a mapping; Unigram has a list of [text, score]
    vocabulary = listed if isinstance(listed, dict) else {entry[0]: token for token, entry in enumerate(listed)}
    added = {entry["content"]: entry["id"] for entry in document.get("added_tokens", ())}
    special = {entry["id"] for entry in document.get("added_tokens", ()) if entry.get("special") is True}
    return _checked({**vocabulary, **added}), special


def _checked(tokens: dict[str, int]) -> dict[str, int]:
    if not all(type(text) is str and type(token) is int and 0 <= token < 2**31 for text, token in tokens.items()):
        raise ValueError("a token is no number")
    if not tokens:
        raise ValueError("no tokens")
    return tokens


def _sentencepiece(content: bytes) -> tuple[dict[str, int], Set[int]]:
    pieces = [piece for field, piece in _fields(memoryview(content)) if field == _PIECES]
    texts = [next(bytes(value) for field, value in _fields(piece) if field == _TEXT_OF_PIECE) for piece in pieces]
    return _checked({text.decode(): token for token, text in enumerate(texts)}), frozenset()


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview]]:
    """The fields of a message in the protocol buffers' encoding, with their contents where these have a length."""
    at = 0
    while at < len(message):
        tag, at = _number(message, at)
        kind, length = tag & 7, 0
        if kind == 2:
            length, at = _number(message, at)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        elif kind == 0:
            _, at = _number(message, at)
        else:
            raise ValueError("no such kind of field")
        if at + length > len(message):
            raise ValueError("a field goes beyond the end")
        yield tag >> 3, message[at : at + length]
        at += length


def _number(message: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("a number goes on and on")
