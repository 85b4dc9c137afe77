"""The text of a job that holds all of it in memory: found, in a fixed order, split by documents, and as tokens.

The built-in corpus is the Python standard library's own source, without tests and installed packages: real text that is
always there and never downloaded. Otherwise files: ``.jsonl`` and ``.parquet`` give one document per record, any other
file is text. Everything here is a function of the documents' content alone: the same on every island and at every
restart. Nothing here knows of batches, shards or JAX.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from learners.tokenizer import Bytes, Tokenizer
from orchestrator.bounds import BYTE_COUNT
from orchestrator.errors import ConfigurationError, first_line
from orchestrator.roots import AllowedRoots, open_data

NOWHERE = AllowedRoots()
DOCUMENT_BYTES_MAX = 1 << 16
"""Longer documents count as several, so that one long file can still be split."""
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True, slots=True)
class Corpus:
    """Two disjoint texts, each a one-dimensional array of tokens: whole documents, with the separator between them."""

    training: np.ndarray
    held_out: np.ndarray
    held_out_bytes_per_token: float = 1.0
    vocabulary_size: int = BYTE_COUNT


def load(section: Mapping[str, Any], roots: AllowedRoots = NOWHERE, tokenizer: Tokenizer | None = None) -> Corpus:
    """Read and split what the ``data`` section of a job specification names; files only below ``roots``.

    Raises ConfigurationError when a file cannot be read, or when there is too little text to hold some of it out.
    """
    documents = builtin_documents() if section["source"] == "builtin" else file_documents(section, roots)
    return split(documents, section["held_out_ratio"], section["sequence_length"], tokenizer)


def builtin_documents() -> Iterator[bytes]:
    """The standard library's modules, by path within it."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(_python_files(root), key=lambda path: path.relative_to(root).as_posix()):
        yield path.read_bytes()


def file_documents(section: Mapping[str, Any], roots: AllowedRoots) -> Iterator[bytes]:
    """The documents of ``data.files``, in the order given there. Raises OutsideRoots for one that lies below no root."""
    for name in section["files"]:
        path = Path(name)
        try:
            with open_data(roots, name) as file:
                if path.suffix == ".jsonl":
                    yield from _json_lines(file, path, section["text_field"])
                elif path.suffix == ".parquet":
                    yield from _parquet(file, path, section["text_field"])
                else:
                    yield file.read()
        except OSError as error:
            detail = f"data.files: {path} cannot be read here ({error.strerror or error}). It must exist on every node."
            raise ConfigurationError(detail=detail) from error


def split(
    documents: Iterable[bytes], held_out_ratio: float, sequence_length: int, tokenizer: Tokenizer | None = None
) -> Corpus:
    """Hold out those documents whose digests sort first, until they make up ``held_out_ratio`` of the bytes.

    By digest and not by position, so that neighbours in a file do not end up on one side together. Equal documents
    stay on one side. Raises ConfigurationError when either side is shorter than one sequence.
    """
    chunks = [chunk for document in documents for chunk in _chunks(document)]
    digests = [hashlib.blake2b(chunk, digest_size=16).digest() for chunk in chunks]
    size_of = dict.fromkeys(digests, 0)
    for digest, chunk in zip(digests, chunks, strict=True):
        size_of[digest] += len(chunk)
    wanted = held_out_ratio * sum(size_of.values())
    chosen: set[bytes] = set()
    taken = 0
    for digest in sorted(size_of):
        if taken >= wanted:
            break
        chosen.add(digest)
        taken += size_of[digest]
    sides: dict[bool, list[bytes]] = {True: [], False: []}
    for digest, chunk in zip(digests, chunks, strict=True):
        sides[digest in chosen].append(chunk)
    tokenizer = tokenizer or Bytes()
    training, held_out = (joined(tokenizer, sides[side]) for side in (False, True))
    bytes_per_token = text_bytes(sides[True]) / max(1, len(held_out))
    corpus = Corpus(training, held_out, bytes_per_token, tokenizer.vocabulary_size)
    for side, text in (("training", corpus.training), ("held-out", corpus.held_out)):
        if len(text) <= sequence_length:
            raise ConfigurationError(
                detail=f"data: the {side} split has {len(text)} tokens, fewer than one sequence of {sequence_length + 1}. "
                "Add text, lower data.sequence_length, or change data.held_out_ratio."
            )
    return corpus


def held_out_sequences(corpus: Corpus, count: int, sequence_length: int) -> np.ndarray:
    """Up to ``count`` sequences evenly spread over the held-out split: (sequences, sequence_length + 1) int32."""
    windows = (len(corpus.held_out) - 1) // sequence_length
    picked = np.arange(min(count, windows)) * windows // min(count, windows)
    return sequences_at(corpus.held_out, picked, sequence_length)


def sequences_at(text: np.ndarray, windows: np.ndarray, sequence_length: int) -> np.ndarray:
    """Windows by number, as int32 (windows, sequence_length + 1). Neighbours share one byte: each is predicted once."""
    return text[windows[:, None] * sequence_length + np.arange(sequence_length + 1)].astype(np.int32)


def unigram_loss(corpus: Corpus, sequences: np.ndarray) -> float:
    """Nats per token, on the sequences' targets, of the training split's frequencies (one added to each count)."""
    return surprise(np.bincount(corpus.training, minlength=corpus.vocabulary_size), sequences)


def surprise(counts: np.ndarray, sequences: np.ndarray) -> float:
    """Nats per token of the sequences' targets where each token is as likely as its count, and one more, says."""
    smoothed = counts.astype(np.float64) + 1
    nats = -np.log(smoothed / smoothed.sum())
    return float(nats[sequences[:, 1:]].mean())


def joined(tokenizer: Tokenizer, documents: Sequence[bytes]) -> np.ndarray:
    """The documents' tokens one after the other, with what the tokenizer puts before each and the separator between them.

    One-dimensional, of the tokenizer's dtype.
    """
    if isinstance(tokenizer, Bytes):
        before = tokenizer.beginning.tobytes()
        return np.frombuffer(bytes([tokenizer.separator]).join(before + each for each in documents), np.uint8)
    separator = np.array([tokenizer.separator], tokenizer.dtype)
    parts = [part for tokens in tokenizer.encode(documents) for part in (tokenizer.beginning, tokens, separator)]
    return np.concatenate(parts[:-1]) if parts else np.zeros(0, tokenizer.dtype)


def text_bytes(documents: Sequence[bytes]) -> int:
    """Bytes of the documents, each separator counted as one: what the joined tokens stand for."""
    return sum(map(len, documents)) + max(0, len(documents) - 1)


def _python_files(root: Path) -> Iterator[Path]:
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name not in SKIPPED_FOLDERS]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


def _chunks(document: bytes) -> Iterator[bytes]:
    for start in range(0, len(document), DOCUMENT_BYTES_MAX):
        yield document[start : start + DOCUMENT_BYTES_MAX]


def _json_lines(lines: IO[bytes], path: Path, field: str) -> Iterator[bytes]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield json.loads(line)[field].encode()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigurationError(
                detail=f"data.files: {path}, line {number}, holds no object with a text field {field!r} "
                f"({type(error).__name__}). Set data.text_field to the field's name."
            ) from error


def _parquet(content: IO[bytes], path: Path, field: str) -> Iterator[bytes]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile  # here, because it takes 0.1 s and few jobs need it

    try:
        file = ParquetFile(content)
        if problem := not_text(file.schema_arrow, field):
            raise ConfigurationError(detail=f"data.files: {path} {problem}. Set data.text_field.")
        for batch in file.iter_batches(columns=[field]):
            yield from texts_of(batch)
    except (ArrowException, OSError) as error:
        detail = f"data.files: {path} is no Parquet file, or a damaged one ({first_line(error).rstrip('.')})."
        raise ConfigurationError(detail=f"{detail} Correct it, or leave it out.") from error


def not_text(schema: Any, field: str) -> str:
    """What keeps a Parquet file's column from being read as texts; empty if nothing."""
    from pyarrow import types

    if (count := schema.names.count(field)) != 1:
        return f"has {f'{count} columns' if count else 'no column'} {field!r} among {schema.names[:20]}"
    column = schema.field(field).type
    kind = column.value_type if types.is_dictionary(column) else column
    kinds = (types.is_string, types.is_large_string, types.is_string_view, types.is_binary, types.is_large_binary)
    is_text = types.is_null(kind) or any(fits(kind) for fits in kinds)
    return "" if is_text else f"has {column} in the column {field!r}, and no text"


def texts_of(batch: Any) -> Iterator[bytes]:
    """The texts of a Parquet file's one column, or of a part of it, without those that are empty."""
    for text in batch.column(0).to_pylist():
        if text:
            yield text if isinstance(text, bytes) else str(text).encode(errors="replace")
