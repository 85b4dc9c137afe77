"""Text to tokens and their count: bytes, a ``tokenizer.json`` of Hugging Face's tokenizers, or SentencePiece's ``.model``.

The content of a document is text, never a control token: a ``<|endoftext|>`` in it becomes the tokens of these letters.
Bytes that are not UTF-8 become the replacement character, except for the tokenizer ``bytes``, which takes them as they are.
Models that put a space before each text put none before a ``Continuation``, which begins inside a text. The libraries are an
extra (``atoll[text]``), and work in their own threads without Python's lock. ``orchestrator.text.tokenizer_file`` chooses
the tokens around a document, and ``learners.corpus`` puts them there.

`atoll tokenizer train` runs this module, to train byte-level BPE over files and write it as a ``tokenizer.json``:

   python -m learners.tokenizer FILES… --vocabulary-size N --output FILE [--text-field NAME] [--json]

The files are of the kinds that ``data.sources`` takes (``orchestrator.text.file_kinds``), and are read a piece at a time. A
name may be a pattern. The same files give the same tokenizer, byte for byte. Every byte is a token, so no text is unknown;
token 0 is ``<|endoftext|>``, the separator.
"""

from __future__ import annotations

import argparse
import glob
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from learners.streaming.documents import Continuation, Reader, Unreadable
from orchestrator.errors import AtollError, ConfigurationError, Problem, UnreadableData, first_line
from orchestrator.specification.bounds import BYTE_COUNT, BYTES
from orchestrator.specification.training_sections import DataSection
from orchestrator.system.roots import EVERYTHING, AllowedRoots, data_bytes
from orchestrator.text import tokenizer_file
from orchestrator.text.chat_template import disguised
from orchestrator.text.data_index import counted_with

if TYPE_CHECKING:
    from learners.streaming.order import Pieces

NEWLINE = 10
NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"
"""``normalizer_spec.add_dummy_prefix: false`` of SentencePiece's ``ModelProto``.

Appended to a model, it takes precedence.
"""
SPACE = "\u2581"
"""SentencePiece's character for a space."""

END_OF_TEXT = tokenizer_file.END_OF_TEXT[0]
VOCABULARY_MIN, VOCABULARY_MAX = 257, 1 << 20
"""All bytes and the end of a text; and four times the vocabulary of any model."""
PROGRESS_S = 1.0

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


# ── training ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def train(paths: Sequence[str], vocabulary_size: int, text_field: str, progress: bool) -> tuple[bytes, int, int]:
    """Return the tokenizer's file, the bytes of text it was trained on, and its tokens: fewer if there is little text.

    Raises ConfigurationError for files that cannot be read, or have no text.
    """
    try:
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise ConfigurationError(detail="The package tokenizers is not installed. Install atoll[text].") from error
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = byte_level, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(byte_level.alphabet()),
        show_progress=False,
    )
    texts = _Texts(paths, text_field, progress)
    tokenizer.train_from_iterator(iter(texts), trainer)
    if not texts.byte_count:
        raise ConfigurationError(detail=f"There is no text in {', '.join(paths[:5])}.")
    return tokenizer.to_str(pretty=True).encode(), texts.byte_count, tokenizer.get_vocab_size()


class _Texts:
    """The documents of all files. Counts them, and prints a line of progress each second."""

    def __init__(self, paths: Sequence[str], text_field: str, progress: bool) -> None:
        self._paths, self._progress = paths, progress
        self._reader = Reader(EVERYTHING, text_field, Unreadable(0))
        self.byte_count = 0

    def __iter__(self) -> Iterator[str]:
        from learners.streaming.order import cut  # streaming counts tokens by this module

        pieces = cut([_size(path) for path in self._paths])
        shown_at = time.monotonic()
        for index in range(len(pieces)):
            for document in self._documents(pieces, index):
                self.byte_count += len(document)
                yield document.decode(errors="replace")
            if self._progress and time.monotonic() - shown_at >= PROGRESS_S:
                shown_at = time.monotonic()
                print(f"read {index + 1:,} of {len(pieces):,} pieces", file=sys.stderr)
        if self._progress:
            print(f"read {self.byte_count:,} bytes of text; merging", file=sys.stderr)

    def _documents(self, pieces: Pieces, index: int) -> list[bytes]:
        path = self._paths[pieces.file[index]]
        return self._reader.documents(path, int(pieces.number[index]), int(pieces.count[index]))


def _paths(name: str) -> list[str]:
    """Return the file with this name, or those that match it as a pattern. Raises ConfigurationError if there is none."""
    if "://" in name or os.path.isfile(name):
        return [name if "://" in name else os.path.abspath(name)]
    if os.path.isdir(name):
        raise ConfigurationError(detail=f"{name} is a folder. Name its files: {os.path.join(name, '*.jsonl')}.")
    if glob.has_magic(name) and not os.path.lexists(name):
        if paths := sorted(path for path in glob.glob(name) if os.path.isfile(path)):
            return [os.path.abspath(path) for path in paths]
        raise ConfigurationError(detail=f"{name} is a pattern that matches no file. Correct it, or name the files.")
    return [os.path.abspath(name)]


def _size(path: str) -> int:
    try:
        return data_bytes(EVERYTHING, path)
    except OSError as error:
        raise ConfigurationError(detail=f"{path} cannot be read: {error.strerror or first_line(error)}.") from error


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m learners.tokenizer")
    parser.add_argument("files", nargs="+")
    parser.add_argument("--vocabulary-size", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--text-field", default="text")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    try:
        if not VOCABULARY_MIN <= options.vocabulary_size <= VOCABULARY_MAX:
            detail = f"--vocabulary-size is {options.vocabulary_size:,}. Give {VOCABULARY_MIN:,} to {VOCABULARY_MAX:,}."
            raise ConfigurationError(detail=detail)
        paths = [path for name in options.files for path in _paths(name)]
        content, byte_count, token_count = train(
            paths, options.vocabulary_size, options.text_field, progress=not options.json
        )
        draft = options.output.with_name(f"{options.output.name}.draft")
        draft.write_bytes(content)
        draft.replace(options.output)
        file = tokenizer_file.read(EVERYTHING, os.path.abspath(options.output))
    except OSError as error:
        print(f"atoll: {options.output} cannot be written: {error.strerror}.", file=sys.stderr)
        return 1
    except UnreadableData as error:
        print(f"atoll: {error.detail} Correct the file, or leave it out.", file=sys.stderr)
        return 2
    except AtollError as error:
        print(f"atoll: {error}", file=sys.stderr)
        return 2
    if options.json:
        facts = {"output": str(options.output), "vocabulary_size": token_count, "bytes": byte_count}
        print(json.dumps({**facts, "digest": file.digest}))
    else:
        print(f"{options.output}: {token_count:,} tokens, from {byte_count:,} bytes of text")
        if token_count < options.vocabulary_size:
            print(f"There was too little text for {options.vocabulary_size:,}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
