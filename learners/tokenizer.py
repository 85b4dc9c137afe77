"""Text to tokens and their count: bytes, a ``tokenizer.json`` of Hugging Face's tokenizers, or SentencePiece's ``.model``.

What a document says is text, and never a control token: a ``<|endoftext|>`` in it becomes the tokens of these letters. Bytes
that are no UTF-8 become the replacement character, but for ``bytes``, which takes them as they are. The libraries are an
extra (``atoll[text]``), and work in threads of their own without Python's lock.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from orchestrator import tokenizer_file
from orchestrator.bounds import BYTE_COUNT, BYTES
from orchestrator.errors import ConfigurationError
from orchestrator.roots import AllowedRoots

NEWLINE = 10


class Tokenizer(Protocol):
    """``separator`` stands between two documents. Token values are below ``vocabulary_size``. ``digest`` names the file."""

    vocabulary_size: int
    separator: int
    digest: str

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """The tokens of each text, one-dimensional, of ``dtype``."""
        ...

    def counts(self, texts: Sequence[bytes]) -> list[int]:
        """How many tokens ``encode`` gives for each text, in less time."""
        ...

    @property
    def dtype(self) -> type[np.generic]: ...


class Bytes:
    vocabulary_size = BYTE_COUNT
    digest = BYTES
    dtype = np.uint8

    def __init__(self, separator: int | None = None) -> None:
        self.separator = NEWLINE if separator is None else separator

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(text, np.uint8) for text in texts]

    def counts(self, texts: Sequence[bytes]) -> list[int]:
        return list(map(len, texts))


class FromFile:
    """A tokenizer that is a file. The library's object is made when the first text comes."""

    def __init__(self, file: tokenizer_file.TokenizerFile, separator: int, sentencepiece: bool) -> None:
        self.vocabulary_size, self.separator, self.digest = file.vocabulary_size, separator, file.digest
        self._content, self._sentencepiece = file.content, sentencepiece

    @property
    def dtype(self) -> type[np.generic]:
        return np.uint16 if self.vocabulary_size <= 1 << 16 else np.int32

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        encoded = self._encoded(texts)
        return [np.array(tokens if self._sentencepiece else tokens.ids, self.dtype) for tokens in encoded]

    def counts(self, texts: Sequence[bytes]) -> list[int]:
        return list(map(len, self._encoded(texts)))

    def _encoded(self, texts: Sequence[bytes]) -> Any:
        strings = [text.decode(errors="replace") for text in texts]
        if self._sentencepiece:
            return self._library.encode(strings)
        return self._library.encode_batch_fast(strings, add_special_tokens=False)

    @cached_property
    def _library(self) -> Any:
        name = "sentencepiece" if self._sentencepiece else "tokenizers"
        try:
            library = importlib.import_module(name)
        except ImportError as error:
            detail = f"data.tokenizer: the package {name} is not installed here. Install atoll[text] on every node."
            raise ConfigurationError(detail=detail) from error
        try:
            if self._sentencepiece:
                return library.SentencePieceProcessor(model_proto=self._content)
            tokenizer = library.Tokenizer.from_str(self._content.decode())
            tokenizer.no_truncation()
            tokenizer.no_padding()
            tokenizer.encode_special_tokens = True
            return tokenizer
        except Exception as error:  # the libraries raise what they like for a file that is none
            detail = f"data.tokenizer: {name} cannot read the file: {str(error).rstrip('.')}."
            remedy = f"Write it anew with the {name} that is installed on the nodes."
            raise ConfigurationError(detail=f"{detail} {remedy}") from error


def load(section: Mapping[str, Any], roots: AllowedRoots) -> Tokenizer:
    """The tokenizer of a ``data`` section. Raises ConfigurationError, also for another file than the job began with."""
    path, separator, wanted = section["tokenizer"], section["separator"], section["tokenizer_digest"]
    if path == BYTES:
        return Bytes(separator)
    file = tokenizer_file.read(roots, path)
    if wanted not in (None, file.digest):
        detail = f"data.tokenizer: {path} has the digest {file.digest} here, and {wanted} where the job was submitted."
        raise ConfigurationError(detail=f"{detail} Every node must have the same file.")
    separator = file.end_of_text if separator is None else separator
    if separator is None or separator >= file.vocabulary_size:
        detail = (
            f"data.separator: {path} has no token {separator}."
            if separator is not None
            else (
                f"data.separator: {path} has no token for the end of a text that is known "
                f"({', '.join(tokenizer_file.END_OF_TEXT)})."
            )
        )
        raise ConfigurationError(detail=f"{detail} Set data.separator to the token between two documents.")
    return FromFile(file, separator, path.endswith(tokenizer_file.SENTENCEPIECE))


def require_fit(tokenizer: Tokenizer, section: Mapping[str, Any], model_size: int) -> None:
    """Raises ConfigurationError for a tokenizer with tokens that the model does not have."""
    if problem := tokenizer_file.misfit(tokenizer.vocabulary_size, model_size, section["tokenizer"]):
        raise ConfigurationError(detail=f"data.tokenizer: {problem} {tokenizer_file.MISFIT_REMEDY}")
