"""The text of one source as tokens: how many each piece has, and groups of pieces as an island draws from them.

How many tokens a piece has is said by an index, or counted the first time that somebody asks: for that a piece is read, and
its tokens are held for a while, because the group that it belongs to is usually read next. A piece that has other tokens
when it is read (its file changed, or a store failed) is cut or repeated to the number that was counted, so that no place
behind it moves; the group marks where.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from learners.streaming.token_counts import TokenCounts

HELD_BYTES_MAX = 32 << 20
"""Tokens of a source's pieces that were counted and not yet read."""

Read = Callable[[Sequence[int]], Iterator[tuple[int, np.ndarray]]]
"""The tokens of pieces, each with its number, a separator behind each document."""


@dataclass(frozen=True, slots=True)
class Window:
    """Neighbouring tokens. ``is_repeated`` says that they begin in a range that repeats others; ``omitted`` tokens are
    missing among them.
    """

    tokens: np.ndarray
    is_repeated: bool = False
    omitted: int = 0


@dataclass(frozen=True, slots=True)
class GroupText:
    """The tokens of a group. ``repeats`` are ranges of tokens that repeat others; ``omissions`` are places and how many
    tokens are missing there.
    """

    tokens: np.ndarray
    repeats: tuple[tuple[int, int], ...] = ()
    omissions: tuple[tuple[int, int], ...] = ()

    def window(self, first: int, count: int) -> Window:
        """``count`` tokens from ``first``, or as many as there are."""
        is_repeated = any(start <= first < end for start, end in self.repeats)
        omitted = sum(tokens for at, tokens in self.omissions if first < at <= first + count)
        return Window(self.tokens[first : first + count], is_repeated, omitted)


class SourceTokens:
    """For all threads of an island. ``misread`` is called with a piece, its counted tokens and those that it has."""

    def __init__(
        self, counts: np.ndarray | TokenCounts, read: Read, separator: int, misread: Callable[[int, int, int], None]
    ) -> None:
        self._counts, self._read, self._separator, self._misread = counts, read, separator, misread
        self._held: OrderedDict[int, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, pieces: np.ndarray) -> np.ndarray:
        """How many tokens these pieces have: (pieces,) int64. Raises what reading raises."""
        return self._counts[pieces] if isinstance(self._counts, np.ndarray) else self._counts.of(pieces, self._count)

    def text(self, pieces: Sequence[int]) -> GroupText:
        """The tokens of these pieces, one piece behind the other, as many as were counted. Raises what reading raises."""
        counted = self.of(np.array(pieces, np.int64)).tolist()
        with self._lock:
            texts = {piece: self._held.pop(piece) for piece in pieces if piece in self._held}
        texts.update(self._read([piece for piece in pieces if piece not in texts]))
        parts, repeats, omissions, at = [], list[tuple[int, int]](), list[tuple[int, int]](), 0
        for piece, count in zip(pieces, counted, strict=True):
            tokens = texts[piece]
            if len(tokens) != count:
                self._misread(piece, count, len(tokens))
                if len(tokens) < count:
                    repeats.append((at + len(tokens), at + count))
                else:
                    omissions.append((at + count, len(tokens) - count))
                tokens = np.resize(tokens if len(tokens) else np.array([self._separator], tokens.dtype), count)
            parts.append(tokens)
            at += count
        return GroupText(np.concatenate(parts), tuple(repeats), tuple(omissions))

    def _count(self, pieces: Sequence[int]) -> Iterable[tuple[int, int]]:
        for piece, tokens in self._read(pieces):
            with self._lock:
                self._held[piece] = tokens
                while sum(held.nbytes for held in self._held.values()) > HELD_BYTES_MAX:
                    self._held.popitem(last=False)
            yield piece, len(tokens)
