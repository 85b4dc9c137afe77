"""The files of a source, by their sizes: checked, and cut into pieces; and the index of a job's data. No text is read here.

Islands, which read some of the pieces, and the indexing, which counts all of them once, must cut files in the same way:
``rules`` changes whenever they would not.

An index gives the exact tokens of each piece. It is refused if it does not fit the files, the tokenizer, the rule for
held-out documents, or the rules by which this build cuts files. The specification names the file and its digest. Its format
is in ``orchestrator.text.data_index``.
"""

from __future__ import annotations

import gzip
import io
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from learners.streaming import documents, order
from learners.streaming.order import Pieces, cut, listed
from orchestrator.errors import AtollError, ConfigurationError, InfrastructureError, first_line, in_words
from orchestrator.specification.training_sections import DataSection
from orchestrator.system.roots import AllowedRoots, data_bytes, shown
from orchestrator.text import data_index
from orchestrator.text.data_index import FIELD, IndexedSource
from orchestrator.text.file_kinds import Compression, Format, kind_of

SMALL_BYTES = 8 << 20
"""The documents of a source up to this size, as stored, are all examined for holding out."""
ATTEMPTS, PAUSE_S = documents.ATTEMPTS, documents.PAUSE_S
"""Attempts and pause for a store's answer about a size."""
TRAINING, HELD_OUT = "training", "held out"
"""The two purposes of files."""
LOOKERS = 16
GZIP_BYTES = getattr(gzip, "READ_BUFFER_SIZE", io.DEFAULT_BUFFER_SIZE)
"""The read size of this version of Python."""
VERSION, PLAIN_TEXT = 1, "one document"
"""The version of the cutting rules that no constant shows; and the rules for plain text alone."""
INDEX_ANEW = "Create the index again with `atoll data index`."


@dataclass(frozen=True, slots=True)
class Files:
    """Files by their paths, cut into ``pieces``, whose numbers are listed in ``order``."""

    paths: tuple[str, ...]
    sizes: tuple[int, ...]
    pieces: Pieces
    order: np.ndarray

    @property
    def is_small(self) -> bool:
        return sum(self.sizes) <= SMALL_BYTES


def located(roots: AllowedRoots, paths: Sequence[str], name: str, what: str) -> Files:
    """Return the files of the source ``name``; ``what`` is their purpose.

    Raises ConfigurationError for files that are missing or empty, InfrastructureError if a store does not answer.
    """
    with ThreadPoolExecutor(LOOKERS) as lookers:
        sizes = tuple(lookers.map(lambda path: _size(roots, path), paths))
    if not any(sizes):
        detail = f"data.sources: the files of {name} ({what}) are empty."
        raise ConfigurationError(detail=f"{detail} Name others, or leave the source out.")
    pieces = cut(sizes)
    return Files(tuple(paths), sizes, pieces, listed(pieces, name, what))


def rules(paths: Iterable[str]) -> str:
    """Return a name of the rules by which these files are cut into pieces, and pieces into documents."""
    every = list(paths)
    constants: tuple[object, ...] = (
        VERSION,
        (order.PIECE_BYTES_MIN, order.PIECE_BYTES_MAX, order.PIECES_WANTED),
        (documents.PIECE_TEXT_MAX, documents.LINE_BYTES_MAX, documents.BLOCK_BYTES, documents.FRAME_BYTES),
        (documents.PASSAGE_BYTES, documents.DOCUMENT_BYTES_MAX),
        SMALL_BYTES,
        # in a compressed file, the place of a line depends on how much is read at once
        GZIP_BYTES if any(kind_of(path).compression is Compression.GZIP for path in every) else 0,
    )
    if any(kind_of(path).is_compressed for path in every):
        constants += (documents.EXPANDED_BYTES,)
    if any(kind_of(path).format is Format.TEXT for path in every):
        constants += (PLAIN_TEXT,)
    return blake2b(repr(constants).encode(), digest_size=8).hexdigest()


def _size(roots: AllowedRoots, path: str) -> int:
    for attempt in range(ATTEMPTS):
        try:
            return data_bytes(roots, path)
        except AtollError:
            raise
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
            raise _not_here(path, error) from error
        except Exception as error:  # a store's library may raise anything
            if "://" not in path:
                raise _not_here(path, error) from error
            if attempt + 1 == ATTEMPTS:
                detail = f"data.sources: {shown(path)} cannot be examined: {in_words(error)}."
                raise InfrastructureError(detail=detail) from error
            time.sleep(PAUSE_S * (attempt + 1))
    raise AssertionError("the last attempt returns or raises")


def _not_here(path: str, error: Exception) -> ConfigurationError:
    reason = getattr(error, "strerror", None) or first_line(error) or type(error).__name__
    detail = f"data.sources: {shown(path)} cannot be read here ({reason})."
    return ConfigurationError(detail=f"{detail} It must exist on every node.")


@dataclass(frozen=True, slots=True)
class Counted:
    """The tokens of each piece of a source, including one for each document's end, and its documents: (pieces,) int64.

    Documents that are held out by ratio are excluded. ``listed`` are those that a job may hold out one by one. Tokens
    ``around`` each document are included.
    """

    tokens: np.ndarray
    documents: np.ndarray
    listed_pieces: np.ndarray
    listed_tokens: np.ndarray
    listed_digests: np.ndarray
    around: int = 1

    def without(self, reserved: Set[int]) -> np.ndarray:
        """Return the tokens of each piece without the documents with these digests: (pieces,) int64."""
        held_out = np.isin(self.listed_digests, np.fromiter(reserved, np.uint64, len(reserved)))
        tokens, (counts, follows, is_followed, pairs) = self.tokens.copy(), data_index.of_listed(self.listed_tokens)
        # the rest of a document, before and after a held-out part, has a beginning and an end of its own
        saved = counts - self.around * (follows + is_followed)
        np.subtract.at(tokens, self.listed_pieces[held_out], saved[held_out])
        both = held_out & np.append(held_out[1:], False) & pairs
        np.subtract.at(tokens, self.listed_pieces[both], self.around)
        return tokens


def load_index(
    section: DataSection, roots: AllowedRoots, tokenizer: str, files: Mapping[str, Files]
) -> dict[str, Counted]:
    """Return the counts of each source, by its name, for a ``data`` section with an index.

    ``files`` are those of each source; ``tokenizer`` is the digest of the job's, or `bytes`.

    Raises ConfigurationError for an index that is damaged or does not fit; OutsideRoots.
    """
    path, wanted = section.index, section.index_digest
    assert path is not None, "only a section with an index is asked for one"
    index, digest = data_index.read(roots, path)
    if wanted not in (None, digest):
        detail = f"{FIELD}: {shown(path)} has the digest {digest} here, but {wanted} where the job was submitted."
        raise ConfigurationError(detail=f"{detail} Every node must have the same file.")
    sizes = {path: size for one in files.values() for path, size in zip(one.paths, one.sizes, strict=True)}
    if problem := data_index.misfit(index, section, tokenizer, sizes.get):
        raise ConfigurationError(detail=str(problem))
    by_name = {}
    for source in section.sources:
        indexed = data_index.source_of(index, source)
        assert indexed is not None, "else it does not fit"
        own = files[source.name]
        if (indexed.cut_by, indexed.piece_count) != (rules(own.paths), len(own.pieces)):
            detail = (
                f"{FIELD}: {shown(path)} was created by a version of atoll or Python that cuts files in another way."
            )
            raise ConfigurationError(detail=f"{detail} {INDEX_ANEW}")
        by_name[source.name] = counted(indexed, data_index.count_around(tokenizer))
    return by_name


def counted(indexed: IndexedSource, around: int = 1) -> Counted:
    """Return the counts of one source as arrays. ``around`` is the number of tokens around each document.

    Raises ConfigurationError for impossible counts.
    """
    pieces, listed, at = indexed.piece_count, indexed.listed_count, 0
    columns = []
    for count, kind in ((pieces, "<u4"), (pieces, "<u4"), (listed, "<u4"), (listed, "<u4"), (listed, "<u8")):
        columns.append(np.frombuffer(indexed.numbers, kind, count, at))
        at += columns[-1].nbytes
    tokens, documents, listed_pieces, listed_tokens = (column.astype(np.int64) for column in columns[:4])
    if listed and int(listed_pieces.max()) >= pieces:
        raise ConfigurationError(detail=f"{FIELD}: it lists documents of pieces that do not exist. {INDEX_ANEW}")
    numbers = Counted(tokens, documents, listed_pieces, listed_tokens, columns[4], around)
    if np.any(numbers.without(frozenset(numbers.listed_digests.tolist())) < 0):
        raise ConfigurationError(detail=f"{FIELD}: it lists more tokens of a piece than the piece has. {INDEX_ANEW}")
    return numbers
