"""A streamed data set: the sequences of a shard by number, a few megabytes of its files in memory at a time.

Responsible for turning what ``order`` says into tokens: groups of pieces are read and tokenised in a thread while steps go
on, the group that follows before it is needed. How many sequences a group gives is promised before it is read: from its
bytes, in a small source those of its text and in a large one those that are stored, and from how many tokens a sample of the
source has for each; so a group with fewer repeats some, and of one with more some are left out, other ones in each epoch.
Both are counted, and a few in a hundred. The sample is the same for all islands, so that they agree. With an index
(``data.index``) nothing is promised: tokens were counted, the last sequence of a group goes on into the next one, and in an
epoch every sequence of a shard comes once.

Which documents are held out follows from their content (``held_out``): whoever trains leaves these out wherever they are,
and whoever measures reads pieces until it has found enough of them.

What an island holds: two groups of each source (of each shard that it goes on with, after a resumption), as tokens of one,
two or four bytes. What it has read when it begins: the sizes of all files, the sample or index, one group of each source;
all of a source that is small; and what is measured of files that a source reserves.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
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
from learners.streaming import index
from learners.streaming.documents import COMPRESSED, Reader, Unreadable, kind_of
from learners.streaming.files import HELD_OUT, TRAINING, Files, located
from learners.streaming.held_out import HeldOut, digest, smallest
from learners.streaming.order import Group, Mixture, ShardOfSource, key
from learners.tokenizer import Tokenizer
from orchestrator.core.vocabulary import DataFlaws
from orchestrator.data_index import ratio_held_out
from orchestrator.errors import ConfigurationError
from orchestrator.roots import AllowedRoots, shown

SAMPLED_PIECES, SAMPLED_PIECES_MAX = 3, 16
"""Of each kind of file of a source: the first ones, and more where there is no text in these."""
SEARCHED_BYTES = 256 << 20
"""So far a source is searched for documents that are held out by ratio."""
TOKEN_BYTES_MAX = 8
"""Of hardly any text a token has more, on average."""
SOURCE_SEQUENCES_MIN = 4
"""Held out of a source with a small weight, so that its loss says something."""
READERS = 2
LENDERS_MAX = 16
"""Groups that are looked at for a sequence in the place of one that has none."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Source:
    """``reserved`` are files that are held out whole."""

    name: str
    weight: float
    reader: Reader
    files: Files
    reserved: Files | None


@dataclass(frozen=True, slots=True)
class Sample:
    """What a source's first pieces say of it: ``tokens`` that each piece is thought to have, and how often each token is."""

    tokens: np.ndarray
    token_counts: np.ndarray


class Streamed:
    """The ``sources`` of a specification's ``data`` section, as plain data. Nothing is read before it is needed."""

    def __init__(self, spec: Mapping[str, Any], roots: AllowedRoots, tokenizer: Tokenizer) -> None:
        self._spec, self._roots, self._tokenizer = spec, roots, tokenizer
        self._length = spec["data"]["sequence_length"]
        self._unreadable = Unreadable(spec["data"]["unreadable_max"])
        self._is_exact = spec["data"]["index"] is not None
        self._promises = _Promises()
        self._listed: dict[str, list[list[tuple[int, int]]]] = {}

    def flaws(self) -> DataFlaws:
        """What was not read as it lies in the files, so far."""
        repeated, omitted = self._promises.repeated, self._promises.omitted
        return DataFlaws(len(self._unreadable.reasons), repeated, omitted, len(self._unreadable.cut))

    def draw(self, shard_index: int, shard_count: int) -> Draw:
        """How to draw a shard's batches.

        Raises ConfigurationError where there is too little for so many shards, or an index does not fit.
        """
        cut_into = data_lanes.first_count(self._spec.get("legs", ()), shard_count)
        shards, seed = cache(self._shards), self._spec["seed"]
        groups = _Groups(self._tokens_of)

        @cache
        def mixture(shard: int) -> Mixture:
            return Mixture([source.weight for source in self._located], key("mixture", seed, shard))

        self._require_enough(cut_into)

        def sequence(shard: int, number: int) -> np.ndarray:
            source, rank = mixture(shard).source(number)
            of_source = shards(shard, cut_into)[source]
            group, within = of_source.place(rank)
            if self._is_exact:
                first = group.offset + within * self._length
                return groups.window(shard, source, of_source, group, first, self._length + 1)
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
            for number, sequences in enumerate(np.split(sequences_at(tokens, picked, self._length), count)):
                batches.append(((number + 0.5) / count, HeldOutBatch(sequences, source.name, bytes_per_token)))
        return [batch for _, batch in sorted(batches, key=lambda placed: placed[0])]

    def unigram_loss(self) -> float:
        """Nats per token on the held-out sequences, by how often each token is in the sample."""
        counts = np.sum([sample.token_counts for sample in self._samples], axis=0)
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
        if source.files.is_small:
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
        return HeldOut.of_ratio(ratio_held_out(self._spec["data"]))

    @cached_property
    def _held_out(self) -> HeldOut:
        """What no island trains on. It is the same for all of them."""
        reserved = set[int]()
        for source in self._located:
            if source.reserved is not None:
                small = source.reserved.is_small
                whole = self._documents_of(source, source.reserved) if small else self._held_out_documents(source)
                reserved.update(map(digest, whole))
            elif source.files.is_small:
                reserved.update(self._smallest(source))
        return replace(self._by_ratio, reserved=frozenset(reserved))

    def _smallest(self, source: Source) -> frozenset[int]:
        """The digests of the documents that are held out of a small source: its ratio, and at least enough to measure."""
        sizes = dict(one for piece in self._listing(source) for one in piece)
        by_ratio = self._spec["data"]["held_out_ratio"] * sum(sizes.values())
        return smallest(sizes, max(by_ratio, TOKEN_BYTES_MAX * (self._length + 1)))

    def _listing(self, source: Source) -> list[list[tuple[int, int]]]:
        """Of each piece of a small source its documents, by digest, with their bytes. All of it is read, once."""
        if source.name not in self._listed:
            files, listing = source.files, list[list[tuple[int, int]]]()
            counts = np.bincount(files.pieces.file, minlength=len(files.paths))
            for path, size, count in zip(files.paths, files.sizes, counts.tolist(), strict=True):
                if count:
                    pieces = source.reader.pieces(path, count, size)
                    listing += [[(digest(text), len(text)) for text in texts] for _, texts in pieces]
            self._listed[source.name] = listing
        return self._listed[source.name]

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
        return Source(
            name,
            section["weight"],
            Reader(self._roots, section["text_field"], self._unreadable),
            located(self._roots, section["files"], name, TRAINING),
            located(self._roots, reserved, name, HELD_OUT) if reserved else None,
        )

    @cached_property
    def _tokens(self) -> list[np.ndarray]:
        """Of each source the tokens that each piece trains with: counted by an index, or what a sample lets expect."""
        if not self._is_exact:
            return [sample.tokens for sample in self._samples]
        files = {source.name: source.files for source in self._located}
        counted = index.load(self._spec["data"], self._roots, self._tokenizer.digest, files)
        return [counted[source.name].without(self._held_out.reserved) for source in self._located]

    @cached_property
    def _samples(self) -> list[Sample]:
        return [self._sample(source) for source in self._located]

    def _sample(self, source: Source) -> Sample:
        """By a sample of each kind of file. Its pieces are read whole, as those of an island are."""
        pieces, sizes = source.files.pieces, self._sizes(source)
        order = source.files.order[sizes[source.files.order] > 0]
        sample = Sample(np.zeros(len(pieces), np.int64), np.zeros(self._tokenizer.vocabulary_size, np.int64))
        kinds = np.array([_stored_as(path) for path in source.files.paths])[pieces.file]
        for kind in sorted(set(kinds[order])) or kinds[:1]:
            token_count, byte_count = self._counted(source, order[kinds[order] == kind], sizes, sample.token_counts)
            sample.tokens[kinds == kind] = sizes[kinds == kind] * token_count // byte_count
        return sample

    def _sizes(self, source: Source) -> np.ndarray:
        """What a piece's tokens are in proportion to: the bytes of its text, with one for each end, or as it is stored."""
        if not source.files.is_small:
            return source.files.pieces.size
        listing, held_out = self._listing(source), self._held_out
        trained = [sum(size + 1 for number, size in piece if not held_out.has_digest(number)) for piece in listing]
        return np.array(trained, np.int64)

    def _counted(
        self, source: Source, pieces: np.ndarray, sizes: np.ndarray, token_counts: np.ndarray
    ) -> tuple[int, int]:
        """Tokens, and ``sizes``, of the first of these pieces. Their tokens are counted."""
        token_count = byte_count = 0
        for looked_at, piece in enumerate(pieces[:SAMPLED_PIECES_MAX]):
            if looked_at >= SAMPLED_PIECES and token_count > looked_at:  # one of each is its end
                break
            tokens = joined(self._tokenizer, self._training_documents(source, int(piece)))
            token_counts += np.bincount(tokens, minlength=len(token_counts))
            token_count += len(tokens) + 1
            byte_count += int(sizes[piece])
        if token_count <= min(len(pieces), SAMPLED_PIECES_MAX):
            detail = f"data.sources: the first pieces of {source.name} have no text to train on."
            if unreadable := list(self._unreadable.reasons.items()):
                (path, _), reason = unreadable[0]
                detail += f" {len(unreadable):,} records and pieces cannot be read; of {shown(path)}: {reason}."
            raise ConfigurationError(
                detail=f"{detail} Look at its files, at text_field, and at how much of them is held out."
            )
        return token_count, byte_count

    def _shards(self, shard: int, count: int) -> list[ShardOfSource]:
        """What a shard has of each source."""
        seed, shards = self._spec["seed"], []
        for source, tokens in zip(self._located, self._tokens, strict=True):
            mine = source.files.order[shard::count]
            by, sizes = key(seed, shard, source.name), source.files.pieces.size[mine]
            shards.append(ShardOfSource(mine, sizes, tokens[mine], self._length, by, self._is_exact))
        return shards

    def _require_enough(self, count: int) -> None:
        """Every shard has a sequence of each source: else the job is refused, and not only the island whose shard it is."""
        for source, tokens in zip(self._located, self._tokens, strict=True):
            least = min(int(tokens[source.files.order[shard::count]].sum()) for shard in range(count))
            if least < self._length + self._is_exact:
                raise ConfigurationError(
                    detail=f"data.sources: {source.name} has {len(source.files.order)} pieces of text, which do not give "
                    f"each of {count} islands a sequence of {self._length} tokens. Add text or files, or lower "
                    "data.sequence_length; a line without end, and a little that is compressed, is all of one piece."
                )

    def _tokens_of(self, source_index: int, of_source: ShardOfSource, group: Group) -> np.ndarray:
        """The tokens of a group, or, where hardly any of it can be read, of the next one that has a sequence.

        Raises as ``Reader.documents``; ConfigurationError where there is none in all of an epoch, or far ahead.
        """
        source = self._located[source_index]
        if self._is_exact:
            return np.concatenate([self._exact_tokens(source_index, piece) for piece in group.pieces])
        tokens = self._read(source, group)
        self._promises.kept(source.name, group, (len(tokens) - 1) // self._length)
        lender = group
        for _ in range(LENDERS_MAX):
            if len(tokens) > self._length or lender.epoch > group.epoch + 1:
                break
            lender, _ = of_source.place(lender.following)
            tokens = self._read(source, lender)
        if len(tokens) <= self._length:
            raise ConfigurationError(
                detail=f"data.sources: {source.name} has no sequence of {self._length} tokens in an island's part of it, "
                "as far as that can be read. Add text, or lower data.unreadable_max, which says what cannot be read."
            )
        return tokens

    def _read(self, source: Source, group: Group) -> np.ndarray:
        return joined(
            self._tokenizer,
            [document for piece in group.pieces for document in self._training_documents(source, piece)],
        )

    def _exact_tokens(self, source_index: int, piece: int) -> np.ndarray:
        """The tokens of a piece, the separator behind each document: as many as the index has of it, whatever is there.

        Where that is another number, the piece counts as one that cannot be read, which the job passes over or ends by.
        """
        source, counted = self._located[source_index], int(self._tokens[source_index][piece])
        documents = self._training_documents(source, piece)
        last = np.full(int(bool(documents)), self._tokenizer.separator, self._tokenizer.dtype)
        tokens = np.concatenate([joined(self._tokenizer, documents), last])
        if len(tokens) == counted:
            return tokens
        pieces = source.files.pieces
        path, number, count = source.files.paths[pieces.file[piece]], int(pieces.number[piece]), pieces.count[piece]
        reason = f"it has {len(tokens):,} tokens to train on, and data.index has counted {counted:,}. {index.ANEW}"
        self._unreadable.add(path, -1 - number, f"piece {number + 1} of {count}", reason)
        self._promises.broken(source.name, ceil((counted - len(tokens)) / self._length))
        return np.resize(tokens if len(tokens) else np.array([self._tokenizer.separator], tokens.dtype), counted)

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

    def broken(self, name: str, sequence_count: int) -> None:
        """A piece has so many sequences fewer, if negative more, than an index says."""
        with self._lock:
            self.repeated += max(0, sequence_count)
            self.omitted += max(0, -sequence_count)
        log.warning("%s: a piece has about %d sequences fewer than its index says", name, sequence_count)

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

    def __init__(self, read: Callable[[int, ShardOfSource, Group], np.ndarray]) -> None:
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
                wanted.number: before.get(wanted.number) or self._threads.submit(self._read, source, of_source, wanted)
                for wanted in (group, following)
            }
            for number in before.keys() - self._held[whose].keys():
                before[number].cancel()
            self._present[whose] = group.number
        return self._held[whose][group.number].result()

    def window(
        self, shard: int, source: int, of_source: ShardOfSource, group: Group, first: int, count: int
    ) -> np.ndarray:
        """``count`` tokens from the ``first`` of a group, the last of them from the beginning of the next one."""
        window = self.tokens(shard, source, of_source, group)[first : first + count]
        if len(window) == count:
            return window
        following, _ = of_source.place(group.following)
        more = self._held[shard, source][following.number].result()[: count - len(window)]
        return np.concatenate([window, more])


def _stored_as(path: str) -> str:
    """Files of one source with the same have about as many tokens for each byte."""
    return kind_of(path) + next((suffix for suffix in COMPRESSED if path.endswith(suffix)), "")
