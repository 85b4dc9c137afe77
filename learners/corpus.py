"""Text that a job holds in memory as a whole: read in a fixed order, split by documents, tokenised, and cut into batches.

The built-in corpus is the Python standard library's own source, without tests and installed packages: real text that is
always present and never downloaded. Otherwise the text is files of any supported kind (``text.file_kinds``). A record is a
document, and so is a file of plain text. Everything depends only on the documents' content, so it is the same on every
island and after every restart.

The training split is cut into windows of ``sequence_length`` tokens. Window w belongs to shard w mod n for the whole job,
and each shard is shuffled by the job's seed, differently in each epoch. When a job is resumed, ``island_spec`` deals the
rest to its islands. A stream counts sequences, so that islands may have different batch sizes: batch k of an island with
batches of b is its sequences k·b up to (k + 1)·b. A sequence depends only on its number (grain's ``MapDataset`` has random
access), so an island's position in its data is one integer, and returning to it costs nothing.

Nothing here knows of JAX's devices, of steps or of the life of islands.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from learners.contract import Batch
from learners.conversations import Conversations, batch_of, learned_tokens
from learners.held_out import HeldOutBatch
from learners.island_spec import Draw, IslandSpec, first_count, origins
from learners.streaming.documents import Continuation, Reader, Unreadable, chosen, parts
from learners.tokenizer import Bytes, Tokenizer
from orchestrator.errors import ConfigurationError
from orchestrator.specification.bounds import BYTE_COUNT
from orchestrator.specification.training_sections import DataSection
from orchestrator.system.roots import AllowedRoots, shown

NOWHERE = AllowedRoots()
TEXT_BYTES_MAX = 2 << 30
"""The limit for all files together, because each island holds them: in memory they take 2.5 times as much."""
SOURCE_SEQUENCES_MIN = 4
"""The minimum held out of a source with a small weight, so that its loss is meaningful."""
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True, slots=True)
class Corpus:
    """Two disjoint texts, each a one-dimensional array of tokens: whole documents with the separator between them.

    With ``has_rows`` they are rows of conversations (``learners.conversations``).
    """

    training: np.ndarray
    held_out: np.ndarray
    held_out_bytes_per_token: float = 1.0
    vocabulary_size: int = BYTE_COUNT
    has_rows: bool = False


def load(
    section: DataSection,
    roots: AllowedRoots = NOWHERE,
    tokenizer: Tokenizer | None = None,
    unreadable: Unreadable | None = None,
) -> Corpus:
    """Read and split the text of the ``data`` section of a job specification; only files below ``roots``.

    Raises ConfigurationError if a file cannot be read, or if there is too little text to hold some of it out, and
    UnreadableData if more records cannot be read than ``unreadable`` allows.
    """
    is_builtin = section.source == "builtin"
    documents = builtin_documents() if is_builtin else file_documents(section, roots, unreadable)
    return split(documents, section.held_out_ratio, section.sequence_length, tokenizer)


def shard_batches(corpus: Corpus, spec: IslandSpec, shard_index: int, shard_count: int) -> Draw:
    """Return a function that draws the batches of one shard of ``shard_count``.

    Raises ConfigurationError if the corpus is too small to give every shard one batch.
    """
    # grain takes 0.4 s to import, and the laboratory and the evaluator use this module without drawing batches
    import grain

    length, batch_size = spec.job.data.sequence_length, spec.batch_size
    window_count = windows_in(corpus.training, length, corpus.has_rows)
    cut_into = first_count(spec.resumptions, shard_count)
    if window_count // cut_into < batch_size:
        raise ConfigurationError(
            detail=f"data: {window_count} sequences of {length} tokens are too few to give each of {cut_into} islands "
            f"one batch of {batch_size}. Add text, or lower training.batch_size or data.sequence_length."
        )

    @cache
    def windows(shard: int) -> Any:
        numbered: Any = grain.MapDataset.range(shard, window_count, cut_into)
        return numbered.shuffle(seed=spec.job.seed + shard).repeat()

    def draw(number: int) -> np.ndarray:
        drawn = [
            windows(shard)[at] for shard, at in origins(spec.resumptions, batch_size, shard_index, shard_count, number)
        ]
        return sequences_at(corpus.training, np.array(drawn), length, corpus.has_rows)

    return draw


def draw_of(
    sequence: Callable[[int, int], np.ndarray], spec: IslandSpec, shard_index: int, shard_count: int
) -> Callable[[int], np.ndarray]:
    """Return a function that draws a shard's batches, by a function that returns a sequence of an original shard."""

    def draw(number: int) -> np.ndarray:
        places = origins(spec.resumptions, spec.batch_size, shard_index, shard_count, number)
        return np.stack([sequence(*place) for place in places])

    return draw


def builtin_documents() -> Iterator[bytes]:
    """Yield the standard library's modules, ordered by path."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(_python_files(root), key=lambda path: path.relative_to(root).as_posix()):
        yield path.read_bytes()


def file_documents(section: DataSection, roots: AllowedRoots, unreadable: Unreadable | None = None) -> Iterator[bytes]:
    """Yield the documents of ``data.files``, in their order. Raises OutsideRoots for a file that is below no root."""
    field = section.record_field(section.text_field)
    reader, left = Reader(roots, field, unreadable or Unreadable(0), "files"), TEXT_BYTES_MAX
    for path in section.files:
        try:
            for document in reader.whole(path, left):
                left -= len(document)
                if left < 0:
                    detail = (
                        f"data.files have more than {TEXT_BYTES_MAX >> 20:,} MiB of text; each island holds all of it."
                    )
                    raise ConfigurationError(detail=f"{detail} Use source: streamed, which reads parts when needed.")
                yield document
        except OSError as error:
            detail = f"data.files: {shown(path)} cannot be read here ({error.strerror or error})."
            raise ConfigurationError(detail=f"{detail} It must exist on every node.") from error


def split(
    documents: Iterable[bytes], held_out_ratio: float, sequence_length: int, tokenizer: Tokenizer | None = None
) -> Corpus:
    """Hold out the documents whose digests sort first, until they make up ``held_out_ratio`` of the bytes.

    The choice is by digest, not by position, so that neighbours in a file are not all held out together. Equal documents
    stay on the same side. Raises ConfigurationError if either side is shorter than one sequence.
    """
    has_rows = isinstance(tokenizer, Conversations)
    chunks = list(documents) if has_rows else [chunk for document in documents for chunk in parts(document)]
    digests = [hashlib.blake2b(chunk, digest_size=16).digest() for chunk in chunks]
    size_of = dict.fromkeys(digests, 0)
    for digest, chunk in zip(digests, chunks, strict=True):
        size_of[digest] += len(chunk)
    wanted = held_out_ratio * sum(size_of.values())
    held_out: set[bytes] = set()
    taken = 0
    for digest in sorted(size_of):
        if taken >= wanted:
            break
        held_out.add(digest)
        taken += size_of[digest]
    sides = {side: _side(chunks, digests, held_out, side) for side in (False, True)}
    tokenizer = tokenizer or Bytes()
    training, measured = (joined(tokenizer, sides[side]) for side in (False, True))
    bytes_per_token = average_bytes(tokenizer, sides[True], measured)
    corpus = Corpus(training, measured, bytes_per_token, tokenizer.vocabulary_size, has_rows)
    for side, text in (("training", corpus.training), ("held-out", corpus.held_out)):
        if not windows_in(text, sequence_length, has_rows):
            raise ConfigurationError(
                detail=f"data: the {side} split has {len(text)} tokens, fewer than one sequence of {sequence_length + 1}. "
                "Add text, lower data.sequence_length, or change data.held_out_ratio."
            )
    return corpus


def held_out_sequences(corpus: Corpus, count: int, sequence_length: int) -> np.ndarray:
    """Return up to ``count`` sequences evenly spread over the held-out split: (sequences, sequence_length + 1) int32."""
    windows = windows_in(corpus.held_out, sequence_length, corpus.has_rows)
    picked = np.arange(min(count, windows)) * windows // min(count, windows)
    return sequences_at(corpus.held_out, picked, sequence_length, corpus.has_rows)


@dataclass(frozen=True, slots=True)
class Measured:
    """The held-out tokens of one source, one-dimensional, with the average bytes of a token, if known."""

    name: str
    weight: float
    tokens: np.ndarray
    bytes_per_token: float | None


def sequences_wanted(sequence_count: int, share: float) -> int:
    """Return how many of ``sequence_count`` held-out sequences to measure of a source with this share."""
    return max(SOURCE_SEQUENCES_MIN, ceil(sequence_count * share))


def measured_batches(
    sources: Sequence[Measured], sequence_count: int, batch_max: int, length: int, has_rows: bool = False
) -> list[HeldOutBatch]:
    """Return batches of one source each, all of one shape. The first ones, however many, have about each source's share."""
    total = sum(source.weight for source in sources)
    shares = [sequences_wanted(sequence_count, source.weight / total) for source in sources]
    windows = [windows_in(source.tokens, length, has_rows) for source in sources]
    size = min(batch_max, *shares, *windows)
    batches = []
    for source, share, most in zip(sources, shares, windows, strict=True):
        count = min(ceil(share / size), most // size)
        picked = np.arange(count * size) * most // (count * size)
        drawn = sequences_at(source.tokens, picked, length, has_rows)
        for number, sequences in enumerate(np.split(drawn, count)):
            batch = batch_of(sequences) if has_rows else sequences
            batches.append(((number + 0.5) / count, HeldOutBatch(batch, source.name, source.bytes_per_token)))
    return [batch for _, batch in sorted(batches, key=lambda placed: placed[0])]


def windows_in(text: np.ndarray, sequence_length: int, has_rows: bool) -> int:
    """Return how many sequences a text has: rows of conversations do not share a token."""
    return len(text) // (sequence_length + 1) if has_rows else max(0, len(text) - 1) // sequence_length


def sequences_at(text: np.ndarray, windows: np.ndarray, sequence_length: int, has_rows: bool = False) -> np.ndarray:
    """Return these windows as int32 (windows, sequence_length + 1).

    Neighbours share one token, so that each is predicted once; rows of conversations do not.
    """
    starts = windows[:, None] * (sequence_length + has_rows)
    return text[starts + np.arange(sequence_length + 1)].astype(np.int32)


def frequencies(corpus: Corpus) -> np.ndarray:
    """Return how often each token is in the training split, or learned there: (vocabulary_size,) int64."""
    tokens = learned_tokens(corpus.training) if corpus.has_rows else corpus.training
    return np.bincount(tokens, minlength=corpus.vocabulary_size)


def surprise(counts: np.ndarray, sequences: np.ndarray | Batch) -> float:
    """Return nats per token of the sequences' targets if a token's probability is proportional to its count plus one."""
    batch = Batch.of(sequences)
    unseen = max(0, int(batch.tokens.max()) + 1 - len(counts))
    smoothed = np.pad(counts, (0, unseen)).astype(np.float64) + 1
    nats = -np.log(smoothed / smoothed.sum())
    if batch.target_weights is None:
        return float(nats[batch.targets].mean())
    return float(np.average(nats[batch.targets], weights=batch.target_weights))


def joined(tokenizer: Tokenizer, documents: Sequence[bytes]) -> np.ndarray:
    """Concatenate the documents' tokens, with the tokenizer's prefix before each and the separator between them.

    A ``Continuation``, a part of the same document, has no prefix. Conversations become rows
    (``learners.conversations``). One-dimensional, of the tokenizer's dtype.
    """
    if isinstance(tokenizer, Conversations):
        return tokenizer.packed(documents)
    if not documents:
        return np.zeros(0, tokenizer.dtype)
    nothing = np.zeros(0, tokenizer.dtype)
    between = np.concatenate([np.array([tokenizer.separator], tokenizer.dtype), tokenizer.beginning])
    before = [nothing if isinstance(document, Continuation) else between for document in documents]
    before[0] = before[0][1:]
    parts = [part for pair in zip(before, tokenizer.encode(documents), strict=True) for part in pair]
    return np.concatenate(parts)


def text_bytes(documents: Sequence[bytes]) -> int:
    """Return the bytes that the joined tokens stand for, counting each separator as one."""
    return sum(map(len, documents)) + max(0, document_count(documents) - 1)


def average_bytes(tokenizer: Tokenizer, documents: Sequence[bytes], tokens: np.ndarray) -> float:
    """Return the average bytes of text per token of the loss: of conversations, per learned token."""
    if isinstance(tokenizer, Conversations):
        learned = learned_tokens(tokens).tolist()
        return len(tokenizer.decode(learned).encode()) / max(1, len(learned))
    return text_bytes(documents) / max(1, len(tokens))


def document_count(parts: Iterable[bytes]) -> int:
    """Return the number of documents: a document and its continuations have one end."""
    return sum(not isinstance(part, Continuation) for part in parts)


def _side(chunks: Sequence[bytes], digests: Sequence[bytes], held_out: Set[bytes], side: bool) -> list[bytes]:
    following = iter(digests)
    return list(chosen(chunks, lambda _: (next(following) in held_out) is side))


def _python_files(root: Path) -> Iterator[Path]:
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name not in SKIPPED_FOLDERS]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))
