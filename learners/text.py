"""What a trainer needs of a job's text: batches by number, held-out sequences, and a unigram loss to compare with.

Trainers reach data only through this module. It knows nothing of devices, steps or the life of islands. The text is either
in memory (``corpus``) or in files that are read when needed (``streaming``). Nothing is read before it is needed; then the
shards, the held-out sequences and the unigram loss share it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Protocol

import numpy as np

from learners import corpus, tokenizer
from learners.contract import HeldOutLoss
from learners.held_out import HeldOutBatch, measure_by_source
from learners.island_spec import Document, IslandSpec
from learners.resharding import Draw
from learners.streaming.documents import Unreadable
from learners.streaming.streamed import Streamed
from learners.streaming.tokens import Tokens
from orchestrator.core.vocabulary import DataFlaws


class Behind(Protocol):
    def draw(self, shard_index: int, shard_count: int) -> Draw: ...

    def held_out_batches(self, batch_max: int) -> list[HeldOutBatch]: ...

    def unigram_loss(self) -> float: ...

    def flaws(self) -> DataFlaws: ...


class Text:
    """The text of a job specification's ``data`` section. Only files below ``spec.roots`` are read.

    Raises ConfigurationError, on construction, if the tokenizer has tokens that a model of ``vocabulary_size`` lacks.
    """

    def __init__(self, spec: IslandSpec | Document, vocabulary_size: int | None = None) -> None:
        spec = IslandSpec.of(spec)
        section = spec.job.data
        own = tokenizer.load(section, spec.roots)
        if vocabulary_size is not None:
            tokenizer.require_fit(own, section, vocabulary_size)
        self._text = _behind(spec, own, vocabulary_size)

    def draw(self, shard_index: int, shard_count: int) -> Draw:
        """Return a function that draws the batches of a shard. Raises ConfigurationError if there is too little text."""
        return self._text.draw(shard_index, shard_count)

    def union_draw(self, shard_count: int) -> Draw:
        """Return a function that draws what all shards together draw: batch k is every shard's batch k, in order.

        The data-parallel baseline uses it to see the same tokens in the same order.
        """
        draws = [self.draw(index, shard_count) for index in range(shard_count)]
        return lambda number: np.concatenate([draw(number) for draw in draws])

    def held_out_batches(self, batch_max: int) -> list[np.ndarray]:
        """Return the held-out sequences in batches of one shape, with at most ``batch_max`` sequences."""
        return [batch.tokens for batch in self._text.held_out_batches(batch_max)]

    def measure(self, loss_of: Callable[[np.ndarray], float], batch_max: int, limit_s: float) -> HeldOutLoss:
        """Return the held-out loss; of the first batches if all would take more than ``limit_s`` seconds."""
        return measure_by_source(self._text.held_out_batches(batch_max), loss_of, limit_s)

    def unigram_loss(self) -> float:
        """Return nats per token, on the held-out sequences, of the training text's token frequencies."""
        return self._text.unigram_loss()

    def flaws(self) -> DataFlaws:
        """Return what could not be read as it is in the files, so far."""
        return self._text.flaws()


def _behind(spec: IslandSpec, own: tokenizer.Tokenizer, vocabulary_size: int | None) -> Behind:
    match spec.job.data.source:
        case "streamed":
            return Streamed(spec, own)
        case "tokens":
            return Tokens(spec, vocabulary_size)
        case _:
            return InMemory(spec, own)


class InMemory:
    """The built-in corpus or ``data.files``, held in memory."""

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
