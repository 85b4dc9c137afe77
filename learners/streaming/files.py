"""The files of a source as their sizes say: looked at, and cut into pieces. Nothing of them is read here.

Islands, which read some of the pieces, and whoever counts all of them once for an index, must cut the same way: ``rules``
has another value wherever they would not.
"""

from __future__ import annotations

import gzip
import io
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from learners.streaming import documents, order
from learners.streaming.order import Pieces, cut, listed
from orchestrator.errors import AtollError, ConfigurationError, InfrastructureError, first_line, in_words
from orchestrator.system.roots import AllowedRoots, data_bytes, shown
from orchestrator.text.file_kinds import Compression, Format, kind_of

SMALL_BYTES = 8 << 20
"""Files of no more, as stored, are looked through for documents to hold out."""
ATTEMPTS, PAUSE_S = documents.ATTEMPTS, documents.PAUSE_S
"""To ask a store for a size."""
TRAINING, HELD_OUT = "training", "held out"
"""What files are for."""
LOOKERS = 16
GZIP_BYTES = getattr(gzip, "READ_BUFFER_SIZE", io.DEFAULT_BUFFER_SIZE)
"""That Python's versions read at once."""
VERSION, PLAIN_TEXT = 1, "one document"
"""Of what is in a piece, and of its documents, where no constant tells; and of plain text alone."""


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
    """The files of the source ``name``, ``what`` they are for.

    Raises ConfigurationError for files that are not there, or empty; InfrastructureError where a store does not say.
    """
    with ThreadPoolExecutor(LOOKERS) as lookers:
        sizes = tuple(lookers.map(lambda path: _size(roots, path), paths))
    if not any(sizes):
        detail = f"data.sources: the files of {name} ({what}) are empty."
        raise ConfigurationError(detail=f"{detail} Name others, or leave the source out.")
    pieces = cut(sizes)
    return Files(tuple(paths), sizes, pieces, listed(pieces, name, what))


def rules(paths: Iterable[str]) -> str:
    """A name of the rules by which these files are cut into pieces, and the pieces into documents."""
    every = list(paths)
    constants: tuple[object, ...] = (
        VERSION,
        (order.PIECE_BYTES_MIN, order.PIECE_BYTES_MAX, order.PIECES_WANTED),
        (documents.PIECE_TEXT_MAX, documents.LINE_BYTES_MAX, documents.BLOCK_BYTES, documents.FRAME_BYTES),
        (documents.PASSAGE_BYTES, documents.DOCUMENT_BYTES_MAX),
        SMALL_BYTES,
        # where a line is in a compressed file depends on how much of that is read at once
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
        except Exception as error:  # whatever a store's library raises
            if "://" not in path:
                raise _not_here(path, error) from error
            if attempt + 1 == ATTEMPTS:
                detail = f"data.sources: {shown(path)} cannot be looked at: {in_words(error)}."
                raise InfrastructureError(detail=detail) from error
            time.sleep(PAUSE_S * (attempt + 1))
    raise AssertionError("the last attempt returns or raises")


def _not_here(path: str, error: Exception) -> ConfigurationError:
    reason = getattr(error, "strerror", None) or first_line(error) or type(error).__name__
    detail = f"data.sources: {shown(path)} cannot be read here ({reason})."
    return ConfigurationError(detail=f"{detail} It must exist on every node.")
