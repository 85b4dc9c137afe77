"""A data set of tokens that are already there (``data.source: tokens``), in the order of Megatron-LM's ``GPTDataset``.

A source's documents follow each other in a shuffled order, and are cut into samples of ``sequence_length`` + 1 tokens,
neighbours sharing one. The samples are drawn in a shuffled order, too:

   documents    all documents of all epochs, shuffled; the last epoch apart if less than 80 % of it is needed
   sample i     tokens i·L to (i + 1)·L of these documents
   order        the samples shuffled, those of a last epoch that is apart behind the others

Both shuffles are NumPy's ``RandomState(seed)``, one after the other, so the order equals that of Megatron-LM for the same
files, seed, length and number of samples, element by element. Where Megatron-LM holds an index of samples, a binary search
in the documents' ends finds the same place. Without ``data.samples`` an order has one epoch, and epoch e the seed + e.

Shard s of n draws elements s, s + n, s + 2·n … of that order, so all shards together draw what one reader would, and a
sequence depends on its number alone. Nothing is read before it is drawn. A file is read by `pread` and not mapped: a mapped
file that is cut short ends the process by a signal. An island holds about 40 bytes for each document and 4 for each sample.

The tokens of a Parquet file are compressed by pages, and samples begin anywhere. So the first island of a node that opens
the file writes its tokens, four bytes each, as a ``.bin`` and ``.idx`` into the user's cache; every island and every later
life reads them there. The copy's name is a digest of the file's path, size, time of change and column. If the cache cannot
be used, an island warns and writes the tokens to a nameless file in the folder for temporary files, for itself alone.

Source: Megatron-LM, ``core/datasets/gpt_dataset.py`` (the algorithm; the code is ours).
"""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from math import ceil
from pathlib import Path
from typing import IO

import numpy as np

from learners.conversations import FIRST, TOKEN
from learners.corpus import Measured, draw_of, measured_batches, sequences_wanted
from learners.held_out import HeldOutBatch
from learners.island_spec import Draw, IslandSpec, first_count
from learners.streaming.counting import kept_in
from learners.streaming.order import Mixture, key
from orchestrator.core.vocabulary import DataFlaws
from orchestrator.errors import ConfigurationError, first_line
from orchestrator.specification.data_sources import SourceSection
from orchestrator.system.roots import AllowedRoots, open_data, shown
from orchestrator.text import file_kinds, token_files
from orchestrator.text.parquet_rows import Rows, TooLarge
from orchestrator.text.token_files import NotTokens, TokenLayout

DOCUMENTS_MAX = SAMPLES_MAX = 1 << 28
"""Of one order, in all its epochs: 4 GiB and 1 GiB of memory."""
SEPARATE_BELOW = 0.8
"""The share of the last epoch's samples below which its documents are not shuffled with the others."""
OPEN_FILES = 64
ORDERS_PER_SOURCE = 3
"""The orders in memory: of the present epoch and its neighbours, because an island may continue shards of others."""
FREQUENCY_TOKENS = 1 << 20
"""How many tokens of each source are counted for the unigram loss."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OrderSize:
    """The ``epochs`` of one order, and its samples: ``shuffled_count`` among themselves, then the others."""

    epochs: int
    sample_count: int
    shuffled_count: int

    @classmethod
    def of(cls, epoch_tokens: int, length: int, wanted: int | None = None) -> OrderSize:
        """Return the size of an order of ``wanted`` samples; of one epoch if None."""
        epochs = 1 if wanted is None else max(1, -(-(wanted * length + 1) // epoch_tokens))
        sample_count = (epochs * epoch_tokens - 1) // length
        before = ((epochs - 1) * epoch_tokens - 1) // length
        of_epoch = (epoch_tokens - 1) // length
        is_apart = epochs > 1 and wanted is not None and wanted - before < int(SEPARATE_BELOW * of_epoch)
        return cls(epochs, sample_count, before if is_apart else sample_count)

    @property
    def is_last_apart(self) -> bool:
        return self.shuffled_count < self.sample_count


class GptOrder:
    """The samples of documents with these ``lengths``, in an order of this size."""

    def __init__(self, lengths: np.ndarray, length: int, seed: int, size: OrderSize) -> None:
        state = np.random.RandomState(seed % 2**32)
        everything = np.arange(len(lengths), dtype=np.int32)
        parts = [np.tile(everything, n) for n in ((size.epochs - 1, 1) if size.is_last_apart else (size.epochs,))]
        for part in parts:
            state.shuffle(part)
        self._documents = np.concatenate(parts)
        self._ends = np.cumsum(lengths[self._documents], dtype=np.int64)
        self._length = length
        first = np.arange(size.shuffled_count, dtype=np.uint32)
        last = np.arange(size.shuffled_count, size.sample_count, dtype=np.uint32)
        state.shuffle(first)
        if len(last):
            state.shuffle(last)
        self._samples = np.concatenate([first, last])

    def parts(self, number: int) -> Iterator[tuple[int, int, int]]:
        """Yield the parts of the sample that is drawn as ``number``: a document, the first token of it, and how many."""
        at = int(self._samples[number]) * self._length
        left, place = self._length + 1, int(np.searchsorted(self._ends, at, side="right"))
        while left:
            end = int(self._ends[place])
            count = min(left, end - at)
            document = int(self._documents[place])
            if count:
                start = int(self._ends[place - 1]) if place else 0
                yield document, at - start, count
            at, left, place = at + count, left - count, place + 1


class Documents:
    """The documents of several files, one after the other, as if they were one file."""

    def __init__(
        self, roots: AllowedRoots, paths: Sequence[str], vocabulary_size: int | None, field: str = "input_ids"
    ) -> None:
        """Read the files' headers and indices. Raises ConfigurationError for a file that cannot be read; OutsideRoots.

        ``field`` is the column of Parquet files.
        """
        self._roots, self._vocabulary_size, self._field = roots, vocabulary_size, field
        self._paths = list(paths)
        self._copies: dict[str, Path] = {}
        self._nameless: IO[bytes] | None = None
        self._in_nameless: set[str] = set()
        self._opened = lru_cache(maxsize=OPEN_FILES)(self._open)
        layouts = [self._read(path) for path in self._paths]
        self._layouts = [layout for layout, _, _ in layouts]
        self._file = np.repeat(np.arange(len(layouts), dtype=np.int32), [len(starts) for _, starts, _ in layouts])
        self._starts = np.concatenate([starts for _, starts, _ in layouts])
        self.lengths = np.concatenate([lengths for _, _, lengths in layouts])

    def tokens(self, document: int, first: int, count: int) -> np.ndarray:
        """Return tokens of a document: (count,) of the file's dtype.

        Raises ConfigurationError for a token that the model lacks, or a file that ended.
        """
        at = int(self._file[document])
        path, layout = self._paths[at], self._layouts[at]
        place = int(self._starts[document]) + first
        size = count * layout.token_bytes
        content = os.pread(self._opened(path).fileno(), size, layout.begin + place * layout.token_bytes)
        if len(content) != size:
            detail = f"data.sources: {shown(path)} has become shorter while the job reads it."
            raise ConfigurationError(detail=f"{detail} Write changed data to a new file.")
        tokens = np.frombuffer(content, layout.dtype)
        limit = self._vocabulary_size or 1 << 31
        if len(tokens) and not (int(tokens.min()) >= 0 and int(tokens.max()) < limit):
            wrong = int(np.flatnonzero((tokens < 0) | (tokens >= limit))[0])
            refused = token_files.too_large(place + wrong, int(tokens[wrong]), limit)
            raise ConfigurationError(detail=f"data.sources: {shown(path)}: {refused}")
        return tokens

    def _open(self, path: str) -> IO[bytes]:
        if self._nameless is not None and path in self._in_nameless:
            return self._nameless
        return self._copies[path].open("rb") if path in self._copies else open_data(self._roots, path)

    def _read(self, path: str) -> tuple[TokenLayout, np.ndarray, np.ndarray]:
        try:
            with open_data(self._roots, path) as file:
                if token_files.is_table(path):
                    try:
                        copy = self._copies[path] = _copied(path, file, self._field)
                    except (_Unusable, RuntimeError) as error:
                        return self._without_cache(path, file, first_line(error))
                    with copy.open("rb") as tokens, copy.with_suffix(token_files.INDEX).open("rb") as index:
                        layout = token_files.megatron_layout(tokens, index)
                        return layout, *_indexed(layout, token_files.index_layout(index), index)
                if token_files.has_index(path):
                    with open_data(self._roots, token_files.index_of(path)) as index:
                        layout = token_files.megatron_layout(file, index)
                        return layout, *_indexed(layout, token_files.index_layout(index), index)
                layout = token_files.array_layout(file)
                length = layout.row_length or 0
                count = layout.count // length if length else 0
                return layout, np.arange(count, dtype=np.int64) * length, np.full(count, length, np.int64)
        except NotTokens as error:
            raise ConfigurationError(detail=f"data.sources: {shown(path)}: {error}") from error
        except OSError as error:
            detail = f"data.sources: {shown(path)} or its index cannot be read here ({error.strerror or error})."
            raise ConfigurationError(detail=f"{detail} They must exist on every node.") from error

    def _without_cache(self, path: str, file: IO[bytes], reason: str) -> tuple[TokenLayout, np.ndarray, np.ndarray]:
        """Write the tokens of a Parquet file behind those of others in a nameless file.

        Raises NotTokens; ConfigurationError if there is no place for them.
        """
        remedy = "Set XDG_CACHE_HOME to a folder that this user can write and that has room."
        try:
            if self._nameless is None:
                log.warning(
                    "The tokens of Parquet files cannot be kept in the user's cache: %s. Training works, but each island "
                    "writes them to a temporary file at every start. %s",
                    *(reason, remedy),
                )
                self._nameless = tempfile.TemporaryFile()  # noqa: SIM115, this object keeps it
            begin = self._nameless.seek(0, os.SEEK_END)
            with tempfile.TemporaryFile() as index:
                _write(file, self._field, self._nameless, index)
                self._nameless.flush()
                header = token_files.index_layout(index)
                count = (self._nameless.tell() - begin) // 4
                layout = TokenLayout(header.dtype, count, begin, None)
                self._in_nameless.add(path)
                return layout, *_indexed(layout, header, index)
        except OSError as error:
            detail = (
                f"data.sources: the tokens of {shown(path)} can be written neither to the user's cache ({reason}) nor to a "
                f"temporary file ({error.strerror or error})."
            )
            raise ConfigurationError(detail=f"{detail} {remedy}") from error


class _Unusable(OSError):
    """The user's cache cannot be used, with the reason."""


def _copied(path: str, file: IO[bytes], field: str) -> Path:
    """Return the ``.bin`` with the tokens of a Parquet file, which this node keeps with an ``.idx``.

    Raises NotTokens; _Unusable if there is no place for the copy, and RuntimeError if nobody knows the user's home.
    """
    status = os.fstat(file.fileno())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "atoll" / "tokens"
    copy = kept_in(cache, "parquet", path, status.st_size, status.st_mtime_ns, field).with_suffix(token_files.MEGATRON)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with copy.with_suffix(".lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one island of a node writes, the others wait
            if not copy.with_suffix(token_files.INDEX).exists():
                _write_copy(file, field, copy)
    except OSError as error:
        raise _Unusable(f"{shown(cache)}: {error.strerror or error}") from error
    return copy


def _write_copy(file: IO[bytes], field: str, copy: Path) -> None:
    """Write the tokens, and behind them the index, whose presence says that both are whole. Raises NotTokens, OSError."""
    endings = token_files.MEGATRON, token_files.INDEX
    drafts = [copy.with_suffix(f"{ending}.draft") for ending in endings]
    try:
        with ExitStack() as opened:
            tokens, index = (opened.enter_context(draft.open("wb")) for draft in drafts)
            _write(file, field, tokens, index)
        for draft, ending in zip(drafts, endings, strict=True):
            draft.replace(copy.with_suffix(ending))
    finally:
        for draft in drafts:
            draft.unlink(missing_ok=True)


def _write(file: IO[bytes], field: str, tokens: IO[bytes], index: IO[bytes]) -> None:
    """Write the tokens of a Parquet file, and an index of its rows. Raises NotTokens, OSError."""
    try:
        rows = Rows(file, field, look_at_pages=True, is_tokens=True)
        if rows.problem:
            raise NotTokens(rows.problem, "Set token_field to the column that has them.")
        token_files.write_documents(rows.tokens(), tokens, index)
    except (TooLarge, ValueError, *file_kinds.DAMAGE) as error:
        if isinstance(error, NotTokens) or (isinstance(error, OSError) and error.errno is not None):
            raise
        raise NotTokens(f"cannot be read as Parquet: {first_line(error)}", "Write the file again.") from error


def _indexed(layout: TokenLayout, header: token_files.IndexLayout, index: IO[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Return first tokens and lengths of the documents of an index. Raises NotTokens for impossible ones."""
    index.seek(header.lengths_at)
    lengths = np.frombuffer(index.read(4 * header.count), "<i4").astype(np.int64)
    places = np.frombuffer(index.read(8 * header.count), "<i8").astype(np.int64)
    size = layout.token_bytes
    ends = places + lengths * size
    if np.any(lengths < 0) or np.any(places < 0) or np.any(places % size) or np.any(ends > layout.count * size):
        raise NotTokens("has an .idx with documents outside the .bin", "Write both files again, in one run.")
    return places // size, lengths


@dataclass(frozen=True, slots=True)
class TokenSource:
    """A source: its documents, the lengths of those to train on, and the held-out text.

    A document from which tokens are held out keeps its first ones for training.
    """

    name: str
    weight: float
    documents: Documents
    training: np.ndarray
    training_tokens: int
    held_out: np.ndarray


class Tokens:
    """The ``sources`` of a ``data`` section with ``source: tokens``. Nothing is read before it is needed."""

    def __init__(self, spec: IslandSpec, vocabulary_size: int | None) -> None:
        self._spec, self._data, self._seed = spec, spec.job.data, spec.job.seed
        self._length = self._data.sequence_length
        self._vocabulary_size = vocabulary_size or spec.job.vocabulary_size
        self._order = lru_cache(maxsize=ORDERS_PER_SOURCE * len(self._data.sources))(self._made)

    def flaws(self) -> DataFlaws:
        """Return no flaws: a file of tokens is read as it is, or not at all."""
        return DataFlaws(0)

    def draw(self, shard_index: int, shard_count: int) -> Draw:
        """Return a function that draws a shard's batches. Raises ConfigurationError if there are too few tokens."""
        cut_into = first_count(self._spec.resumptions, shard_count)
        for source in self._sources:
            if (count := self._size(source).sample_count) < cut_into:
                detail = f"data.sources: {source.name} has {count:,} sequences of {self._length} tokens to train on"
                remedy = "Add files, or lower data.sequence_length."
                raise ConfigurationError(detail=f"{detail}, too few for {cut_into} islands. {remedy}")

        @cache
        def mixture(shard: int) -> Mixture:
            return Mixture([source.weight for source in self._sources], key("mixture", self._seed, shard))

        def sequence(shard: int, number: int) -> np.ndarray:
            source, rank = mixture(shard).source(number)
            return self._sequence(source, shard + cut_into * rank)

        return draw_of(sequence, self._spec, shard_index, shard_count)

    def held_out_batches(self, batch_max: int) -> list[HeldOutBatch]:
        """Return batches of one source each, all of one shape. The first ones have about each source's share."""
        measured = [Measured(one.name, one.weight, one.held_out, None) for one in self._sources]
        return measured_batches(measured, self._spec.job.evaluation.sequences, batch_max, self._length)

    def frequencies(self) -> np.ndarray:
        """Return how often each token is in the first training sequences: (tokens,) int64."""
        counts = np.zeros(self._vocabulary_size or 1, np.int64)
        for number, source in enumerate(self._sources):
            most = min(self._size(source).sample_count, max(1, FREQUENCY_TOKENS // self._length))
            for at in range(most):
                counted = np.bincount(self._sequence(number, at) & TOKEN, minlength=len(counts))
                counts = counted + np.pad(counts, (0, len(counted) - len(counts)))
        return counts

    def _sequence(self, number: int, element: int) -> np.ndarray:
        """Return element ``element`` of a source's order: (sequence_length + 1,) int32; first tokens may be marked."""
        source = self._sources[number]
        epoch, within = divmod(element, self._size(source).sample_count)
        return np.concatenate(
            [self._part(source.documents, *part) for part in self._order(number, epoch).parts(within)]
        )

    def _part(self, documents: Documents, document: int, first: int, count: int) -> np.ndarray:
        """Return tokens of a document, (count,) int32; its first token marked if documents are segments."""
        tokens = documents.tokens(document, first, count).astype(np.int32)
        if first == 0 and self._data.intra_document_masking:
            tokens[:1] |= FIRST
        return tokens

    def _size(self, source: TokenSource) -> OrderSize:
        return OrderSize.of(source.training_tokens, self._length, self._data.samples)

    def _made(self, number: int, epoch: int) -> GptOrder:
        source = self._sources[number]
        size, lengths = self._size(source), source.training
        if len(lengths) * size.epochs > DOCUMENTS_MAX or size.sample_count > SAMPLES_MAX:
            detail = (
                f"data.sources: an order of {source.name} has {len(lengths) * size.epochs:,} documents and "
                f"{size.sample_count:,} sequences, but at most {DOCUMENTS_MAX:,} and {SAMPLES_MAX:,} are possible."
            )
            raise ConfigurationError(detail=f"{detail} Use several sources, longer sequences, or smaller data.samples.")
        return GptOrder(lengths, self._length, self._seed + epoch, size)

    @cached_property
    def _sources(self) -> list[TokenSource]:
        return [self._source(section) for section in self._data.sources]

    def _source(self, section: SourceSection) -> TokenSource:
        documents = Documents(self._spec.roots, section.files, self._vocabulary_size, section.token_field)
        lengths, total = documents.lengths, int(documents.lengths.sum())
        if self._data.intra_document_masking and self._data.separator is None and len(lengths) <= len(section.files):
            detail = f"data.sources: {section.name} has one document in each file, so data.intra_document_masking needs"
            raise ConfigurationError(detail=f"{detail} data.separator: name the token that ends a document in them.")
        if section.held_out:
            reserved = Documents(self._spec.roots, section.held_out, self._vocabulary_size, section.token_field)
            training, held_out = lengths, self._joined(reserved, np.zeros(len(reserved.lengths), np.int64))
        else:
            training = held_back(lengths, max(ceil(self._data.held_out_ratio * total), self._length + 1))
            held_out = self._joined(documents, training)
            count = int(np.count_nonzero(np.cumsum(training[::-1])))
            training = training[:count]
        training_tokens = int(training.sum())
        for what, count in (("training", training_tokens), ("held-out", len(held_out))):
            if count <= self._length:
                detail = f"data.sources: {section.name} has {count:,} {what} tokens, fewer than one sequence of "
                remedy = "Add files, or lower data.sequence_length."
                raise ConfigurationError(detail=f"{detail}{self._length + 1}. {remedy}")
        return TokenSource(section.name, section.weight, documents, training, training_tokens, held_out)

    def _joined(self, documents: Documents, first: np.ndarray) -> np.ndarray:
        """Return what follows the ``first`` tokens of each document, joined; as much as is measured: one-dimensional."""
        wanted = sequences_wanted(self._spec.job.evaluation.sequences, 1.0) * self._length + 1
        parts, size = [np.zeros(0, np.int32)], 0
        left = documents.lengths - first
        for document in np.flatnonzero(left):
            if size >= wanted:
                break
            start, count = int(first[document]), min(int(left[document]), wanted - size)
            parts.append(self._part(documents, int(document), start, count))
            size += count
        return np.concatenate(parts)


def held_back(lengths: np.ndarray, wanted: int) -> np.ndarray:
    """Return how many of each document's first tokens are trained on, if ``wanted`` at the end are held out.

    Whole documents are held out from the end on, unless they would have more than half of all tokens: then exactly
    ``wanted`` tokens, from the end of the last documents.
    """
    total = int(lengths.sum())
    ends = np.cumsum(lengths)
    cut = max(0, total - wanted)
    place = int(np.searchsorted(ends, cut, side="right"))
    start = int(ends[place - 1]) if place else 0
    limit = start if total - start <= total / 2 else cut
    begins = ends - lengths
    counts: np.ndarray = np.clip(limit - begins, 0, lengths)
    return counts
