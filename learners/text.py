"""What a trainer needs of the text that its job trains on: batches by number, held-out sequences, a loss to beat.

The one thing through which a trainer reaches data; it knows of no devices, of no steps and of no islands' lives. Behind it
is either a corpus in memory (``corpus``) or files that are read as they are needed (``streaming``). Nothing is read before
it is needed, and then it is shared by the shards, the held-out sequences and the unigram loss.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Protocol

import numpy as np

from learners import corpus, tokenizer
from learners.contract import HeldOutLoss
from learners.data_lanes import Draw
from learners.held_out import HeldOutBatch, measure_by_source
from learners.island_spec import Document, IslandSpec
from learners.streaming.documents import Unreadable
from learners.streaming.streamed import Streamed
from orchestrator.core.vocabulary import DataFlaws


class Behind(Protocol):
    def draw(self, shard_index: int, shard_count: int) -> Draw: ...

    def held_out_batches(self, batch_max: int) -> list[HeldOutBatch]: ...

    def unigram_loss(self) -> float: ...

    def flaws(self) -> DataFlaws: ...


class Text:
    """The text of a job specification's ``data`` section; ``spec.roots`` says which files may be read.

    Raises ConfigurationError, when it is made, for a tokenizer with tokens that a model of ``vocabulary_size`` has not.
    """

    def __init__(self, spec: IslandSpec | Document, vocabulary_size: int | None = None) -> None:
        spec = IslandSpec.of(spec)
        section = spec.job.data
        own = tokenizer.load(section, spec.roots)
        if vocabulary_size is not None:
            tokenizer.require_fit(own, section, vocabulary_size)
        self._text: Behind = Streamed(spec, own) if section.source == "streamed" else InMemory(spec, own)

    def draw(self, shard_index: int, shard_count: int) -> Draw:
        """How to draw the batches of a shard. Raises ConfigurationError where the text is too little for so many."""
        return self._text.draw(shard_index, shard_count)

    def union_draw(self, shard_count: int) -> Draw:
        """How to draw what all shards together draw: batch k holds every shard's batch k, in the shards' order.

        For the data-parallel baseline, which so sees the same tokens in the same order.
        """
        draws = [self.draw(index, shard_count) for index in range(shard_count)]
        return lambda number: np.concatenate([draw(number) for draw in draws])

    def held_out_batches(self, batch_max: int) -> list[np.ndarray]:
        """The held-out sequences in batches of one shape, of at most ``batch_max`` sequences."""
        return [batch.tokens for batch in self._text.held_out_batches(batch_max)]

    def measure(self, loss_of: Callable[[np.ndarray], float], batch_max: int, limit_s: float) -> HeldOutLoss:
        """The held-out loss, of the first batches where all of them would take more than ``limit_s`` seconds."""
        return measure_by_source(self._text.held_out_batches(batch_max), loss_of, limit_s)

    def unigram_loss(self) -> float:
        """Nats per token, on the held-out sequences, of the training text's token frequencies."""
        return self._text.unigram_loss()

    def flaws(self) -> DataFlaws:
        """What was not read as it lies in the files, so far."""
        return self._text.flaws()


class InMemory:
    """The built-in corpus, or ``data.files``, whole."""

    def __init__(self, spec: IslandSpec, tokens: tokenizer.Tokenizer) -> None:
        self._spec, self._tokenizer = spec, tokens
        self._unreadable = Unreadable(spec.job.data.unreadable_max)

    def draw(self, shard_index: int, shard_count: int) -> Draw:
        return corpus.shard_batches(self._corpus, self._spec, shard_index, shard_count)

    def held_out_batches(self, batch_max: int) -> list[HeldOutBatch]:
        size = next(size for size in range(batch_max, 0, -1) if len(self._held_out) % size == 0)
        batches = np.split(self._held_out, len(self._held_out) // size)
        return [HeldOutBatch(batch, "", self._corpus.held_out_bytes_per_token) for batch in batches]

    def flaws(self) -> DataFlaws:
        return DataFlaws(len(self._unreadable.reasons), sources=self._unreadable.by_source())

    def unigram_loss(self) -> float:
        return corpus.unigram_loss(self._corpus, self._held_out)

    @cached_property
    def _held_out(self) -> np.ndarray:
        job = self._spec.job
        return corpus.held_out_sequences(self._corpus, job.evaluation.sequences, job.data.sequence_length)

    @cached_property
    def _corpus(self) -> corpus.Corpus:
        return corpus.load(self._spec.job.data, self._spec.roots, self._tokenizer, self._unreadable)
