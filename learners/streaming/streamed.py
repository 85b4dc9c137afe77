"""A streamed data set: the sequences of a shard by number, a few megabytes of its files in memory at a time.

Responsible for turning what ``order`` says into tokens: groups of pieces are read and tokenised in a thread while steps go
on, the group that follows before it is needed. How many sequences a group gives is promised before it is read, from its
bytes and from how many tokens a sample of the source has for each; so a group with fewer repeats some, and of one with more
some are left out, other ones in each epoch. Both are counted, and a few in a hundred. The sample is the same for all
islands, so that they agree. Which documents are held out follows from their content (``held_out``): whoever trains leaves
these out wherever they are, and whoever measures reads pieces until it has found enough of them.

What an island holds: two groups of each source (of each shard that it goes on with, after a resumption), as tokens of one,
two or four bytes. What it has read when it begins: the sizes of all files, the sample, one group of each source; all of a
source that is small; and what is measured of files that a source reserves.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import ceil, inf
from typing import Any

import numpy as np

from learners import data_lanes
from learners.corpus import joined, sequences_at, surprise, text_bytes
from learners.data import Draw, origins
from learners.held_out import HeldOutBatch
from learners.streaming.documents import ATTEMPTS, COMPRESSED, PAUSE_S, Reader, Unreadable, kind_of
from learners.streaming.held_out import HeldOut, digest, smallest
from learners.streaming.order import Group, Mixture, Pieces, ShardOfSource, cut, key, listed
from learners.tokenizer import Tokenizer
from orchestrator.core.vocabulary import DataFlaws
from orchestrator.errors import AtollError, ConfigurationError, InfrastructureError, first_line
from orchestrator.roots import AllowedRoots, data_bytes, shown

SAMPLED_PIECES, SAMPLED_PIECES_MAX = 3, 16
"""Of each kind of file of a source: the first ones, and more where there is no text in these."""
SMALL_BYTES = 8 << 20
"""A source of no more, as stored, is looked through for documents to hold out."""
SEARCHED_BYTES = 256 << 20
"""So far a source is searched for documents that are held out by ratio."""
TOKEN_BYTES_MAX = 8
"""Of hardly any text a token has more, on average."""
SOURCE_SEQUENCES_MIN = 4
"""Held out of a source with a small weight, so that its loss says something."""
LOOKERS = 16
READERS = 2

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Files:
    """Files by their paths, cut into ``pieces``, whose numbers are listed in ``order``."""

    paths: tuple[str, ...]
    sizes: tuple[int, ...]
    pieces: Pieces
    order: np.ndarray

    @property
    def byte_count(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True, slots=True)
class Source:
    """``reserved`` are files that are held out whole. ``tokens`` are those that each piece is thought to train with."""

    name: str
    weight: float
    reader: Reader
    files: Files
    reserved: Files | None
    tokens: np.ndarray
    token_counts: np.ndarray


class Streamed:
    """The ``sources`` of a specification's ``data`` section, as plain data. Nothing is read before it is needed."""

    def __init__(self, spec: Mapping[str, Any], roots: AllowedRoots, tokenizer: Tokenizer) -> None:
        self._spec, self._roots, self._tokenizer = spec, roots, tokenizer
        self._length = spec["data"]["sequence_length"]
        self._unreadable = Unreadable(spec["data"]["unreadable_max"])
        self._promises = _Promises()
        self._chosen: dict[str, frozenset[int]] = {}

    def flaws(self) -> DataFlaws:
        """What was not read as it lies in the files, so far."""
        repeated, omitted = self._promises.repeated, self._promises.omitted
        return DataFlaws(len(self._unreadable.reasons), repeated, omitted, len(self._unreadable.cut))

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
        shares = [self._share(source) for source in self._located]
        windows = [(len(tokens) - 1) // self._length for tokens, _ in self._measured]
        size = min(batch_max, *shares, *windows)
        batches = []
        for source, (tokens, bytes_per_token), share, most in zip(
            self._located, self._measured, shares, windows, strict=True
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

    def _share(self, source: Source) -> int:
        """How many held-out sequences of this source are to be measured."""
        wanted: int = self._spec["evaluation"]["sequences"]
        total = sum(source.weight for source in self._located)
        return max(SOURCE_SEQUENCES_MIN, ceil(wanted * source.weight / total))

    # ── what is held out ──────────────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def _measured(self) -> list[tuple[np.ndarray, float]]:
        """Of each source the tokens to measure on, and their bytes for each of them."""
        return [self._measured_of(source) for source in self._located]

    def _measured_of(self, source: Source) -> tuple[np.ndarray, float]:
        documents = self._held_out_documents(source)
        tokens = joined(self._tokenizer, documents)
        if len(tokens) <= self._length:
            detail = (
                f"data.sources: what is held out of {source.name} has {len(tokens)} tokens, fewer than one sequence of "
                f"{self._length + 1}."
            )
            remedy = "Name files in held_out of its source, raise data.held_out_ratio, or lower data.sequence_length."
            raise ConfigurationError(detail=f"{detail} {remedy}")
        return tokens, text_bytes(documents) / len(tokens)

    def _held_out_documents(self, source: Source) -> list[bytes]:
        """What is measured of a source, the same for whoever looks: enough for its share, if there is so much."""
        if source.reserved is not None:
            return self._enough(source, self._documents_of(source, source.reserved))
        if self._is_small(source):
            chosen = self._smallest(source)
            return [text for text in self._documents_of(source, source.files) if digest(text) in chosen]
        documents = (
            text for text in self._documents_of(source, source.files, SEARCHED_BYTES) if self._by_ratio.has(text)
        )
        return self._enough(source, documents)

    def _enough(self, source: Source, documents: Iterator[bytes]) -> list[bytes]:
        """As many of these documents as give a source's share of held-out sequences."""
        taken, token_count, wanted = list[bytes](), 0, self._share(source) * self._length
        for document in documents:
            taken.append(document)
            token_count += len(self._tokenizer.encode([document])[0]) + 1
            if token_count > wanted:
                break
        return taken

    @cached_property
    def _by_ratio(self) -> HeldOut:
        every_source_reserves = all(source.reserved is not None for source in self._located)
        return HeldOut.of_ratio(0.0 if every_source_reserves else self._spec["data"]["held_out_ratio"])

    @cached_property
    def _held_out(self) -> HeldOut:
        """What no island trains on. It is the same for all of them."""
        reserved = set[int]()
        for source in self._located:
            if source.reserved is not None:
                small = source.reserved.byte_count <= SMALL_BYTES
                whole = self._documents_of(source, source.reserved) if small else self._held_out_documents(source)
                reserved.update(map(digest, whole))
            elif self._is_small(source):
                reserved.update(self._smallest(source))
        return replace(self._by_ratio, reserved=frozenset(reserved))

    def _is_small(self, source: Source) -> bool:
        return source.files.byte_count <= SMALL_BYTES

    def _smallest(self, source: Source) -> frozenset[int]:
        """The digests of the documents that are held out of a small source: its ratio, and at least enough to measure."""
        if source.name not in self._chosen:
            sizes = {digest(text): len(text) for text in self._documents_of(source, source.files)}
            by_ratio = self._spec["data"]["held_out_ratio"] * sum(sizes.values())
            self._chosen[source.name] = smallest(sizes, max(by_ratio, TOKEN_BYTES_MAX * (self._length + 1)))
        return self._chosen[source.name]

    def _documents_of(self, source: Source, files: Files, bytes_max: float = inf) -> Iterator[bytes]:
        """The documents of files, piece by piece in their order, as far as so many bytes of them."""
        read = 0
        for piece in files.order:
            if read >= bytes_max:
                return
            read += int(files.pieces.size[piece])
            yield from self._documents(source, files, int(piece))

    # ── what there is ─────────────────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def _located(self) -> list[Source]:
        """The sources as the sizes of their files say; nothing is read for it."""
        return [self._located_one(section) for section in self._spec["data"]["sources"]]

    def _located_one(self, section: Mapping[str, Any]) -> Source:
        name, reserved = section["name"], section.get("held_out") or ()
        files = self._files(section["files"], name, "training")
        return Source(
            name,
            section["weight"],
            Reader(self._roots, section["text_field"], self._unreadable),
            files,
            self._files(reserved, name, "held out") if reserved else None,
            np.zeros(len(files.pieces), np.int64),
            np.zeros(self._tokenizer.vocabulary_size, np.int64),
        )

    def _files(self, paths: Sequence[str], name: str, what: str) -> Files:
        with ThreadPoolExecutor(LOOKERS) as lookers:
            sizes = tuple(lookers.map(self._size, paths))
        if not any(sizes):
            detail = f"data.sources: the files of {name} ({what}) are empty."
            raise ConfigurationError(detail=f"{detail} Name others, or leave the source out.")
        pieces = cut(sizes)
        return Files(tuple(paths), sizes, pieces, listed(pieces, name, what))

    @cached_property
    def _sources(self) -> list[Source]:
        """The sources with how much text each piece is thought to have, by a sample of each kind of file."""
        for source in self._located:
            pieces, order = source.files.pieces, source.files.order
            kinds = np.array([_stored_as(path) for path in source.files.paths])[pieces.file]
            for kind in sorted(set(kinds)):
                token_count, byte_count = self._sample(source, order[kinds[order] == kind])
                source.tokens[kinds == kind] = pieces.size[kinds == kind] * token_count // byte_count
        return self._located

    def _sample(self, source: Source, pieces: np.ndarray) -> tuple[int, int]:
        """Tokens, and bytes as stored, of the first of these pieces. Their tokens are counted."""
        token_count = byte_count = 0
        for looked_at, piece in enumerate(pieces[:SAMPLED_PIECES_MAX]):
            if looked_at >= SAMPLED_PIECES and token_count:
                break
            tokens = joined(self._tokenizer, self._training_documents(source, int(piece)))
            source.token_counts[:] += np.bincount(tokens, minlength=len(source.token_counts))
            token_count += len(tokens) + 1
            byte_count += int(source.files.pieces.size[piece])
        if token_count <= min(len(pieces), SAMPLED_PIECES_MAX):
            detail = f"data.sources: the first pieces of {source.name} have no text to train on."
            if unreadable := list(self._unreadable.reasons.items()):
                (path, _), reason = unreadable[0]
                detail += f" {len(unreadable):,} records and pieces cannot be read; of {shown(path)}: {reason}."
            raise ConfigurationError(
                detail=f"{detail} Look at its files, at text_field, and at how much of them is held out."
            )
        return token_count, byte_count

    def _size(self, path: str) -> int:
        """Raises ConfigurationError for a file that is not there, and InfrastructureError where a store does not say."""
        for attempt in range(ATTEMPTS):
            try:
                return data_bytes(self._roots, path)
            except AtollError:
                raise
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
                raise _not_here(path, error) from error
            except Exception as error:  # whatever a store's library raises
                if "://" not in path:
                    raise _not_here(path, error) from error
                if attempt + 1 == ATTEMPTS:
                    detail = (
                        f"data.sources: {shown(path)} cannot be looked at: {type(error).__name__}: {first_line(error)}."
                    )
                    raise InfrastructureError(detail=detail) from error
                time.sleep(PAUSE_S * (attempt + 1))
        raise AssertionError("the last attempt returns or raises")

    def _shards(self, shard: int, count: int) -> list[ShardOfSource]:
        """What a shard has of each source."""
        seed, shards = self._spec["seed"], []
        for source in self._sources:
            mine = source.files.order[shard::count]
            by = key(seed, shard, source.name)
            shards.append(ShardOfSource(mine, source.files.pieces.size[mine], source.tokens[mine], self._length, by))
        return shards

    def _require_enough(self, count: int) -> None:
        """Every shard has a sequence of each source: else the job is refused, and not only the island whose shard it is."""
        for source in self._sources:
            least = min(int(source.tokens[source.files.order[shard::count]].sum()) for shard in range(count))
            if least < self._length:
                raise ConfigurationError(
                    detail=f"data.sources: {source.name} has {len(source.files.order)} pieces of text, which do not give "
                    f"each of {count} islands a sequence of {self._length} tokens. Add text, or lower data.sequence_length."
                )

    def _tokens_of(self, source_index: int, group: Group) -> np.ndarray:
        """The tokens of a group. Raises as ``Reader.documents``; UnreadableData too where no text is left of all of it."""
        source = self._sources[source_index]
        documents = [document for piece in group.pieces for document in self._training_documents(source, piece)]
        tokens = joined(self._tokenizer, documents)
        sequence_count = (len(tokens) - 1) // self._length
        self._promises.kept(source.name, group, sequence_count)
        if len(tokens) <= self._length:  # hardly anything of it can be read
            tokens = np.resize(tokens if len(tokens) else [self._tokenizer.separator], self._length + 1)
        return tokens

    def _training_documents(self, source: Source, piece: int) -> list[bytes]:
        return [text for text in self._documents(source, source.files, piece) if not self._held_out.has(text)]

    def _documents(self, source: Source, files: Files, piece: int) -> list[bytes]:
        pieces, file = files.pieces, int(files.pieces.file[piece])
        number, count = int(pieces.number[piece]), int(pieces.count[piece])
        return source.reader.documents(files.paths[file], number, count, files.sizes[file])


class _Promises:
    """How many sequences groups have given more and fewer than was promised of them. For all threads of an island."""

    def __init__(self) -> None:
        self.repeated = self.omitted = 0
        self._lock = threading.Lock()

    def kept(self, name: str, group: Group, sequence_count: int) -> None:
        repeated, omitted = max(0, group.quota - sequence_count), max(0, sequence_count - group.quota)
        with self._lock:
            self.repeated += repeated
            self.omitted += omitted
        log.info(
            "%s, group %d: %d sequences of %d were promised; %d come twice, %d not at all",
            name,
            group.number,
            group.quota,
            sequence_count,
            repeated,
            omitted,
        )


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


def _not_here(path: str, error: Exception) -> ConfigurationError:
    reason = getattr(error, "strerror", None) or first_line(error) or type(error).__name__
    detail = f"data.sources: {shown(path)} cannot be read here ({reason})."
    return ConfigurationError(detail=f"{detail} It must exist on every node.")
