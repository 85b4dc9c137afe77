"""The file of a tokenizer, without the library that reads it: its digest, vocabulary, and the tokens around a document.

A job has one tokenizer (its digest is part of the specification), whose tokens must fit the model's vocabulary before
anything starts. The tokens after and before each document are chosen here. The file is untrusted: it is read whole within a
limit, and parsed as JSON or as the few protocol buffer fields that matter, depending on its first byte and not its name.
``learners.tokenizer`` turns text into tokens.

Only a *control* token may end or begin a document, because no text is ever encoded as one: ``special`` among
``added_tokens`` of a tokenizer.json, a piece of type CONTROL in SentencePiece. Gemma's vocabulary shows why: its ``</s>`` is
an HTML tag, and its documents end with ``<eos>``.

The token after a document is the first control token among these:

    1. the stated end of text: ``eos_token`` of tokenizer_config.json and special_tokens_map.json, ``eos_token_id`` of
       generation_config.json and config.json (all beside the file), then SentencePiece's own eos; but not the end of a
       turn. Chat models name that as their end, while their base models put another one between documents;
    2. a usual name of it (``END_OF_TEXT``);
    3. the ones that step 1 skipped, then a usual name of a turn's end.

The token before a document is the one that the tokenizer itself puts before a text: ``bos_token`` if tokenizer_config.json
has ``add_bos_token: true``, none if it has false, else the one with which the template of tokenizer.json begins.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from typing import Any

from orchestrator.errors import ConfigurationError, OutsideRoots, Problem
from orchestrator.system.roots import AllowedRoots, open_data, shown


def read_varint(content: bytes | memoryview, at: int) -> tuple[int, int]:
    """Return the number that begins at byte ``at``, seven bits a byte and the lowest first, and where the next byte is.

    Source: Protocol Buffers, "Encoding", base 128 varints. Thrift's compact protocol writes them, too.

    Raises ValueError for one of more than 64 bits, IndexError where the content ends within it.
    """
    value = shift = 0
    while True:
        byte = content[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("a number does not end")


AS_TOKENIZER, NO_TOKEN = "tokenizer", "none"
"""What ``data.begin_token`` may be besides a token: as the tokenizer says, and none."""
FILE_BYTES_MAX = 64 << 20
"""The largest in use, of 260,000 tokens, have 35 MB."""
BESIDE_BYTES_MAX = 8 << 20
"""Of each file beside it. Gemma's tokenizer_config.json lists 6,400 tokens in 1.2 MB."""
CONFIG, SPECIAL_TOKENS = "tokenizer_config.json", "special_tokens_map.json"
GENERATION, MODEL = "generation_config.json", "config.json"
END_OF_TEXT = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<｜end▁of▁sentence｜>",
    "[EOS]",
    "<|eos|>",
    "<EOS_TOKEN>",
)
"""Usual names of the token behind a document, the likeliest first."""
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "[SEP]")
"""Usual names of what ends a message of a chat, or one of two sentences: a last resort between documents."""
_OF_A_TURN = re.compile(
    r"turn|im_end|eot|eom|message|utterance|user|\binst\b|\bsep\b|\|(end|return|call)\|", re.IGNORECASE
)
"""What a token that ends a turn is called, such as <|eot_id|>, <end_of_turn>, <turn|>, <|return|>."""
_JSON_BEGINS = (b"{", b"[")
_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\r?\n")
_PIECES, _TRAINER = 1, 2
"""Field numbers of SentencePiece's ``ModelProto``: ``pieces`` and ``trainer_spec``."""
_PIECE_TEXT, _PIECE_TYPE, _CONTROL = 1, 3, 3
"""Of ``SentencePiece``: ``piece``, ``type``, and the type CONTROL."""
_EOS_ID, _EOS_PIECE = 42, 47
"""Of ``TrainerSpec``: ``eos_id`` and ``eos_piece``."""


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """``vocabulary_size`` is one more than the largest token. ``tokens`` are the numbers of all by their texts.

    ``control_tokens`` stand for no text, ``unknown`` for any that the vocabulary lacks. ``end_of_text`` is the one behind a
    document, ``begin_of_text`` the one that the tokenizer itself puts before a text; None where it has none that is known.
    """

    content: bytes
    digest: str
    vocabulary_size: int
    end_of_text: int | None
    begin_of_text: int | None
    tokens: Mapping[str, int]
    control_tokens: Set[int]
    unknown: int | None
    is_sentencepiece: bool

    @property
    def never_text(self) -> frozenset[int]:
        """The tokens as which no text may be encoded."""
        return frozenset(self.control_tokens - ({self.unknown} - {self.end_of_text}))

    def text_of(self, token: int) -> str:
        """The text of a token of the vocabulary. Raises StopIteration for another number."""
        return next(text for text, number in self.tokens.items() if number == token)


@dataclass(frozen=True, slots=True)
class Around:
    """The tokens around a document: ``separator`` behind it, ``begin_token`` before it if there is one."""

    separator: int
    begin_token: int | None


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """``own_end`` is SentencePiece's eos, ``begins_with`` the token with which the template of a tokenizer.json begins."""

    tokens: Mapping[str, int]
    control: Set[int]
    unknown: int | None = None
    own_end: int | None = None
    begins_with: str | None = None

    def control_token(self, text_or_number: object) -> int | None:
        """The control token of this text or number; None for anything else."""
        token = self.tokens.get(text_or_number) if isinstance(text_or_number, str) else text_or_number
        return token if type(token) is int and token in self.control else None


def read(roots: AllowedRoots, path: str) -> TokenizerFile:
    """Read the tokenizer at ``path``, and what the files beside it state.

    Raises OutsideRoots, or ConfigurationError if it is missing or not a tokenizer, or a file beside it is damaged.
    """
    try:
        with open_data(roots, path) as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OutsideRoots:
        raise
    except OSError as error:
        detail = f"data.tokenizer: {shown(path)} cannot be read here ({error.strerror or error})."
        raise ConfigurationError(detail=f"{detail} It must exist on every node.") from error
    except ConfigurationError as error:
        detail = f"data.tokenizer: {shown(path)} is not a regular file."
        raise ConfigurationError(
            detail=f"{detail} Name the tokenizer.json or .model itself, not its folder."
        ) from error
    if len(content) > FILE_BYTES_MAX:
        raise ConfigurationError(detail=f"data.tokenizer: {shown(path)} has more than {FILE_BYTES_MAX >> 20} MiB.")
    is_sentencepiece = not content.lstrip().startswith(_JSON_BEGINS)
    try:
        vocabulary = _sentencepiece(content) if is_sentencepiece else _tokenizer_json(content)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        detail = f"data.tokenizer: {shown(path)} is neither a tokenizer.json nor a SentencePiece model"
        raise ConfigurationError(detail=f"{detail} ({_seems(content) or type(error).__name__}).") from error
    files_beside = {
        name: beside(roots, path, name)
        for name in (CONFIG, SPECIAL_TOKENS, GENERATION, MODEL)
        if path.rpartition("/")[2] != name
    }
    return TokenizerFile(
        content,
        blake2b(content, digest_size=16).hexdigest(),
        max(vocabulary.tokens.values()) + 1,
        _end_of_text(vocabulary, files_beside),
        _begin_of_text(vocabulary, files_beside),
        vocabulary.tokens,
        vocabulary.control,
        vocabulary.unknown,
        is_sentencepiece,
    )


def around(file: TokenizerFile, separator: int | None, begin_token: int | str, path: str) -> Around | Problem:
    """Return the tokens for ``data.separator`` and ``data.begin_token``, or a problem with one of them."""
    for field, token in (("data.separator", separator), ("data.begin_token", begin_token)):
        if isinstance(token, int) and token >= file.vocabulary_size:
            last = file.vocabulary_size - 1
            message = f"is {token:,}, but {shown(path)} has no token {token:,}: its last one is {last:,}."
            return Problem(field, message, "Use a token of the tokenizer.")
    end = file.end_of_text if separator is None else separator
    if end is None:
        ordinary = ", ".join(repr(text) for text in END_OF_TEXT if text in file.tokens)
        detail = f"; {ordinary} is an ordinary token in it, which a text may contain" if ordinary else ""
        message = f"is not given, and {shown(path)} has no control token that is known to end a text{detail}."
        return Problem("data.separator", message, "Set it to the token to put between two documents.")
    if isinstance(begin_token, int):
        return Around(end, begin_token)
    return Around(end, file.begin_of_text if begin_token == AS_TOKENIZER else None)


def misfit(vocabulary_size: int, model_size: int, path: str) -> str:
    """Return the problem of a tokenizer of ``vocabulary_size`` with a model of ``model_size`` tokens; empty if none."""
    if vocabulary_size <= model_size:
        return ""
    return f"is {shown(path)} with {vocabulary_size:,} tokens, but the model has only {model_size:,}."


MISFIT_REMEDY = (
    "Use the tokenizer that the model was made for, or a larger vocabulary (model.vocabulary_size of a built-in model)."
)


# ── the tokens around a document ──────────────────────────────────────────────────────────────────────────────────────


def _end_of_text(vocabulary: _Vocabulary, beside: Mapping[str, Mapping[str, Any]]) -> int | None:
    named = chain(
        (_text(beside.get(name, {}).get("eos_token")) for name in (CONFIG, SPECIAL_TOKENS)),
        *(_ids(beside.get(name, {}).get("eos_token_id")) for name in (GENERATION, MODEL)),
        (vocabulary.own_end,),
    )
    stated = [token for token in map(vocabulary.control_token, named) if token is not None]
    usual, turn_ends = (
        [token for token in map(vocabulary.control_token, names) if token is not None]
        for names in (END_OF_TEXT, TURN_ENDS)
    )
    of_a_turn = {token for text, token in vocabulary.tokens.items() if token in stated and _OF_A_TURN.search(text)}
    in_order = chain((token for token in stated if token not in of_a_turn), usual, stated, turn_ends)
    return next(in_order, None)


def _begin_of_text(vocabulary: _Vocabulary, beside: Mapping[str, Mapping[str, Any]]) -> int | None:
    adds = beside.get(CONFIG, {}).get("add_bos_token")
    if adds is False:
        return None
    candidates: tuple[object, ...] = (vocabulary.begins_with,)
    if adds is True:
        named = (_text(beside.get(name, {}).get("bos_token")) for name in (CONFIG, SPECIAL_TOKENS))
        numbered = chain.from_iterable(_ids(beside.get(name, {}).get("bos_token_id")) for name in (GENERATION, MODEL))
        candidates = (*named, *numbered, *candidates)
    return next((token for token in map(vocabulary.control_token, candidates) if token is not None), None)


def beside(roots: AllowedRoots, path: str, name: str) -> Mapping[str, Any]:
    """Return the mapping in the JSON file of that name beside ``path``, or an empty one. Raises ConfigurationError."""
    folder = path.rpartition("/")[0]
    try:
        with open_data(roots, f"{folder}/{name}") as file:
            content = file.read(BESIDE_BYTES_MAX + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        detail = f"data.tokenizer: {name} beside {shown(path)} cannot be read ({error.strerror or error})."
        raise ConfigurationError(detail=f"{detail} It may say which token ends a text.") from error
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        document = None
    if name == MODEL and not (isinstance(document, dict) and "model_type" in document):
        return {}  # others call their files so, too
    if not isinstance(document, dict) or len(content) > BESIDE_BYTES_MAX:
        detail = (
            f"data.tokenizer: {name} beside {shown(path)} is not a JSON object of at most {BESIDE_BYTES_MAX >> 20} MiB."
        )
        raise ConfigurationError(detail=f"{detail} Use the published file, or remove it.")
    return document


def _text(token: object) -> object:
    """Return a token's text, which such files write plainly or as a mapping with its ``content``."""
    return token.get("content") if isinstance(token, dict) else token


def _ids(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


# ── the file ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _seems(content: bytes) -> str:
    """Return what kind of tokenizer file this seems to be, and which file to name instead; empty if unknown."""
    if _TIKTOKEN.match(content):
        return "it seems to be a tiktoken file, which is not supported: name the tokenizer.json of the same model"
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(document, dict):
        return ""
    listed = document.get("vocab")
    if isinstance(listed, list) and listed and isinstance(listed[0], dict) and "token_bytes" in listed[0]:
        return (
            "it is a Tekken file of mistral-common, which is not supported: name the tokenizer.json of the same model"
        )
    if "tokenizer_class" in document:
        return "it is a tokenizer_config.json: name the tokenizer.json beside it"
    if "architectures" in document or "model_type" in document:
        return "it is a model's config.json: name the tokenizer.json beside it"
    if document and all(type(token) is int for token in document.values()):
        return "it is a vocab.json, a vocabulary without its merges: name the tokenizer.json beside it"
    return ""


def _tokenizer_json(content: bytes) -> _Vocabulary:
    document = json.loads(content)
    model = document["model"]
    listed = model["vocab"]
    # BPE and the like have a mapping; Unigram has a list of [text, score]
    vocabulary = listed if isinstance(listed, dict) else {entry[0]: token for token, entry in enumerate(listed)}
    added = {entry["content"]: entry["id"] for entry in document.get("added_tokens", ())}
    special = {entry["id"] for entry in document.get("added_tokens", ()) if entry.get("special") is True}
    first = next(_template_begins(document.get("post_processor")), None)
    tokens = _checked({**vocabulary, **added})
    unknown = model.get("unk_id", tokens.get(model.get("unk_token") or ""))
    return _Vocabulary(tokens, special, unknown if isinstance(unknown, int) else None, begins_with=first)


def _template_begins(processor: Any) -> Iterator[str]:
    """Yield the special tokens with which post-processors begin a single text."""
    if not isinstance(processor, dict):
        return
    for inner in processor.get("processors", ()):
        yield from _template_begins(inner)
    single: Iterable[Any] = processor.get("single") or ()
    first = next(iter(single), None)
    if isinstance(first, dict) and "SpecialToken" in first:
        yield first["SpecialToken"]["id"]
    if isinstance(processor.get("cls"), list | tuple):
        yield processor["cls"][0]


def _checked(tokens: dict[str, int]) -> dict[str, int]:
    if not all(type(text) is str and type(token) is int and 0 <= token < 2**31 for text, token in tokens.items()):
        raise ValueError("a token is not a number")
    if not tokens:
        raise ValueError("no tokens")
    return tokens


def _sentencepiece(content: bytes) -> _Vocabulary:
    texts, control, trainer, count = dict[str, int](), set[int](), dict[int, bytes | int](), 0
    for field, value in _fields(memoryview(content)):
        if field == _PIECES:
            piece = dict(_fields(_message(value)))
            if piece.get(_PIECE_TYPE) == _CONTROL:
                control.add(count)
            texts[bytes(_message(piece[_PIECE_TEXT])).decode()] = count
            count += 1
        elif field == _TRAINER:
            trainer |= {name: each if isinstance(each, int) else bytes(each) for name, each in _fields(_message(value))}
    tokens = _checked(texts)
    named = trainer.get(_EOS_PIECE, b"</s>")  # by which the library finds it
    by_name = tokens.get(named.decode(errors="replace")) if isinstance(named, bytes) else None
    own_end = next((token for token in (trainer.get(_EOS_ID), by_name) if token in control), None)
    return _Vocabulary(tokens, control, own_end=own_end if isinstance(own_end, int) else None)


def _message(value: memoryview | int) -> memoryview:
    if isinstance(value, int):
        raise TypeError("a number in the place of a message")
    return value


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview | int]]:
    """Yield the fields of a protocol buffers message: numbers, and the contents of length-delimited fields."""
    at = 0
    while at < len(message):
        tag, at = read_varint(message, at)
        kind, length = tag & 7, 0
        if kind == 0:
            value, at = read_varint(message, at)
            yield tag >> 3, value
            continue
        if kind == 2:
            length, at = read_varint(message, at)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise ValueError("no such kind of field")
        if at + length > len(message):
            raise ValueError("a field goes beyond the end")
        yield tag >> 3, message[at : at + length]
        at += length
