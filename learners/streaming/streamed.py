"""A streamed data set: the sequences of a shard by number, with a few megabytes of its files in memory at a time.

It turns the places that ``order`` computes into tokens. A thread reads and tokenises groups of pieces while steps continue,
always one group ahead. The place of sequence k depends on the tokens of the pieces before it. An index (``data.index``) has
counted all of them. Without one an island counts its own pieces as it reads them, keeps the counts on its node
(``TokenCounts``), and draws the same sequences: each sequence of its shard once per epoch. If it restarts on another node it
has to count what was drawn before. So a shard of more than ``SECTION_BYTES`` is drawn in sections, and the number of
sequences of a section in an epoch is estimated from a sample of the source.

Which documents are held out depends on their content (``held_out``). Training leaves them out wherever they are, and
measuring reads pieces until it has found enough of them.

An island holds two groups of each source (of each shard that it continues, after a resumption), as tokens of one, two or
four bytes, and a few pieces that were counted ahead. Before its first step it reads the sizes of all files; two groups of
each source; small sources as a whole; a sample of a source that is drawn in sections; what is measured of reserved files;
and those pieces drawn before whose tokens are not known on this node.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import ceil, inf
from pathlib import Path

import numpy as np

from learners.contract import Batch
from learners.conversations import Conversations, batch_of, counting_in, learned_tokens
from learners.corpus import (
    Measured,
    average_bytes,
    draw_of,
    joined,
    measured_batches,
    sequences_wanted,
    windows_in,
)
from learners.held_out import HeldOut, HeldOutBatch, digest, smallest
from learners.island_spec import Draw, IslandSpec, first_count
from learners.streaming.counting import GroupText, SourceTokens, TokenCounts, Window, kept_in
from learners.streaming.documents import LINE_BYTES_MAX, Reader, Unreadable, chosen
from learners.streaming.files import HELD_OUT, INDEX_ANEW, TRAINING, Files, load_index, located, rules
from learners.streaming.order import Group, Groups, Mixture, NoSequence, Place, Section, Sections, divided, key
from learners.tokenizer import Tokenizer
from orchestrator.core.vocabulary import DataFlaws
from orchestrator.errors import ConfigurationError
from orchestrator.specification.data_sources import SourceSection
from orchestrator.system.roots import AllowedRoots, open_data, shown
from orchestrator.text.data_index import ratio_held_out
from orchestrator.text.file_kinds import kind_of

SAMPLED_PIECES, SAMPLED_PIECES_MAX, SAMPLED_DOCUMENTS = 3, 32, 2_000
"""The first pieces of each kind of file of a source, and more until they contain this many documents."""
SEARCHED_PIECES_MAX = 1_024
"""The most pieces that are searched for a first document."""
SEARCHED_BYTES = 256 << 20
"""A source is searched up to this size for documents that are held out by ratio."""
TOKEN_BYTES_MAX = 8
"""Hardly any text has more bytes per token on average."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Source:
    """A source and its files. ``reserved`` are files that are held out whole."""

    name: str
    weight: float
    reader: Reader
    files: Files
    reserved: Files | None


@dataclass(frozen=True, slots=True)
class Sample:
    """An estimate from a source's first pieces: the frequency of each token, and the expected ``tokens`` of each piece."""

    tokens: np.ndarray
    token_counts: np.ndarray


class Streamed:
    """The ``sources`` of a specification's ``data`` section. Nothing is read before it is needed."""

    def __init__(self, spec: IslandSpec, tokenizer: Tokenizer) -> None:
        self._spec, self._roots = spec, spec.roots
        self._data, self._seed = spec.job.data, spec.job.seed
        self._length = self._data.sequence_length
        self._unreadable = Unreadable(self._data.unreadable_max)
        self._tokenizer = counting_in(tokenizer, self._unreadable)
        self._has_rows = isinstance(tokenizer, Conversations)
        self._stride, self._overlap = self._length + self._has_rows, int(not self._has_rows)
        self._is_indexed = self._data.index is not None
        self._drawn = _Drawn()
        self._listed: dict[str, list[list[tuple[int, int]]]] = {}

    def flaws(self) -> DataFlaws:
        """Return what could not be read as it is in the files, so far."""
        repeated, omitted = self._drawn.repeated, self._drawn.omitted(self._length)
        unreadable, cut = self._unreadable, len(self._unreadable.cut)
        return DataFlaws(len(unreadable.reasons), repeated, omitted, cut, unreadable.by_source())

    def draw(self, shard_index: int, shard_count: int) -> Draw:
        """Return a function that draws a shard's batches.

        Raises ConfigurationError if there is too little text for the shards, or if an index does not fit; so does a draw.
        """
        cut_into = first_count(self._spec.resumptions, shard_count)
        shards, seed = cache(self.sections), self._seed
        groups = Groups(self._group_text)

        @cache
        def mixture(shard: int) -> Mixture:
            return Mixture([source.weight for source in self._located], key("mixture", seed, shard))

        self._require_enough(cut_into)

        def sequence(shard: int, number: int) -> np.ndarray:
            source, rank = mixture(shard).source(number)
            sections = shards(shard, cut_into)[source]
            place = sections.place(rank)
            section = sections.sections[place.section]
            try:
                group, within = section.place(place.number)
                first = group.offset + within * self._stride
                window = groups.window((shard, source), place.section, source, section, group, first, self._length + 1)
                groups.count_ahead((shard, source), sections, place, rank)
            except NoSequence as error:
                raise self._no_sequence(source, error) from error
            self._drawn.add((shard, source), sections, place, window)
            return window.tokens

        rows = draw_of(sequence, self._spec, shard_index, shard_count)

        def draw(number: int) -> np.ndarray | Batch:
            tokens = rows(number).astype(np.int32)
            return batch_of(tokens) if self._has_rows else tokens

        return draw

    def sections(self, shard: int, count: int) -> list[Sections]:
        """Return what a shard has of each source."""
        return [self._sections(number, shard, count) for number in range(len(self._located))]

    def held_out_batches(self, batch_max: int) -> list[HeldOutBatch]:
        """Return batches of one source each, all of one shape. The first ones have about each source's share."""
        wanted = self._spec.job.evaluation.sequences
        return measured_batches(self._measured, wanted, batch_max, self._length, self._has_rows)

    def frequencies(self) -> np.ndarray:
        """Return how often each token is in the sample: (vocabulary_size,) int64."""
        counts: np.ndarray = np.sum([sample.token_counts for sample in self._samples], axis=0)
        return counts

    def _share(self, source: Source) -> int:
        """Return how many held-out sequences of this source to measure."""
        total = sum(source.weight for source in self._located)
        return sequences_wanted(self._spec.job.evaluation.sequences, source.weight / total)

    # ── held-out text ─────────────────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def _measured(self) -> list[Measured]:
        """The tokens to measure on, by source."""
        return [self._measured_of(source) for source in self._located]

    def _measured_of(self, source: Source) -> Measured:
        documents = self._held_out_documents(source)
        tokens = joined(self._tokenizer, documents)
        if not windows_in(tokens, self._length, self._has_rows):
            detail = (
                f"data.sources: the held-out text of {source.name} has {len(tokens)} tokens, fewer than one sequence of "
                f"{self._length + 1}."
            )
            remedy = "Name files in held_out of its source, raise data.held_out_ratio, or lower data.sequence_length."
            raise ConfigurationError(detail=f"{detail} {remedy}")
        return Measured(source.name, source.weight, tokens, average_bytes(self._tokenizer, documents, tokens))

    def _held_out_documents(self, source: Source) -> list[bytes]:
        """Return the documents to measure of a source, the same in every process: its share, if there is enough."""
        if source.reserved is not None:
            return self._enough(source, self._documents_of(source, source.reserved))
        if source.files.is_small:
            of_small = self._smallest(source)
            return list(chosen(self._documents_of(source, source.files), lambda text: digest(text) in of_small))
        documents = chosen(self._documents_of(source, source.files, SEARCHED_BYTES), self._by_ratio.has)
        return self._enough(source, documents)

    def _enough(self, source: Source, documents: Iterator[bytes]) -> list[bytes]:
        """Return as many of these documents as give a source's share of held-out sequences."""
        taken, token_count, wanted = list[bytes](), 0, self._share(source) * self._length
        for document in documents:
            taken.append(document)
            token_count += len(self._tokenizer.encode([document])[0]) + 1
            if token_count > wanted:
                break
        return taken

    @cached_property
    def _by_ratio(self) -> HeldOut:
        return HeldOut.of_ratio(ratio_held_out(self._data))

    @cached_property
    def _held_out(self) -> HeldOut:
        """The text that no island trains on. It is the same for all of them."""
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
        """Return the digests of documents to hold out of a small source: its ratio, and at least enough to measure."""
        sizes = dict(one for piece in self._listing(source) for one in piece)
        by_ratio = self._data.held_out_ratio * sum(sizes.values())
        return smallest(sizes, max(by_ratio, TOKEN_BYTES_MAX * (self._length + 1)))

    def _listing(self, source: Source) -> list[list[tuple[int, int]]]:
        """Return digest and bytes of each document of a small source, by piece. All of it is read, once."""
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
        """Yield the documents of files, piece by piece in their order, up to this many bytes."""
        read = 0
        for piece in files.order:
            if read >= bytes_max:
                return
            read += int(files.pieces.size[piece])
            yield from self._documents(source, files, int(piece))

    # ── the text and its tokens ───────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def _located(self) -> list[Source]:
        """The sources with their files, by the files' sizes. No text is read."""
        return [self._located_one(section) for section in self._data.sources]

    def _located_one(self, section: SourceSection) -> Source:
        name, reserved = section.name, section.held_out
        return Source(
            name,
            section.weight,
            Reader(self._roots, self._data.record_field(section.text_field), self._unreadable, name),
            located(self._roots, section.files, name, TRAINING),
            located(self._roots, reserved, name, HELD_OUT) if reserved else None,
        )

    @cached_property
    def _tokens(self) -> list[SourceTokens]:
        """Training tokens per piece, by source: counted by an index, or when they are needed."""
        if self._is_indexed:
            files = {source.name: source.files for source in self._located}
            indexed = load_index(self._data, self._roots, self._tokenizer.digest, files)
            counts = [indexed[source.name].without(self._held_out.reserved) for source in self._located]
            return [self._source_tokens(number, counted) for number, counted in enumerate(counts)]
        return [
            self._source_tokens(number, TokenCounts(len(source.files.pieces), self._kept(source)))
            for number, source in enumerate(self._located)
        ]

    def _source_tokens(self, number: int, counts: np.ndarray | TokenCounts) -> SourceTokens:
        source, separator = self._located[number], self._tokenizer.separator

        def misread(piece: int, counted: int, has: int) -> None:
            self._misread(source, piece, counted, has)
            if isinstance(counts, TokenCounts):
                counts.forget()

        return SourceTokens(counts, lambda pieces: self._read(source, pieces), separator, misread)

    def _kept(self, source: Source) -> Path | None:
        """Return the file in which this node keeps the counts of a source; None if there is no place for it."""
        try:
            folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        except RuntimeError:  # the home directory is unknown
            return None
        files, held_out = source.files, self._held_out
        changed = []
        for path in files.paths if folder.is_absolute() else ():
            with suppress(OSError):
                changed.append("" if "://" in path else _changed_at(self._roots, path))
        of = (files.paths, files.sizes, changed, rules(files.paths), source.reader.text_field, self._tokenizer.digest)
        by = (held_out.limit, sorted(held_out.reserved), self._tokenizer.beginning.tolist())
        return kept_in(folder / "atoll" / "tokens", *of, *by) if changed else None

    def _misread(self, source: Source, piece: int, counted: int, has: int) -> None:
        """Count a piece as unreadable if it has other tokens than were counted."""
        pieces = source.files.pieces
        path, number, count = source.files.paths[pieces.file[piece]], int(pieces.number[piece]), pieces.count[piece]
        reason = f"it has {has:,} tokens to train on, but {{}} has counted {counted:,}. {{}}"
        if self._is_indexed:
            reason = reason.format("data.index", INDEX_ANEW)
        else:
            reason = reason.format("this island", "Files must not change while a job reads them")
        self._unreadable.add(path, -1 - number, f"piece {number + 1} of {count}", reason, source.name)

    @cached_property
    def _samples(self) -> list[Sample]:
        return [self._sample(source) for source in self._located]

    def _sample(self, source: Source) -> Sample:
        """Return an estimate from a sample of each kind of file. Pieces of the sample are read whole."""
        pieces, order = source.files.pieces, source.files.order
        sample = Sample(np.zeros(len(pieces), np.int64), np.zeros(self._tokenizer.vocabulary_size, np.int64))
        kinds = np.array([str(kind_of(path)) for path in source.files.paths])[pieces.file]
        for kind in sorted(set(kinds[order])):
            token_count, byte_count = self._sampled(source, order[kinds[order] == kind], sample.token_counts)
            sizes = pieces.size[kinds == kind]
            sample.tokens[kinds == kind] = (sizes * (token_count / byte_count)).astype(np.int64)
        if not np.any(sample.token_counts):
            raise self._no_text(source)
        return sample

    def _sampled(self, source: Source, pieces: np.ndarray, token_counts: np.ndarray) -> tuple[int, int]:
        """Return tokens, and bytes as stored, of the first of these pieces, and add up their token counts."""
        token_count = byte_count = document_count = 0
        for looked_at, piece in enumerate(pieces[:SEARCHED_PIECES_MAX].tolist()):
            pieces_wanted = SAMPLED_PIECES if document_count >= SAMPLED_DOCUMENTS else SAMPLED_PIECES_MAX
            if document_count and looked_at >= pieces_wanted:
                break
            documents = self._training_documents(source, piece)
            tokens = joined(self._tokenizer, documents)
            counted = learned_tokens(tokens) if self._has_rows else tokens
            token_counts += np.bincount(counted, minlength=len(token_counts))
            token_count += len(tokens) + bool(documents)
            byte_count += int(source.files.pieces.size[piece])
            document_count += len(documents)
        return token_count, byte_count

    def _no_text(self, source: Source) -> ConfigurationError:
        detail = f"data.sources: the first pieces of {source.name} have no text to train on."
        return ConfigurationError(
            detail=f"{detail}{self._unread()} Check its files, text_field, how much of them is held out, and "
            f"whether a line is longer than {LINE_BYTES_MAX >> 20} MiB."
        )

    def _no_sequence(self, source_index: int, error: NoSequence) -> ConfigurationError:
        name = self._located[source_index].name
        detail = (
            f"data.sources: an island's part of {name} has {error.token_count:,} tokens, less than one sequence of "
        )
        return ConfigurationError(
            detail=f"{detail}{self._length}.{self._unread()} Add text or files, or lower data.sequence_length. A document "
            "belongs to one island as a whole, and so does a small compressed file."
        )

    def _unread(self) -> str:
        if not (unreadable := list(self._unreadable.reasons.items())):
            return ""
        (path, _), reason = unreadable[0]
        return f" {len(unreadable):,} records and pieces cannot be read; in {shown(path)}: {reason}."

    def _sections(self, number: int, shard: int, count: int) -> Sections:
        source, tokens = self._located[number], self._tokens[number]
        mine = source.files.order[shard::count]
        sizes, by = source.files.pieces.size[mine], key(self._seed, shard, source.name)
        section_of = np.zeros(len(mine), np.int64) if self._is_indexed else divided(sizes)
        section_count = int(section_of.max(initial=0)) + 1
        if section_count == 1:
            return Sections([Section(mine, sizes, tokens.of, self._stride, by, self._overlap)], [], by)
        expected = self._samples[number].tokens[mine]
        sections, quotas = [], []
        for at in range(section_count):
            own = section_of == at
            by_section = key("section", by, at)
            sections.append(Section(mine[own], sizes[own], tokens.of, self._stride, by_section, self._overlap))
            quotas.append(max(1, int(expected[own].sum()) // self._stride))
        log.warning(
            "%s: this island's part has %.1f GiB and no data.index. An epoch of it is estimated to have %d sequences: "
            "some may be drawn twice in an epoch, or only in the next one. Create an index with `atoll data index`",
            source.name,
            int(sizes.sum()) / (1 << 30),
            sum(quotas),
        )
        return Sections(sections, quotas, by)

    def _require_enough(self, count: int) -> None:
        """Check that every shard has a sequence of each source, so that the job is refused and not only one island.

        In a large source without an index, the island finds out by itself.
        """
        for source, tokens in zip(self._located, self._tokens, strict=True):
            shards = [source.files.order[shard::count] for shard in range(count)]
            enough = all(map(len, shards))
            if enough and (self._is_indexed or source.files.is_small):
                enough = all(_has_tokens(tokens, shard, self._length + 1) for shard in shards)
            if not enough:
                if not any(_has_tokens(tokens, shard, 1) for shard in shards):
                    raise self._no_text(source)
                raise ConfigurationError(
                    detail=f"data.sources: {source.name} has {len(source.files.order)} pieces of text, too few to give each "
                    f"of {count} islands a sequence of {self._length} tokens. Add text or files, or lower "
                    "data.sequence_length. A line without an end is one piece, and so is a small compressed file."
                )

    def _group_text(self, source_index: int, group: Group) -> GroupText:
        return self._tokens[source_index].text(group.pieces)

    def _read(self, source: Source, pieces: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the tokens of these pieces, with a separator after each document. A compressed file is decompressed once."""
        by_file = dict[int, list[int]]()
        for piece in pieces:
            by_file.setdefault(int(source.files.pieces.file[piece]), []).append(piece)
        for file, own in by_file.items():
            if len(own) > 1 and kind_of(source.files.paths[file]).is_compressed:
                yield from self._read_in_one_pass(source, file, own)
            else:
                yield from ((piece, self._with_ends(self._training_documents(source, piece))) for piece in own)

    def _read_in_one_pass(self, source: Source, file: int, pieces: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
        files, wanted = source.files, {int(source.files.pieces.number[piece]): piece for piece in pieces}
        count = int(files.pieces.count[pieces[0]])
        for number, documents in source.reader.pieces(files.paths[file], count, files.sizes[file]):
            if number in wanted:
                training = list(chosen(documents, lambda text: not self._held_out.has(text)))
                yield wanted.pop(number), self._with_ends(training)
            if not wanted:
                return

    def _with_ends(self, documents: list[bytes]) -> np.ndarray:
        if self._has_rows:
            return joined(self._tokenizer, documents)
        last = np.full(int(bool(documents)), self._tokenizer.separator, self._tokenizer.dtype)
        return np.concatenate([joined(self._tokenizer, documents), last])

    def _training_documents(self, source: Source, piece: int) -> list[bytes]:
        documents = self._documents(source, source.files, piece)
        return list(chosen(documents, lambda text: not self._held_out.has(text)))

    def _documents(self, source: Source, files: Files, piece: int) -> list[bytes]:
        pieces, file = files.pieces, int(files.pieces.file[piece])
        number, count = int(pieces.number[piece]), int(pieces.count[piece])
        return source.reader.documents(files.paths[file], number, count, files.sizes[file])


class _Drawn:
    """Sequences drawn twice in their epoch, and skipped ones, for all threads of an island.

    ``add`` is called with each sequence that is drawn. A section that gives more sequences than it has repeats its first
    ones. A section that gives fewer leaves some for the next epoch; they count in proportion to what this island drew of it.
    """

    def __init__(self) -> None:
        self.repeated = 0
        self._omitted_tokens, self._left = 0, 0.0
        self._at: dict[tuple[int, int], tuple[Place, int]] = {}
        self._lock = threading.Lock()

    def omitted(self, length: int) -> int:
        """Return the number of sequences of ``length`` that were skipped."""
        return ceil(self._omitted_tokens / length) + round(self._left)

    def add(self, whose: tuple[int, int], sections: Sections, place: Place, window: Window) -> None:
        has = sections.sections[place.section].sequence_count
        again = len(sections.sections) > 1 and has is not None and place.rank >= has
        with self._lock:
            self.repeated += window.is_repeated or again
            self._omitted_tokens += window.omitted
            if len(sections.sections) > 1:
                self._count_left(whose, sections, place)

    def _count_left(self, whose: tuple[int, int], sections: Sections, place: Place) -> None:
        before, count = self._at.get(whose, (place, 0))
        if (before.section, before.epoch) != (place.section, place.epoch):
            section, quota = sections.sections[before.section], sections.quotas[before.section]
            has = section.sequence_count or section.sequence_count_expected
            self._left += max(0, has - quota) * count / quota
            count = 0
        self._at[whose] = (place, count + 1)


def _has_tokens(tokens: SourceTokens, pieces: np.ndarray, least: int) -> bool:
    """Return whether these pieces have this many tokens, counting no more pieces than needed."""
    count = 0
    for piece in pieces:
        count += int(tokens.of(np.array([piece]))[0])
        if count >= least:
            return True
    return False


def _changed_at(roots: AllowedRoots, path: str) -> int:
    with open_data(roots, path) as file:
        return os.fstat(file.fileno()).st_mtime_ns
