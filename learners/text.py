"""What a trainer needs of the text that its job trains on: batches by number, held-out sequences, a loss to beat.

The one thing through which a trainer reaches data; it knows of no devices, of no steps and of no islands' lives. Nothing is
read before it is needed, and then it is shared by the shards, the held-out sequences and the unigram loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from learners import corpus, data
from learners.contract import HeldOutLoss
from learners.held_out import measure


class Text:
    """The text of a job specification's ``data`` section, as plain data; ``spec["roots"]`` says what may be read."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._spec = spec

    def draw(self, shard_index: int, shard_count: int) -> data.Draw:
        """How to draw the batches of a shard. Raises ConfigurationError where the text is too little for so many."""
        return data.shard_batches(self._corpus, self._spec, shard_index, shard_count)

    def union_draw(self, shard_count: int) -> data.Draw:
        """How to draw what all shards together draw, in their order: for the data-parallel baseline."""
        return data.union_batches(self._corpus, self._spec, shard_count)

    @cached_property
    def held_out(self) -> np.ndarray:
        """(sequences, sequence_length + 1) int32."""
        count = self._spec["evaluation"]["sequences"]
        return corpus.held_out_sequences(self._corpus, count, self._spec["data"]["sequence_length"])

    def held_out_batches(self, batch_max: int) -> list[np.ndarray]:
        """The held-out sequences in batches of one shape, of at most ``batch_max`` sequences."""
        batch = next(size for size in range(batch_max, 0, -1) if len(self.held_out) % size == 0)
        return np.split(self.held_out, len(self.held_out) // batch)

    def measure(self, loss_of: Callable[[np.ndarray], float], batch_max: int, limit_s: float) -> HeldOutLoss:
        """The held-out loss, of the first batches where all of them would take more than ``limit_s`` seconds."""
        batches = self.held_out_batches(batch_max)
        return measure(batches, len(batches[0]), loss_of, limit_s)

    def unigram_loss(self) -> float:
        """Nats per token, on the held-out sequences, of the training text's token frequencies."""
        return corpus.unigram_loss(self._corpus, self.held_out)

    @cached_property
    def _corpus(self) -> corpus.Corpus:
        return corpus.load(self._spec["data"], self._spec.get("roots", corpus.NOWHERE))
