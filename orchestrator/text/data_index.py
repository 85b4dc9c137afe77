"""The index of a data set: how many tokens each piece of its files has, counted once for each tokenizer and set of files.

    atoll data index 1\\n
    {"cut_by": …, "held_out_ratio": …, "sources": […], "tokenizer": …}\\n
    of each source in turn, little-endian:
        uint32[pieces]   tokens of a piece, with those around each document: its end, and its beginning where it has one
        uint32[pieces]   its documents
        uint32[listed]   the pieces of the documents that a job may hold out one by one, rising
        uint32[listed]   their tokens, with those around them; in bits 29 to 31 how they lie in a text (``listed``)
        uint64[listed]   their digests
    blake2b-128 of all of this

Nothing in it depends on sequence length, weights or islands. ``misfit`` says why a job cannot use an index; the service
checks that before anything is started, and each island again. ``learners.streaming`` cuts files and makes tokens, by rules
with the name ``cut_by``. Page: docs/reference/data-index.md.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

from orchestrator.errors import ConfigurationError, Problem
from orchestrator.specification.bounds import BYTES
from orchestrator.system.roots import AllowedRoots, open_data, shown

FIELD = "data.index"
MAGIC = b"atoll data index 1\n"
DIGEST_BYTES = 16
FILE_BYTES_MAX = 256 << 20
"""The limit of an index: with 8 bytes for each piece of up to 1 MiB, 20 TB of text stay below it."""
HEADER_BYTES_MAX = 128 << 20
PIECE_BYTES, LISTED_BYTES = 8, 16
MAKE = "Make one with `atoll data index`."
SHOWN_MAX = 3
FOLLOWS, IS_FOLLOWED, IS_NEXT = 29, 30, 31
"""Bits of a listed number of tokens: see ``listed``."""

_COUNTED_WITH = re.compile(r"(bytes|[0-9a-f]{32})(\+begin)?")

Named = tuple[str, int]
"""A file: its name without folders, and its size in bytes. Its folder may differ from node to node."""


class SourceFiles(Protocol):
    """The fields of a source that an index needs: ``specification.sections.SourceSection`` has it."""

    @property
    def name(self) -> str: ...
    @property
    def text_field(self) -> str: ...
    @property
    def files(self) -> Sequence[str]: ...
    @property
    def held_out(self) -> Sequence[str]: ...


class IndexedData(Protocol):
    """The fields of a job's data that an index needs: ``specification.sections.DataSection`` has it."""

    @property
    def index(self) -> str | None: ...
    @property
    def held_out_ratio(self) -> float: ...
    @property
    def sources(self) -> Sequence[SourceFiles]: ...


@dataclass(frozen=True, slots=True)
class IndexedSource:
    """The files of one source, and the numbers of their pieces in the stored form: see the module.

    ``name`` is the source's in the specification; None fits any. ``cut_by`` names the rules of ``learners.streaming``.
    """

    name: str | None
    text_field: str
    files: tuple[Named, ...]
    held_out: tuple[Named, ...]
    cut_by: str
    piece_count: int
    listed_count: int
    numbers: bytes


@dataclass(frozen=True, slots=True)
class DataIndex:
    """``tokenizer`` is what tokens were ``counted_with``; documents that ``held_out_ratio`` holds out are not counted."""

    tokenizer: str
    held_out_ratio: float
    sources: tuple[IndexedSource, ...]

    def content(self) -> bytes:
        """Return the bytes of its file. Equal indexes have equal bytes."""
        sources = [
            {
                "name": source.name,
                "text_field": source.text_field,
                "files": source.files,
                "held_out": source.held_out,
                "cut_by": source.cut_by,
                "pieces": source.piece_count,
                "listed": source.listed_count,
            }
            for source in self.sources
        ]
        header = {
            "tokenizer": self.tokenizer,
            "held_out_ratio": self.held_out_ratio,
            "sources": sources,
        }
        text = json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
        content = b"".join((MAGIC, text, b"\n", *(source.numbers for source in self.sources)))
        return content + blake2b(content, digest_size=DIGEST_BYTES).digest()


def listed(token_count: int, follows: bool, is_followed: bool, is_next: bool) -> int:
    """Encode a document, or a part of one, that a job may hold out: its tokens with those around it, and three bits.

    ``follows``: a part precedes it without an end between them; ``is_followed``: likewise after it; ``is_next``: that
    following part is the next entry.
    """
    return token_count | follows << FOLLOWS | is_followed << IS_FOLLOWED | is_next << IS_NEXT


def of_listed(number: Any) -> tuple[Any, Any, Any, Any]:
    """Decode what ``listed`` returns, of one number or an array of them; the last part as booleans."""
    bits = (number >> FOLLOWS & 1, number >> IS_FOLLOWED & 1, number >> IS_NEXT & 1 == 1)
    return number & (1 << FOLLOWS) - 1, *bits


def numbers(tokens: Sequence[int], documents: Sequence[int], entries: Sequence[tuple[int, int, int]]) -> bytes:
    """Return ``IndexedSource.numbers``. ``entries`` are piece, ``listed`` and digest of each, in the order of pieces."""
    pieces, token_counts, digests = zip(*entries, strict=True) if entries else ((), (), ())
    columns = ((tokens, "I"), (documents, "I"), (pieces, "I"), (token_counts, "I"), (digests, "Q"))
    return b"".join(struct.pack(f"<{len(column)}{kind}", *column) for column, kind in columns)


def read(roots: AllowedRoots, path: str) -> tuple[DataIndex, str]:
    """Read the index at ``path`` and return it with its digest. Raises OutsideRoots, or ConfigurationError if unusable."""
    try:
        with open_data(roots, path) as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        detail = f"{FIELD}: {shown(path)} cannot be read here ({error.strerror or error})."
        raise ConfigurationError(detail=f"{detail} It must exist on every node. {MAKE}") from error
    return parse(content, path)


def parse(content: bytes, path: str) -> tuple[DataIndex, str]:
    """Return the index in these bytes, and its digest. Raises ConfigurationError, naming ``path``."""
    if not content.startswith(MAGIC):
        raise _unusable(path, "is not a data index, or is of another version")
    if len(content) > FILE_BYTES_MAX:
        raise _unusable(path, f"has more than {FILE_BYTES_MAX >> 20} MiB")
    body, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
    if blake2b(body, digest_size=DIGEST_BYTES).digest() != digest:
        raise _unusable(path, "is damaged: its digest does not match")
    end = body.find(b"\n", len(MAGIC), len(MAGIC) + HEADER_BYTES_MAX)
    try:
        header = json.loads(body[len(MAGIC) : end])
        index = DataIndex(
            _tokenizer(header["tokenizer"]),
            _ratio(header["held_out_ratio"]),
            _sources(header["sources"], body[end + 1 :]),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _unusable(path, f"is damaged: it cannot be read ({type(error).__name__})") from error
    return index, digest.hex()


def counted_with(tokenizer: str, begins: bool) -> str:
    """Return the key of an index: the tokenizer's digest or `bytes`, and whether a token precedes each document."""
    return f"{tokenizer}+begin" if begins else tokenizer


def count_around(tokenizer: str) -> int:
    """Return the number of tokens around each document, for a key of ``counted_with``."""
    return 2 if tokenizer.endswith("+begin") else 1


def ratio_held_out(section: IndexedData) -> float:
    """Return the ratio of documents held out by digest: 0 if every source names files for it."""
    reserved = all(source.held_out for source in section.sources)
    return 0.0 if reserved else section.held_out_ratio


def source_of(index: DataIndex, source: SourceFiles) -> IndexedSource | None:
    """Return the index's entry for a source of a specification, or None."""
    return next((one for one in index.sources if one.name in (None, source.name)), None)


def misfit(
    index: DataIndex, section: IndexedData, tokenizer: str, size_of: Callable[[str], int | None]
) -> Problem | None:
    """Return why a job with this ``data`` section cannot use the index; None if it can.

    ``tokenizer`` is the job's key of ``counted_with``. ``size_of`` returns the size of a file of the job if it is known.
    """
    path = shown(section.index)
    if index.tokenizer != tokenizer:
        was, now = map(_in_words, (index.tokenizer, tokenizer))
        return _not_for(f"is {path}, which counts tokens of {was}; the job has {now}.")
    ratio = ratio_held_out(section)
    if index.held_out_ratio != ratio:
        return _not_for(
            f"is {path}, which leaves out {_held_out(index.held_out_ratio)}; the job holds out {_held_out(ratio)}."
        )
    for source in section.sources:
        indexed = source_of(index, source)
        if indexed is None:
            names = ", ".join(shown(one.name) for one in index.sources[:SHOWN_MAX])
            return _not_for(f"is {path}, which has the sources {names}, but not {source.name}.")
        if indexed.text_field != source.text_field:
            return _not_for(
                f"is {path}, where the text of {source.name} is in the field {indexed.text_field!r}; the job's is in "
                f"{source.text_field!r}."
            )
        kinds = (("files", source.files, indexed.files), ("held_out", source.held_out, indexed.held_out))
        for field, own, files in kinds:
            if difference := _difference(own, files, size_of):
                return _not_for(f"is {path}, which has other {field} of {source.name}: {difference}.")
    return None


def _in_words(counted: str) -> str:
    tokenizer, begins, _ = counted.partition("+")
    named = "bytes" if tokenizer == BYTES else f"the tokenizer with the digest {tokenizer}"
    return f"{named} with a token before each document (data.begin_token)" if begins else named


def _difference(paths: Sequence[str], files: Sequence[Named], size_of: Callable[[str], int | None]) -> str:
    if len(paths) != len(files):
        return f"{len(files):,} in the index, {len(paths):,} in the job"
    for number, (path, (name, size)) in enumerate(zip(paths, files, strict=True)):
        if path.rpartition("/")[2] != name:
            return f"number {number} is {shown(name)} in the index, {shown(path)} in the job"
        size_now = size_of(path)
        if size_now not in (None, size):
            return f"{shown(path)} had {size:,} bytes, and now has {size_now:,}"
    return ""


def _not_for(message: str) -> Problem:
    return Problem(FIELD, message, "Make a new index with `atoll data index` and this specification, or leave it out.")


def _held_out(ratio: float) -> str:
    return f"{ratio:g} of the documents (data.held_out_ratio)" if ratio else "only files that its sources name"


def _unusable(path: str, what: str) -> ConfigurationError:
    return ConfigurationError(detail=f"{FIELD}: {shown(path)} {what}. {MAKE}")


def _sources(sections: Any, numbers: bytes) -> tuple[IndexedSource, ...]:
    sources, at = [], 0
    for section in sections:
        pieces, listed = _count(section["pieces"]), _count(section["listed"])
        end = at + PIECE_BYTES * pieces + LISTED_BYTES * listed
        name = None if section["name"] is None else _text(section["name"])
        files, held_out = (tuple(map(_named, section[field])) for field in ("files", "held_out"))
        text_field, cut_by = _text(section["text_field"]), _text(section["cut_by"])
        sources.append(IndexedSource(name, text_field, files, held_out, cut_by, pieces, listed, numbers[at:end]))
        at = end
    if at != len(numbers) or not sources:
        raise ValueError("its numbers are more, or fewer")
    return tuple(sources)


def _named(file: Any) -> Named:
    name, size = file
    return _text(name), _count(size)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("a text was expected")
    return value


def _tokenizer(value: Any) -> str:
    if not _COUNTED_WITH.fullmatch(_text(value)):
        raise ValueError("a digest was expected")
    return _text(value)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("a count was expected")
    return value


def _ratio(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < 1:
        raise ValueError("a ratio was expected")
    return float(value)
