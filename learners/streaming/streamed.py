"""A streamed data set: the sequences of a shard by number, a few megabytes of its files in memory at a time.

Responsible for turning what ``order`` says into tokens: groups of pieces are read and tokenised in a thread while steps go
on, the group that follows before it is needed. How many sequences a group gives is promised before it is read, from its
bytes and from how many tokens a sample of the source has for each; so a group with fewer repeats some, and of one with more
some are left out, other ones in each epoch. Both are counted, and a few in a hundred. The sample is the same for all
islands, so that they agree.

What an island holds: two groups of each source (of each shard that it goes on with, after a resumption), as tokens of one,
two or four bytes. What it has read when it begins: the sizes of all files, the sample, and one group of each source.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from math import ceil
from typing import Any

import numpy as np

from learners import data_lanes
from learners.corpus import joined, sequences_at, surprise, text_bytes
from learners.data import Draw, origins
from learners.held_out import HeldOutBatch
from learners.streaming.documents import COMPRESSED, Reader, Unreadable, kind_of
from learners.streaming.order import Group, Mixture, Pieces, ShardOfSource, cut, key, split
from learners.tokenizer import Tokenizer
from orchestrator.errors import ConfigurationError, first_line
from orchestrator.roots import AllowedRoots, data_bytes, shown

SAMPLED_PIECES, SAMPLED_PIECES_MAX = 3, 16
"""Of each kind of file of a source: the first ones, and more where there is no text in these."""
HELD_OUT_PIECES = 4
SOURCE_SEQUENCES_MIN = 4
"""Held out of a source with a small weight, so that its loss says something."""
LOOKERS = 16
READERS = 2

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Source:
    """``training`` and ``held_out`` are numbers of pieces; ``tokens`` those that each piece is thought to have."""

    name: str
    weight: float
    paths: tuple[str, ...]
    reader: Reader
    pieces: Pieces
    training: np.ndarray
    held_out: np.ndarray
    tokens: np.ndarray
    token_counts: np.ndarray


class Streamed:
    """The ``sources`` of a specification's ``data`` section, as plain data. Nothing is read before it is needed."""

    def __init__(self, spec: Mapping[str, Any], roots: AllowedRoots, tokenizer: Tokenizer) -> None:
        self._spec, self._roots, self._tokenizer = spec, roots, tokenizer
        self._length = spec["data"]["sequence_length"]
        self._unreadable = Unreadable(spec["data"]["unreadable_max"])

    def draw(self, shard_index: int, shard_count: int) -> Draw:
        """How to draw a shard's batches. Raises ConfigurationError where there is too little for so many shards."""
        cut_into = data_lanes.first_count(self._spec.get("legs", ()), shard_count)
        shards, seed = cache(self._shards), self._spec["seed"]
        groups = _Groups(self._tokens_of)

        @cache
        def mixture(shard: int) -> Mixture:
            return Mixture([source.weight for source in self._sources], key("mixture", seed, shard))

        self._require_enough(cut_into)

        def sequence(shard: int, number: int) -> np.ndarray:
            source, rank = mixture(shard).source(number)
            of_source = shards(shard, cut_into)[source]
            group, within = of_source.place(rank)
            tokens = groups.tokens(shard, source, of_source, group)
            available = max(1, (len(tokens) - 1) // self._length)
            first = (within + group.epoch * group.quota) % available * self._length
            return tokens[first : first + self._length + 1]

        def draw(number: int) -> np.ndarray:
            drawn = [sequence(*origin) for origin in origins(self._spec, shard_index, shard_count, number)]
            return np.stack(drawn).astype(np.int32)

        return draw

    def held_out_batches(self, batch_max: int) -> list[HeldOutBatch]:
        """Batches of one source each, all of one shape; any number of the first ones has about each source's share."""
        wanted, total = self._spec["evaluation"]["sequences"], sum(source.weight for source in self._sources)
        shares = [max(SOURCE_SEQUENCES_MIN, ceil(wanted * source.weight / total)) for source in self._sources]
        windows = [(len(tokens) - 1) // self._length for tokens, _ in self._held_out]
        size = min(batch_max, *shares, *windows)
        batches = []
        for source, (tokens, bytes_per_token), share, most in zip(
            self._sources, self._held_out, shares, windows, strict=True
        ):
            count = min(ceil(share / size), most // size)
            picked = np.arange(count * size) * most // (count * size)
            for index, sequences in enumerate(np.split(sequences_at(tokens, picked, self._length), count)):
                batches.append(((index + 0.5) / count, HeldOutBatch(sequences, source.name, bytes_per_token)))
        return [batch for _, batch in sorted(batches, key=lambda placed: placed[0])]

    def unigram_loss(self) -> float:
        """Nats per token on the held-out sequences, by how often each token is in the sample."""
        counts = np.sum([source.token_counts for source in self._sources], axis=0)
        return surprise(counts, np.concatenate([batch.tokens for batch in self.held_out_batches(1)]))

    @cached_property
    def _held_out(self) -> list[tuple[np.ndarray, float]]:
        """Of each source held-out tokens, and their bytes for each of them."""
        return [self._held_out_of(source) for source in self._sources]

    def _held_out_of(self, source: Source) -> tuple[np.ndarray, float]:
        documents: list[bytes] = []
        for piece in source.held_out[:HELD_OUT_PIECES]:
            documents += self._documents(source, int(piece))
        tokens = joined(self._tokenizer, documents)
        if len(tokens) <= self._length:
            raise ConfigurationError(
                detail=f"data.sources: what is held out of {source.name} has {len(tokens)} tokens, fewer than one sequence "
                f"of {self._length + 1}. Add text, lower data.sequence_length, or raise data.held_out_ratio."
            )
        return tokens, text_bytes(documents) / len(tokens)

    @cached_property
    def _sources(self) -> list[Source]:
        return [self._source(section) for section in self._spec["data"]["sources"]]

    def _source(self, section: Mapping[str, Any]) -> Source:
        """A source, known by the sizes of its files and a sample of each kind of them."""
        paths, reader = tuple(section["files"]), Reader(self._roots, section["text_field"], self._unreadable)
        with ThreadPoolExecutor(LOOKERS) as lookers:
            pieces = cut(list(lookers.map(self._size, paths)))
        training, held_out = split(pieces, section["name"], self._spec["data"]["held_out_ratio"])
        if not len(training):
            raise ConfigurationError(
                detail=f"data.sources: {section['name']} has {pieces.size.sum():,} bytes, too few to hold some out and "
                "train on the rest. Add files, or put them to another source."
            )
        counts = np.zeros(self._tokenizer.vocabulary_size, np.int64)
        source = Source(
            section["name"],
            section["weight"],
            paths,
            reader,
            pieces,
            training,
            held_out,
            np.zeros(len(pieces), np.int64),
            counts,
        )
        kinds = np.array([_stored_as(path) for path in paths])[pieces.file]
        for kind in sorted(set(kinds[training])):
            of_kind = training[kinds[training] == kind]
            token_count, byte_count = self._sample(source, of_kind)
            source.tokens[kinds == kind] = pieces.size[kinds == kind] * token_count // byte_count
        return source

    def _sample(self, source: Source, pieces: np.ndarray) -> tuple[int, int]:
        """Tokens, and bytes as stored, of the first of these pieces. Their tokens are counted."""
        token_count = byte_count = 0
        for looked_at, piece in enumerate(pieces[:SAMPLED_PIECES_MAX]):
            if looked_at >= SAMPLED_PIECES and token_count:
                break
            tokens = joined(self._tokenizer, self._documents(source, int(piece)))
            source.token_counts[:] += np.bincount(tokens, minlength=len(source.token_counts))
            token_count += len(tokens) + 1
            byte_count += int(source.pieces.size[piece])
        if token_count <= min(len(pieces), SAMPLED_PIECES_MAX):
            detail = f"data.sources: the first pieces of {source.name} have no text."
            raise ConfigurationError(detail=f"{detail} Look at its files, and at text_field.")
        return token_count, byte_count

    def _size(self, path: str) -> int:
        try:
            return data_bytes(self._roots, path)
        except OSError as error:
            detail = f"data.sources: {shown(path)} cannot be read here ({error.strerror or first_line(error)})."
            raise ConfigurationError(detail=f"{detail} It must exist on every node.") from error

    def _shards(self, shard: int, count: int) -> list[ShardOfSource]:
        """What a shard has of each source."""
        seed, shards = self._spec["seed"], []
        for source in self._sources:
            mine = source.training[shard::count]
            by = key(seed, shard, source.name)
            shards.append(ShardOfSource(mine, source.pieces.size[mine], source.tokens[mine], self._length, by))
        return shards

    def _require_enough(self, count: int) -> None:
        """Every shard has a sequence of each source: else the job is refused, and not only the island whose shard it is."""
        for source in self._sources:
            least = min(int(source.tokens[source.training[shard::count]].sum()) for shard in range(count))
            if least < self._length:
                raise ConfigurationError(
                    detail=f"data.sources: {source.name} has {len(source.training)} pieces of text, which do not give each "
                    f"of {count} islands a sequence of {self._length} tokens. Add text, or lower data.sequence_length."
                )

    def _tokens_of(self, source_index: int, group: Group) -> np.ndarray:
        """The tokens of a group. Raises as ``Reader.documents``; UnreadableData too where no text is left of all of it."""
        source = self._sources[source_index]
        documents = [document for piece in group.pieces for document in self._documents(source, piece)]
        tokens = joined(self._tokenizer, documents)
        sequence_count = (len(tokens) - 1) // self._length
        log.info(
            "%s, group %d: %d sequences of %d were promised; %d come twice, %d not at all",
            source.name,
            group.number,
            group.quota,
            sequence_count,
            max(0, group.quota - sequence_count),
            max(0, sequence_count - group.quota),
        )
        if len(tokens) <= self._length:  # hardly anything of it can be read
            tokens = np.resize(tokens if len(tokens) else [self._tokenizer.separator], self._length + 1)
        return tokens

    def _documents(self, source: Source, piece: int) -> list[bytes]:
        pieces = source.pieces
        path = source.paths[pieces.file[piece]]
        return source.reader.documents(path, int(pieces.number[piece]), int(pieces.count[piece]))


class _Groups:
    """The tokens of each shard's and source's present group, and of the next one, which a thread reads meanwhile."""

    def __init__(self, read: Callable[[int, Group], np.ndarray]) -> None:
        self._read = read
        self._threads = ThreadPoolExecutor(READERS, "text")
        self._present: dict[tuple[int, int], int] = {}
        self._held: dict[tuple[int, int], dict[int, Future[np.ndarray]]] = {}

    def tokens(self, shard: int, source: int, of_source: ShardOfSource, group: Group) -> np.ndarray:
        whose = shard, source
        if self._present.get(whose) != group.number:
            following, _ = of_source.place(group.following)
            before = self._held.get(whose, {})
            self._held[whose] = {
                wanted.number: before.get(wanted.number) or self._threads.submit(self._read, source, wanted)
                for wanted in (group, following)
            }
            for number in before.keys() - self._held[whose].keys():
                before[number].cancel()
            self._present[whose] = group.number
        return self._held[whose][group.number].result()


def _stored_as(path: str) -> str:
    """Files of one source with the same have about as many tokens for each byte."""
    return kind_of(path) + next((suffix for suffix in COMPRESSED if path.endswith(suffix)), "")
