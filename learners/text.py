"""What a trainer needs of a job's text: batches by number, held-out sequences, and a unigram loss to compare with.

Trainers reach data only through this module. It knows nothing of devices, steps or the life of islands. The text is in
memory (``corpus``), in files that are read when needed (``streaming``), or behind a function of a user's package
(``OwnSource``). Nothing is read before it is needed; then the shards, the held-out sequences and the unigram loss share it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any, Protocol

import numpy as np

from learners import conversations, corpus, tokenizer
from learners.contract import Batch, HeldOutLoss, stacked
from learners.conversations import batch_of, segmented
from learners.factories import guarded, imported
from learners.held_out import HeldOutBatch, measure_by_source
from learners.island_spec import Document, Draw, IslandSpec, first_count
from learners.streaming.documents import Unreadable
from learners.streaming.order import key, shuffled
from learners.streaming.streamed import Streamed
from learners.streaming.tokens import Tokens
from orchestrator.core.vocabulary import DataFlaws
from orchestrator.errors import ConfigurationError

FREQUENCY_ELEMENTS = 512
"""How many elements of an own source are counted for the unigram loss."""


class Behind(Protocol):
    """``frequencies`` are how often each token is in the training text, or in a sample of it: (tokens,) int64."""

    def draw(self, shard_index: int, shard_count: int) -> Draw: ...

    def held_out_batches(self, batch_max: int) -> list[HeldOutBatch]: ...

    def frequencies(self) -> np.ndarray: ...

    def flaws(self) -> DataFlaws: ...


class Text:
    """The text of a job specification's ``data`` section. Only files below ``spec.roots`` are read.

    Raises ConfigurationError, on construction, if the tokenizer has tokens that a model of ``vocabulary_size`` lacks.
    """

    def __init__(self, spec: IslandSpec | Document, vocabulary_size: int | None = None) -> None:
        spec = IslandSpec.of(spec)
        section = spec.job.data
        own: tokenizer.Tokenizer = tokenizer.load(section, spec.roots)
        if vocabulary_size is not None:
            tokenizer.require_fit(own, section, vocabulary_size)
        if section.has_conversations:
            own = conversations.load(section, spec.roots, own)
        self._text = _behind(spec, own, vocabulary_size)
        self._batch: Callable[[Any], Any] = lambda rows: rows
        if section.intra_document_masking:
            begin_token = None if section.has_tokens or not len(own.beginning) else int(own.beginning[0])
            separator = section.separator if section.has_tokens else own.separator
            self._batch = lambda rows: segmented(rows, separator, begin_token)

    def draw(self, shard_index: int, shard_count: int) -> Draw:
        """Return a function that draws the batches of a shard. Raises ConfigurationError if there is too little text."""
        drawn = self._text.draw(shard_index, shard_count)
        return lambda number: self._batch(drawn(number))

    def union_draw(self, shard_count: int) -> Draw:
        """Return a function that draws what all shards together draw: batch k is every shard's batch k, in order.

        The data-parallel baseline uses it to see the same tokens in the same order.
        """
        draws = [self.draw(index, shard_count) for index in range(shard_count)]
        return lambda number: stacked([draw(number) for draw in draws])

    def held_out_batches(self, batch_max: int) -> list[np.ndarray | Batch]:
        """Return the held-out sequences in batches of one shape, with at most ``batch_max`` sequences."""
        return [batch.tokens for batch in self._held_out(batch_max)]

    def measure(
        self,
        loss_of: Callable[[Any], float],
        batch_max: int,
        limit_s: float,
        weight_of: Callable[[Any], float] | None = None,
    ) -> HeldOutLoss:
        """Return the held-out loss; of the first batches if all would take more than ``limit_s`` seconds.

        ``weight_of`` is for a loss that is no mean over tokens.
        """
        batches = self._held_out(batch_max)
        weights = None if weight_of is None else [weight_of(batch.tokens) for batch in batches]
        return measure_by_source(batches, loss_of, limit_s, weights=weights)

    def unigram_loss(self) -> float:
        """Return nats per token, on the held-out sequences, of the training text's token frequencies."""
        return corpus.surprise(self._text.frequencies(), stacked(self.held_out_batches(1)))

    def flaws(self) -> DataFlaws:
        """Return what could not be read as it is in the files, so far."""
        return self._text.flaws()

    def _held_out(self, batch_max: int) -> list[HeldOutBatch]:
        """Return the held-out sequences as training draws its own: with the same documents, and the same mask."""
        return [replace(batch, tokens=self._batch(batch.tokens)) for batch in self._text.held_out_batches(batch_max)]


def _behind(spec: IslandSpec, own: tokenizer.Tokenizer, vocabulary_size: int | None) -> Behind:
    match spec.job.data.source:
        case "streamed":
            return Streamed(spec, own)
        case "tokens":
            return Tokens(spec, vocabulary_size)
        case source if ":" in source:
            return OwnSource(spec, vocabulary_size)
        case _:
            return InMemory(spec, own)


class OwnSource:
    """An object with ``__len__`` and ``__getitem__`` from a user's function: element i is one sequence, always the same.

    A part of the elements, chosen by the seed, is held out. The others are dealt to the shards for the whole job, and each
    shard draws its own in another order in every epoch. Only what is drawn is read.
    """

    def __init__(self, spec: IslandSpec, vocabulary_size: int | None) -> None:
        self._spec, self._data, self._seed = spec, spec.job.data, spec.job.seed
        self._limit = vocabulary_size or spec.job.vocabulary_size or 1 << 31
        self._name = f"data.source {self._data.source!r}"
        self._orders = lru_cache(maxsize=4)(lambda shard, epoch, count: shuffled(count, key(self._seed, shard, epoch)))

    def draw(self, shard_index: int, shard_count: int) -> Draw:
        cut_into = first_count(self._spec.resumptions, shard_count)
        training = self._split[1]
        if len(training) < cut_into:
            detail = f"{self._name} has {len(training):,} elements to train on, too few for {cut_into} islands."
            raise ConfigurationError(detail=f"{detail} Add elements, or use fewer islands.")

        def sequence(shard: int, number: int) -> np.ndarray:
            mine = training[shard::cut_into]
            epoch, within = divmod(number, len(mine))
            return self._element(int(mine[self._orders(shard, epoch, len(mine))[within]]))

        return corpus.draw_of(sequence, self._spec, shard_index, shard_count)

    def held_out_batches(self, batch_max: int) -> list[HeldOutBatch]:
        held_out = self._split[0][: self._spec.job.evaluation.sequences]
        sequences = np.stack([self._element(int(one)) for one in held_out])
        size = next(size for size in range(batch_max, 0, -1) if len(sequences) % size == 0)
        return [HeldOutBatch(batch, "", None) for batch in np.split(sequences, len(sequences) // size)]

    def frequencies(self) -> np.ndarray:
        first = [self._element(int(one)) for one in self._split[1][:FREQUENCY_ELEMENTS]]
        return np.bincount(np.concatenate(first), minlength=self._limit if self._limit < 1 << 31 else 0)

    def flaws(self) -> DataFlaws:
        return DataFlaws(0)

    @cached_property
    def _object(self) -> Any:
        make = guarded(self._name, imported("data.source", self._data.source))
        data = make(settings=self._data.settings) if self._data.settings else make()
        if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
            detail = f"{self._name} returns an object of type {type(data).__name__} without __len__ and __getitem__."
            raise ConfigurationError(detail=f"{detail} Return a sequence, such as a Grain RandomAccessDataSource.")
        return data

    @cached_property
    def _split(self) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of the elements that are held out, and of the others."""
        count = guarded(f"len of {self._name}", len)(self._object)
        if not 2 <= count < 1 << 31:
            detail = f"{self._name} has {count:,} elements."
            raise ConfigurationError(detail=f"{detail} It needs at least 2, and less than 2³¹.")
        order = shuffled(count, key("held out", self._seed))
        held_out = min(count // 2, max(1, round(self._data.held_out_ratio * count)))
        return order[:held_out], order[held_out:]

    def _element(self, number: int) -> np.ndarray:
        """Return an element: (sequence_length + 1,) int32. Raises ConfigurationError if it is anything else."""
        element = guarded(f"element {number:,} of {self._name}", lambda: np.asarray(self._object[number]))()
        length = self._data.sequence_length + 1
        if element.shape != (length,) or element.dtype.kind not in "iu":
            detail = f"element {number:,} of {self._name} has the shape {element.shape} and the dtype {element.dtype}"
            raise ConfigurationError(detail=f"{detail}. Return {length:,} integers: data.sequence_length + 1.")
        if int(element.min()) < 0 or int(element.max()) >= self._limit:
            detail = f"element {number:,} of {self._name} has tokens from {element.min()} to {element.max()}, but the "
            remedy = "Set model.vocabulary_size to the tokenizer's."
            raise ConfigurationError(detail=f"{detail}model's vocabulary has {self._limit:,}. {remedy}")
        tokens: np.ndarray = element.astype(np.int32)
        return tokens


class InMemory:
    """The built-in corpus or ``data.files``, held in memory."""

    def __init__(self, spec: IslandSpec, tokens: tokenizer.Tokenizer) -> None:
        self._unreadable = Unreadable(spec.job.data.unreadable_max)
        self._spec, self._tokenizer = spec, conversations.counting_in(tokens, self._unreadable)

    def draw(self, shard_index: int, shard_count: int) -> Draw:
        drawn = corpus.shard_batches(self._corpus, self._spec, shard_index, shard_count)
        return (lambda number: batch_of(drawn(number))) if self._corpus.has_rows else drawn

    def held_out_batches(self, batch_max: int) -> list[HeldOutBatch]:
        size = next(size for size in range(batch_max, 0, -1) if len(self._held_out) % size == 0)
        batches = np.split(self._held_out, len(self._held_out) // size)
        per_token, has_rows = self._corpus.held_out_bytes_per_token, self._corpus.has_rows
        return [HeldOutBatch(batch_of(batch) if has_rows else batch, "", per_token) for batch in batches]

    def flaws(self) -> DataFlaws:
        return DataFlaws(len(self._unreadable.reasons), sources=self._unreadable.by_source())

    def frequencies(self) -> np.ndarray:
        return corpus.frequencies(self._corpus)

    @cached_property
    def _held_out(self) -> np.ndarray:
        job = self._spec.job
        return corpus.held_out_sequences(self._corpus, job.evaluation.sequences, job.data.sequence_length)

    @cached_property
    def _corpus(self) -> corpus.Corpus:
        return corpus.load(self._spec.job.data, self._spec.roots, self._tokenizer, self._unreadable)
