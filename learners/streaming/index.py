"""The index of a job's data, as its islands use it: what each piece trains with, to the token.

Responsible for refusing an index that does not fit the files, the tokenizer, the rule by which documents are held out, or
the rules by which this build cuts files. Which file it is follows from the specification, as does its digest. Its bytes:
``orchestrator.text.data_index``.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from learners.streaming.files import Files, rules
from orchestrator.errors import ConfigurationError
from orchestrator.system.roots import AllowedRoots, shown
from orchestrator.text import data_index
from orchestrator.text.data_index import FIELD, IndexedSource

ANEW = "Make the index anew with `atoll data index`."


@dataclass(frozen=True, slots=True)
class Counted:
    """Of each piece of a source its tokens, the end of each document counted as one, and its documents: (pieces,) int64.

    Documents that are held out by ratio are in neither. ``listed`` are those that a job may hold out one by one. Tokens
    ``around`` each document are counted with it.
    """

    tokens: np.ndarray
    documents: np.ndarray
    listed_pieces: np.ndarray
    listed_tokens: np.ndarray
    listed_digests: np.ndarray
    around: int = 1

    def without(self, reserved: Set[int]) -> np.ndarray:
        """The tokens of each piece without the documents that have these digests: (pieces,) int64."""
        held_out = np.isin(self.listed_digests, np.fromiter(reserved, np.uint64, len(reserved)))
        tokens, (counts, follows, is_followed, pairs) = self.tokens.copy(), data_index.of_listed(self.listed_tokens)
        # what is left of a document before and behind a part that is held out has a beginning and an end of its own
        saved = counts - self.around * (follows + is_followed)
        np.subtract.at(tokens, self.listed_pieces[held_out], saved[held_out])
        both = held_out & np.append(held_out[1:], False) & pairs
        np.subtract.at(tokens, self.listed_pieces[both], self.around)
        return tokens


def load(
    section: Mapping[str, Any], roots: AllowedRoots, tokenizer: str, files: Mapping[str, Files]
) -> dict[str, Counted]:
    """The numbers of each source, by its name, for a ``data`` section with an index. ``files`` are those of each source.

    ``tokenizer`` is the digest of the job's, or `bytes`.

    Raises ConfigurationError for an index that is damaged, or does not fit; OutsideRoots.
    """
    path, wanted = section["index"], section["index_digest"]
    index, digest = data_index.read(roots, path)
    if wanted not in (None, digest):
        detail = f"{FIELD}: {shown(path)} has the digest {digest} here, and {wanted} where the job was submitted."
        raise ConfigurationError(detail=f"{detail} Every node must have the same file.")
    sizes = {path: size for one in files.values() for path, size in zip(one.paths, one.sizes, strict=True)}
    if problem := data_index.misfit(index, section, tokenizer, sizes.get):
        raise ConfigurationError(detail=str(problem))
    by_name = {}
    for source in section["sources"]:
        indexed = data_index.source_of(index, source)
        assert indexed is not None, "else it does not fit"
        own = files[source["name"]]
        if (indexed.cut_by, indexed.piece_count) != (rules(own.paths), len(own.pieces)):
            detail = (
                f"{FIELD}: {shown(path)} was made by another version of atoll or Python, which cuts files otherwise."
            )
            raise ConfigurationError(detail=f"{detail} {ANEW}")
        by_name[source["name"]] = counted(indexed, data_index.count_around(tokenizer))
    return by_name


def counted(indexed: IndexedSource, around: int = 1) -> Counted:
    """The numbers of one source as arrays; ``around`` each document stand so many tokens.

    Raises ConfigurationError for numbers that cannot be.
    """
    pieces, listed, at = indexed.piece_count, indexed.listed_count, 0
    columns = []
    for count, kind in ((pieces, "<u4"), (pieces, "<u4"), (listed, "<u4"), (listed, "<u4"), (listed, "<u8")):
        columns.append(np.frombuffer(indexed.numbers, kind, count, at))
        at += columns[-1].nbytes
    tokens, documents, listed_pieces, listed_tokens = (column.astype(np.int64) for column in columns[:4])
    if listed and int(listed_pieces.max()) >= pieces:
        raise ConfigurationError(detail=f"{FIELD}: it lists documents of pieces that there are not. {ANEW}")
    numbers = Counted(tokens, documents, listed_pieces, listed_tokens, columns[4], around)
    if np.any(numbers.without(frozenset(numbers.listed_digests.tolist())) < 0):
        raise ConfigurationError(detail=f"{FIELD}: it lists more tokens of a piece than the piece has. {ANEW}")
    return numbers
