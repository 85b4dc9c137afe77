"""Where a sequence of a streamed data set comes from: arithmetic over what is known without reading the text.

A source's files are cut into *pieces* by their sizes alone, which belong to shards for the whole job. In each epoch a
shard's pieces have another order; neighbours in it make *groups* of some megabytes, which are read as a whole. A group has
as many sequences as its bytes promise, or an index has counted, so that the group of sequence k, and its place there, follow
from k: no island has to count what it has read. Sources are mixed in blocks, in each of which every source has its share.

All orders are by a hash of a number and a key (SplitMix64), so that they are the same wherever and whenever they are
computed. Pure. Sources: SplitMix64 is Steele, Lea, Flood, OOPSLA 2014; the rest is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

import numpy as np

PIECE_BYTES_MIN, PIECE_BYTES_MAX = 64 << 10, 1 << 20
PIECES_WANTED = 512
"""Of a source: so many that every shard has some, unless they would be too large or small."""
GROUP_BYTES = 4 << 20
"""What is read, shuffled and held in memory together."""
BLOCK_SEQUENCES = 1024
"""Of a shard: so many sequences hold every source's share."""


def key(*parts: object) -> int:
    """64 bits that depend on all of ``parts``."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def shuffled(count: int, by: int) -> np.ndarray:
    """0 to ``count`` − 1 in the order of the key ``by``: (count,) int64."""
    with np.errstate(over="ignore"):
        mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(by)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return np.argsort(mixed, kind="stable")


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces of a source's files. Piece i is ``number[i]`` of the ``count[i]`` of file ``file[i]``: all (pieces,) int64.

    ``size`` is in bytes as stored. An empty file has none.
    """

    file: np.ndarray
    number: np.ndarray
    count: np.ndarray
    size: np.ndarray

    def __len__(self) -> int:
        return len(self.file)


def cut(sizes: Sequence[int]) -> Pieces:
    """Cut files of these sizes into pieces of about one size."""
    total = np.array(sizes, np.int64)
    wanted = int(np.clip(total.sum() // PIECES_WANTED, PIECE_BYTES_MIN, PIECE_BYTES_MAX))
    counts = -(-total // wanted)
    file = np.repeat(np.arange(len(total)), counts)
    number = np.arange(len(file)) - np.repeat(np.cumsum(counts) - counts, counts)
    count = counts[file]
    size = total[file] * (number + 1) // count - total[file] * number // count
    return Pieces(file, number, count, size)


def listed(pieces: Pieces, name: str, what: str) -> np.ndarray:
    """The numbers of a source's pieces in an order of no meaning, which is the same for every job: (pieces,) int64."""
    return shuffled(len(pieces), key(what, name))


@dataclass(frozen=True, slots=True)
class Group:
    """What is read together: ``pieces`` of the source, in this order. ``number`` counts a shard's groups over all epochs.

    ``quota`` is how many sequences it is to give in this ``epoch``, and ``following`` the first sequence behind them. The
    first one begins with the group's token ``offset``: an exact one before it may belong to the group before.
    """

    number: int
    pieces: tuple[int, ...]
    quota: int
    epoch: int
    following: int
    offset: int = 0


class ShardOfSource:
    """One shard's pieces of one source, epoch after epoch. ``tokens`` are those that each piece is thought to have.

    Where they are ``exact``, and count the end of each document, an epoch's pieces are one text, and its sequences lie in it
    one behind the other: N tokens give (N − 1) // ``length`` of them, which no more than ``length`` tokens are left of. A
    sequence is of the group in which it begins, and the last of a group goes on into the next one.
    """

    def __init__(
        self, pieces: np.ndarray, sizes: np.ndarray, tokens: np.ndarray, length: int, by: int, exact: bool = False
    ) -> None:
        self._pieces, self._sizes, self._tokens, self._length, self._by = pieces, sizes, tokens, length, by
        self._exact = exact
        self.sequence_count = (int(tokens.sum()) - exact) // length
        self._epoch = lru_cache(maxsize=2)(self._ordered)
        self._group = lru_cache(maxsize=2)(self._made)

    def place(self, number: int) -> tuple[Group, int]:
        """The group that sequence ``number`` of this shard and source is of, and its number there."""
        epoch, within = divmod(number, self.sequence_count)
        _, _, sums, _ = self._epoch(epoch)
        index = int(np.searchsorted(sums, within, side="right"))
        group, order = self._group(epoch, index)
        return group, int(order[within - (int(sums[index - 1]) if index else 0)])

    def _made(self, epoch: int, index: int) -> tuple[Group, np.ndarray]:
        """A group, and the order in which its sequences are drawn."""
        order, ends, sums, tokens = self._epoch(epoch)
        first, before = (int(ends[index - 1]), int(sums[index - 1])) if index else (0, 0)
        pieces = tuple(int(piece) for piece in self._pieces[order[first : int(ends[index])]])
        quota = int(sums[index]) - before
        # there are never more groups than pieces, so that a number is of one group only
        number = epoch * len(self._pieces) + index
        offset = before * self._length - int(tokens[index - 1]) if self._exact and index else 0
        group = Group(number, pieces, quota, epoch, epoch * self.sequence_count + int(sums[index]), offset)
        by = key("group", self._by, number)
        # the last sequence needs the next group as well, which is being read meanwhile
        return group, np.append(shuffled(quota - 1, by), quota - 1) if self._exact else shuffled(quota, by)

    def _ordered(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The order of the pieces; behind which piece each group ends; and the sequences and tokens up to there."""
        order = shuffled(len(self._pieces), key("epoch", self._by, epoch))
        groups = (np.cumsum(self._sizes[order]) - 1) // GROUP_BYTES
        ends = np.append(np.flatnonzero(np.diff(groups)) + 1, len(order))
        tokens = np.cumsum(self._tokens[order])
        if not self._exact:
            return order, ends, tokens[ends - 1] // self._length, tokens[ends - 1]
        ends = self._with_sequences(ends, tokens)
        begun = np.minimum(-(-tokens[ends - 1] // self._length), self.sequence_count)
        return order, ends, begun, tokens[ends - 1]

    def _with_sequences(self, ends: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """The ends of groups so large that a sequence begins in each, and that none goes on beyond the next one."""
        total, large, before = int(tokens[-1]), list[int](), 0
        for end in ends[:-1].tolist():
            if tokens[end - 1] - before >= self._length and total - tokens[end - 1] >= 2 * self._length:
                large.append(end)
                before = int(tokens[end - 1])
        return np.array([*large, int(ends[-1])])


class Mixture:
    """Which source each sequence of a shard is of, and its number there, by the sources' weights."""

    def __init__(self, weights: Sequence[float], by: int) -> None:
        self._by = by
        self.counts = _shares(weights, BLOCK_SEQUENCES)
        self._slots = np.repeat(np.arange(len(weights)), self.counts)
        self._block = lru_cache(maxsize=4)(self._ordered)

    def source(self, number: int) -> tuple[int, int]:
        """The source of sequence ``number``, and its number among those of that source."""
        block, within = divmod(number, BLOCK_SEQUENCES)
        sources, ranks = self._block(block)
        source = int(sources[within])
        return source, block * self.counts[source] + int(ranks[within])

    def _ordered(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        sources = self._slots[shuffled(BLOCK_SEQUENCES, key("block", self._by, block))]
        ranks = np.zeros(BLOCK_SEQUENCES, np.int64)
        for source in range(len(self.counts)):
            mine = sources == source
            ranks[mine] = np.arange(int(mine.sum()))
        return sources, ranks


def _shares(weights: Sequence[float], total: int) -> list[int]:
    """Whole numbers with this sum, in proportion to the weights by largest remainders, and none below one."""
    exact = [weight / sum(weights) * total for weight in weights]
    counts = [max(1, int(share)) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: (int(exact[i]) - exact[i], i))
    for source in by_remainder:
        if sum(counts) < total:
            counts[source] += 1
    while sum(counts) > total:
        counts[counts.index(max(counts))] -= 1
    return counts
