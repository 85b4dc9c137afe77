"""Text to tokens and their count: bytes, a ``tokenizer.json`` of Hugging Face's tokenizers, or SentencePiece's ``.model``.

The content of a document is text, never a control token: a ``<|endoftext|>`` in it becomes the tokens of these letters.
Bytes that are not UTF-8 become the replacement character, except for the tokenizer ``bytes``, which takes them as they are.
Models that put a space before each text put none before a ``Continuation``, which begins inside a text. The libraries are an
extra (``atoll[text]``), and work in their own threads without Python's lock. ``orchestrator.text.tokenizer_file`` chooses
the tokens around a document, and ``learners.corpus`` puts them there.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import numpy as np

from learners.streaming.documents import Continuation
from orchestrator.errors import ConfigurationError, Problem
from orchestrator.specification.bounds import BYTE_COUNT, BYTES
from orchestrator.specification.training_sections import DataSection
from orchestrator.system.roots import AllowedRoots
from orchestrator.text import tokenizer_file
from orchestrator.text.chat_template import disguised
from orchestrator.text.data_index import counted_with

NEWLINE = 10
NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"
"""``normalizer_spec.add_dummy_prefix: false`` of SentencePiece's ``ModelProto``.

Appended to a model, it takes precedence.
"""
SPACE = "\u2581"
"""SentencePiece's character for a space."""


Result = TypeVar("Result")


class Tokenizer(Protocol):
    """``separator`` comes between two documents, ``beginning`` before each: one token or none, of ``dtype``.

    Token values are below ``vocabulary_size``. ``digest`` covers the file and everything else that counts depend on.
    """

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def separator(self) -> int: ...

    @property
    def beginning(self) -> np.ndarray: ...

    @property
    def digest(self) -> str: ...

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Return the tokens of each text, one-dimensional, of ``dtype``, without separators and beginnings."""
        ...

    def counts(self, texts: Sequence[bytes]) -> list[int]:
        """Return the number of tokens that ``encode`` gives for each text, in less time."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of these tokens, for display. What is not a character shows as a replacement."""
        ...

    @property
    def dtype(self) -> type[np.generic]: ...


class Bytes:
    vocabulary_size = BYTE_COUNT
    dtype = np.uint8

    def __init__(self, separator: int | None = None, begin_token: int | None = None) -> None:
        self.separator = NEWLINE if separator is None else separator
        self.beginning = _beginning(begin_token, self.dtype)
        self.digest = counted_with(BYTES, begin_token is not None)

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(text, np.uint8) for text in texts]

    def counts(self, texts: Sequence[bytes]) -> list[int]:
        return list(map(len, texts))

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")


class FromFile:
    """A tokenizer from a file. The library's object is created for the first text."""

    def __init__(self, file: tokenizer_file.TokenizerFile, separator: int, begin_token: int | None = None) -> None:
        self.vocabulary_size, self.separator = file.vocabulary_size, separator
        self.beginning = _beginning(begin_token, self.dtype)
        self.digest = counted_with(file.digest, begin_token is not None)
        self.file = file

    @property
    def dtype(self) -> type[np.generic]:
        return np.uint16 if self.vocabulary_size <= 1 << 16 else np.int32

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        return [
            np.array(tokens, self.dtype)
            for tokens in self._by_part(texts, lambda library, strings: library.encode(strings))
        ]

    def counts(self, texts: Sequence[bytes]) -> list[int]:
        return self._by_part(texts, lambda library, strings: library.counts(strings))

    def _by_part(self, texts: Sequence[bytes], work: Callable[[_Library, list[str]], Sequence[Result]]) -> list[Result]:
        """Return the results for all texts in order. Texts that begin inside a document are handled separately."""
        strings = _strings(texts)
        inside = [n for n, text in enumerate(texts) if isinstance(text, Continuation)]
        if not inside:
            return list(work(self._library, strings))
        results = dict(zip(inside, work(self._library_inside, [strings[n] for n in inside]), strict=True))
        outside = [n for n in range(len(strings)) if n not in results]
        results |= zip(outside, work(self._library, [strings[n] for n in outside]), strict=True)
        return [results[n] for n in range(len(strings))]

    def decode(self, tokens: Sequence[int]) -> str:
        return self._library.decode(list(tokens))

    def disguised(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of a text whose control tokens have disguised names, and where each is in it.

        (tokens,) int32, and start and end by characters (tokens, 2) int64. Raises ConfigurationError for SentencePiece.
        """
        encoded = self._disguised.encode(text, add_special_tokens=False)
        return np.array(encoded.ids, np.int32), np.array(encoded.offsets, np.int64).reshape(-1, 2)

    @cached_property
    def _disguised(self) -> Any:
        if self.file.is_sentencepiece:
            detail = "data.tokenizer: a SentencePiece model has no chat template."
            raise ConfigurationError(detail=f"{detail} Name the tokenizer.json of the same model.")
        content = _with_disguises(self.file)
        return self._made("tokenizers", lambda library: _whole_texts(library.Tokenizer.from_str(content)))

    @cached_property
    def _library(self) -> _Library:
        return self._loaded(inside=False)

    @cached_property
    def _library_inside(self) -> _Library:
        """The library's object for texts that begin inside a document."""
        return self._loaded(inside=True)

    def _loaded(self, *, inside: bool) -> _Library:
        name, kind = ("sentencepiece", _SentencePiece) if self.file.is_sentencepiece else ("tokenizers", _Tokenizers)
        return self._made(name, lambda library: kind(library, self.file, inside=inside))

    def _made(self, name: str, make: Callable[[Any], Result]) -> Result:
        try:
            library = importlib.import_module(name)
        except ImportError as error:
            detail = f"data.tokenizer: the package {name} is not installed here. Install atoll[text] on every node."
            raise ConfigurationError(detail=detail) from error
        try:
            return make(library)
        except Exception as error:  # the libraries raise anything for an invalid file
            detail = f"data.tokenizer: {name} cannot read the file: {str(error).rstrip('.')}."
            remedy = f"Write it again with the {name} that is installed on the nodes."
            raise ConfigurationError(detail=f"{detail} {remedy}") from error


class _Library(Protocol):
    def encode(self, texts: list[str]) -> Sequence[Sequence[int]]: ...

    def counts(self, texts: list[str]) -> list[int]: ...

    def decode(self, tokens: list[int]) -> str: ...


class _SentencePiece:
    """Never matches a control piece in a text, by SentencePiece's own rules."""

    def __init__(self, library: Any, file: tokenizer_file.TokenizerFile, *, inside: bool) -> None:
        """Load it; ``inside`` a document without the space before a text, unless the model removes the one after a text."""
        self._processor = library.SentencePieceProcessor(model_proto=file.content)
        if inside and self._processor.normalize("a ").endswith(SPACE):
            self._processor = library.SentencePieceProcessor(model_proto=file.content + NO_DUMMY_PREFIX)

    def encode(self, texts: list[str]) -> Sequence[Sequence[int]]:
        encoded: Sequence[Sequence[int]] = self._processor.encode(texts)
        return encoded

    def counts(self, texts: list[str]) -> list[int]:
        return list(map(len, self.encode(texts)))

    def decode(self, tokens: list[int]) -> str:
        return str(self._processor.decode(tokens))


class _Tokenizers:
    """Does not extract control tokens from a text. A model that has them in its vocabulary may still find them.

    A unigram model does, and a word model. Then the text is cut inside the match, and its parts are encoded.
    """

    def __init__(self, library: Any, file: tokenizer_file.TokenizerFile, *, inside: bool) -> None:
        content = file.content.decode()
        self._tokenizer = _whole_texts(library.Tokenizer.from_str(_without_prefix(content) if inside else content))
        self._tokenizer.encode_special_tokens = True
        self._forbidden = file.never_text
        unknown = file.unknown
        self._unknown = [] if unknown is None or unknown in self._forbidden else [unknown]
        texts = [text for text, token in file.tokens.items() if token in self._forbidden]
        self._finds_them = any(self._forbidden.intersection(each.ids) for each in self._encoded(texts))

    def encode(self, texts: list[str]) -> Sequence[Sequence[int]]:
        return self._guarded(texts) if self._finds_them else [each.ids for each in self._encoded(texts)]

    def counts(self, texts: list[str]) -> list[int]:
        return list(map(len, self._guarded(texts) if self._finds_them else self._encoded(texts)))

    def decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))

    def _encoded(self, texts: list[str]) -> Any:
        return self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)

    def _guarded(self, texts: list[str]) -> list[list[int]]:
        tokens = [each.ids for each in self._encoded(texts)]
        return [
            self._without_control_tokens(text) if self._forbidden.intersection(ids) else ids
            for text, ids in zip(texts, tokens, strict=True)
        ]

    def _without_control_tokens(self, text: str) -> list[int]:
        """Return the tokens of a text in which the model has found control tokens."""
        parts, tokens = [text], list[int]()
        while parts:
            encoded = self._tokenizer.encode(part := parts.pop(), add_special_tokens=False)
            spans = [span for token, span in zip(encoded.ids, encoded.offsets, strict=True) if token in self._forbidden]
            if not spans:
                tokens += encoded.ids
            elif len(part) == 1:
                tokens += [token for token in encoded.ids if token not in self._forbidden] or self._unknown
            else:
                cuts = sorted({0, len(part), *(min(max(start + 1, 1), len(part) - 1) for start, _ in spans)})
                parts += [part[start:end] for start, end in reversed(list(pairwise(cuts)))]
        return tokens


def _whole_texts(tokenizer: Any) -> Any:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _with_disguises(file: tokenizer_file.TokenizerFile) -> str:
    """Return a tokenizer.json whose control tokens have names that no text contains, so that no text becomes one."""
    document, names = json.loads(file.content), dict[str, str]()
    for added in document.get("added_tokens", ()):
        if added["id"] in file.never_text:
            names[added["content"]] = disguised(added["content"])
            added["content"] = names[added["content"]]
    model = document["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(text, text): token for text, token in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(text, text), score] for text, score in model["vocab"]]
    return json.dumps(document)


def _without_prefix(content: str) -> str:
    """Return a tokenizer.json without the space before a text, unless it strips the one after the text before."""
    document = json.loads(content)
    steps = [step for part in ("normalizer", "pre_tokenizer") for step in _steps(document.get(part))]
    if any(step.get("type") == "Strip" for step in steps):
        return content
    for step in steps:
        match step.get("type"):
            case "Prepend":
                step["prepend"] = ""
            case "Metaspace":
                step |= {"prepend_scheme": "never"} | (
                    {"add_prefix_space": False} if "add_prefix_space" in step else {}
                )
            case "ByteLevel":
                step["add_prefix_space"] = False
    return json.dumps(document)


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a normalizer or pre-tokenizer, including those of its sequences."""
    if isinstance(part, dict):
        yield part
        for inner in (*part.get("normalizers", ()), *part.get("pretokenizers", ())):
            yield from _steps(inner)


def load(section: DataSection, roots: AllowedRoots) -> Tokenizer:
    """Return the tokenizer of a ``data`` section. Raises ConfigurationError, also if the file differs from the job's."""
    path, separator, begin_token = section.tokenizer, section.separator, section.begin_token
    wanted = section.tokenizer_digest
    if path == BYTES:
        return Bytes(separator, begin_token if isinstance(begin_token, int) else None)
    file = tokenizer_file.read(roots, path)
    if wanted not in (None, file.digest):
        detail = f"data.tokenizer: {path} has the digest {file.digest} here, but {wanted} where the job was submitted."
        raise ConfigurationError(detail=f"{detail} Every node must have the same file.")
    around = tokenizer_file.around(file, separator, begin_token, path)
    if isinstance(around, Problem):
        raise ConfigurationError(detail=str(around))
    return FromFile(file, around.separator, around.begin_token)


def require_fit(tokenizer: Tokenizer, section: DataSection, model_size: int) -> None:
    """Raise ConfigurationError if the tokenizer has tokens that the model lacks."""
    if problem := tokenizer_file.misfit(tokenizer.vocabulary_size, model_size, section.tokenizer):
        raise ConfigurationError(detail=f"data.tokenizer: {problem} {tokenizer_file.MISFIT_REMEDY}")


def _strings(texts: Sequence[bytes]) -> list[str]:
    return [text.decode(errors="replace") for text in texts]


def _beginning(token: int | None, dtype: type[np.generic]) -> np.ndarray:
    return np.array([] if token is None else [token], dtype)
