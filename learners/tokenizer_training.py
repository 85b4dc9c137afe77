"""Train a tokenizer: byte-level BPE over given files, written as a ``tokenizer.json``. `atoll tokenizer train` runs it.

   python -m learners.tokenizer_training FILES… --vocabulary-size N --output FILE [--text-field NAME] [--json]

The files are of the kinds that ``data.sources`` takes (``orchestrator.text.file_kinds``), and are read a piece at a time. A
name may be a pattern. The same files give the same tokenizer, byte for byte. Every byte is a token, so no text is unknown;
token 0 is ``<|endoftext|>``, the separator.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from learners.streaming.documents import Reader, Unreadable
from learners.streaming.order import Pieces, cut
from orchestrator.errors import AtollError, ConfigurationError, UnreadableData, first_line
from orchestrator.system.roots import EVERYTHING, data_bytes
from orchestrator.text import tokenizer_file

END_OF_TEXT = tokenizer_file.END_OF_TEXT[0]
VOCABULARY_MIN, VOCABULARY_MAX = 257, 1 << 20
"""All bytes and the end of a text; and four times the vocabulary of any model."""
PROGRESS_S = 1.0


def train(paths: Sequence[str], vocabulary_size: int, text_field: str, progress: bool) -> tuple[bytes, int, int]:
    """Return the tokenizer's file, the bytes of text it was trained on, and its tokens: fewer if there is little text.

    Raises ConfigurationError for files that cannot be read, or have no text.
    """
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise ConfigurationError(detail="The package tokenizers is not installed. Install atoll[text].") from error
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = Tokenizer(models.BPE())
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
    parser = argparse.ArgumentParser(prog="python -m learners.tokenizer_training")
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
