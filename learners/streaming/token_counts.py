"""The tokens of a source's pieces, counted as an island comes to them, and kept on the node for its next life.

    piece tokens crc32\\n      a line for each piece, of all islands of the node; what is damaged is passed over

The numbers follow from the files, the tokenizer and what is held out, which the name of the file is a digest of. So every
island counts the same, and the file only saves time: without it an island that begins again reads the pieces that its
shard has drawn. Responsible for numbers; who reads the pieces is ``streamed``.
"""

from __future__ import annotations

import logging
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np

UNKNOWN = -1

log = logging.getLogger(__name__)

LINE_BYTES, LINES_PER_PIECE = 32, 16
"""Read back at most: islands of one node that count the same piece write a line each."""
WRITTEN_TOGETHER = 64
MANY = 256

Count = Callable[[Sequence[int]], Iterable[tuple[int, int]]]
"""The tokens of pieces, each with its number. They are read for it."""


class TokenCounts:
    """The counts of one source of ``piece_count`` pieces, for all threads of an island. ``path`` is None to keep nothing."""

    def __init__(self, piece_count: int, path: Path | None) -> None:
        self._path = path
        self._known = np.full(piece_count, UNKNOWN, np.int64)
        self._lock = threading.Lock()
        self._read_back()

    def of(self, pieces: np.ndarray, count: Count) -> np.ndarray:
        """The tokens of these pieces: (pieces,) int64. Those not known yet are counted. Raises what ``count`` raises."""
        missing = pieces[self._known[pieces] == UNKNOWN].tolist()
        counted = list[tuple[int, int]]()
        if len(missing) >= MANY:
            log.info("%d pieces are read to count their tokens, before the next sequence is drawn", len(missing))
        try:
            for piece, tokens in count(missing) if missing else ():
                if self._known[piece] == UNKNOWN:  # two threads may count the same piece
                    self._known[piece] = tokens
                    counted.append((piece, tokens))
                if len(counted) == WRITTEN_TOGETHER:
                    self._keep(counted)
                    counted.clear()
        finally:
            self._keep(counted)
        tokens_of: np.ndarray = self._known[pieces]
        return tokens_of

    def forget(self) -> None:
        """Remove what is kept: the text is not what was counted. This life goes on with its numbers."""
        with self._lock:
            if self._path is not None:
                self._path.unlink(missing_ok=True)
                self._path = None

    def _read_back(self) -> None:
        if self._path is None:
            return
        try:
            with open(self._path, "rb") as file:
                content = file.read(LINES_PER_PIECE * LINE_BYTES * len(self._known))
        except OSError:
            return
        for line in content.splitlines():
            if (numbers := _parsed(line)) is not None and numbers[0] < len(self._known):
                self._known[numbers[0]] = numbers[1]

    def _keep(self, counted: Sequence[tuple[int, int]]) -> None:
        lines = b"".join(_line(piece, tokens) for piece, tokens in counted)
        with self._lock:
            if self._path is None or not lines:
                return
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with open(self._path, "ab", buffering=0) as file:
                    file.write(lines)
            except OSError as error:
                log.info("counts of tokens are not kept in %s: %s", self._path, error.strerror or error)
                self._path = None


def kept_in(folder: Path, *of: object) -> Path:
    """The file for the counts that depend on all of ``of``."""
    return folder / f"{blake2b(repr(of).encode(), digest_size=16).hexdigest()}.tokens"


def _line(piece: int, tokens: int) -> bytes:
    numbers = f"{piece} {tokens}".encode()
    return b"%b %08x\n" % (numbers, zlib.crc32(numbers))


def _parsed(line: bytes) -> tuple[int, int] | None:
    numbers, _, checksum = line.rpartition(b" ")
    if checksum != b"%08x" % zlib.crc32(numbers):
        return None
    piece, _, tokens = numbers.partition(b" ")
    return (int(piece), int(tokens)) if piece.isdigit() and tokens.isdigit() else None
