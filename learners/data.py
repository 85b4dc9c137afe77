"""Batches of one island's shard, by number: deterministic, disjoint between islands, and seekable.

The training split is cut into windows of ``sequence_length`` tokens. Window w belongs to shard w mod n for the whole job;
each shard is shuffled by the job's seed, anew in each epoch; when a job is resumed, ``data_lanes`` deals what is left to its
islands. A stream counts sequences, so that islands may have batches of their own sizes: batch k of an island with batches of
b are its sequences k·b up to (k + 1)·b. A sequence is a function of its number alone (grain's ``MapDataset`` is random
access), so the island's whole position in its data is one integer, and going back to it costs nothing.

This module knows nothing of JAX's devices, of steps or of islands' lives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np

from learners import data_lanes
from learners.contract import batch_size_of
from learners.corpus import Corpus, sequences_at
from orchestrator.errors import ConfigurationError

Draw = Callable[[int], np.ndarray]
"""The batch of a given number: (sequences, sequence_length + 1) int32 tokens."""


def shard_batches(corpus: Corpus, spec: Mapping[str, Any], shard_index: int, shard_count: int) -> Draw:
    """Return how to draw the batches of shard ``shard_index`` of ``shard_count``; ``spec["legs"]`` are earlier resumptions.

    Raises ConfigurationError when the corpus is too small to give every shard one batch.
    """
    # grain takes 0.4 s to import, and the laboratory and the evaluator use this package without drawing batches
    import grain

    length, batch_size = spec["data"]["sequence_length"], batch_size_of(spec)
    window_count = (len(corpus.training) - 1) // length
    resumptions = spec.get("legs", ())
    cut_into = data_lanes.first_count(resumptions, shard_count)
    if window_count // cut_into < batch_size:
        raise ConfigurationError(
            detail=f"data: {window_count} sequences of {length} bytes do not give each of {cut_into} islands one "
            f"batch of {batch_size}. Add text, or lower training.batch_size or data.sequence_length."
        )

    @cache
    def windows(shard: int) -> Any:
        numbered: Any = grain.MapDataset.range(shard, window_count, cut_into)
        return numbered.shuffle(seed=spec["seed"] + shard).repeat()

    def draw(number: int) -> np.ndarray:
        drawn = [windows(shard)[at] for shard, at in origins(spec, shard_index, shard_count, number)]
        return sequences_at(corpus.training, np.array(drawn), length)

    return draw


def origins(spec: Mapping[str, Any], shard_index: int, shard_count: int, number: int) -> list[tuple[int, int]]:
    """Shard and number, as the job was first cut, of each sequence of this island's batch ``number``."""
    resumptions, size = spec.get("legs", ()), batch_size_of(spec)
    return [
        data_lanes.origin(resumptions, shard_index, shard_count, sequence)
        for sequence in range(number * size, (number + 1) * size)
    ]
