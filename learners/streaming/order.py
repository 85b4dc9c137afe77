"""Where a sequence of a streamed data set comes from, and the groups of pieces that an island reads for it.

A source's files are cut into *pieces* by their sizes alone, and each piece belongs to one shard for the whole job. In each
epoch a shard's pieces have another order. Neighbours in it form *groups* of some megabytes, which are read as a whole.
Sequence k begins at token k · length of the epoch's text, so its group and its place there follow from k and the tokens of
the pieces before: those of an index, or those that an island counts as far as it reads. Sources are mixed in blocks, in each
of which every source has its share.

All orders are by a hash of a number and a key (SplitMix64), so they are the same wherever and whenever they are computed.
Sources: SplitMix64 is Steele, Lea, Flood, OOPSLA 2014; the rest is ours.

All of that is pure arithmetic. ``Groups`` holds the group that an island draws from, and the next one, which a thread reads
meanwhile. What a group's text is, is decided in ``streamed``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

import numpy as np

from learners.streaming.counting import GroupText, Window
from orchestrator.specification.bounds import SECTION_BYTES

PIECE_BYTES_MIN, PIECE_BYTES_MAX = 64 << 10, 1 << 20
PIECES_WANTED = 512
"""The target number of a source's pieces, so that every shard has some, unless pieces would be too large or small."""
GROUP_BYTES = 4 << 20
"""The bytes that are read, shuffled and held in memory together."""
BLOCK_SEQUENCES = 1024
"""Every block of this many sequences of a shard holds every source's share."""


TokensOf = Callable[[np.ndarray], np.ndarray]
"""Returns the tokens of pieces by their numbers, including one for each document's end: (pieces,) int64 both ways."""


def key(*parts: object) -> int:
    """Return 64 bits that depend on all of ``parts``."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def shuffled(count: int, by: int) -> np.ndarray:
    """Return 0 to ``count`` − 1 in the order of the key ``by``: (count,) int64."""
    with np.errstate(over="ignore"):
        mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(by)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return np.argsort(mixed, kind="stable")


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces of a source's files. Piece i is ``number[i]`` of the ``count[i]`` of file ``file[i]``: all (pieces,) int64.

    ``size`` is in bytes as stored. An empty file has no pieces.
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
    """Return the numbers of a source's pieces in a random order that is the same for every job: (pieces,) int64."""
    return shuffled(len(pieces), key(what, name))


@dataclass(frozen=True, slots=True)
class Group:
    """Pieces of a source that are read together, in this order. ``number`` counts a section's groups over all epochs.

    ``quota`` sequences begin in the group, in this ``epoch`` of its section; ``following`` is the number of the first
    sequence after them. The first one begins at the group's token ``offset``: the tokens before it end the sequence that
    began in the previous group.
    """

    number: int
    pieces: tuple[int, ...]
    quota: int
    epoch: int
    following: int
    offset: int


class NoSequence(Exception):
    """All pieces were counted, and their ``token_count`` tokens are less than one sequence."""

    def __init__(self, token_count: int) -> None:
        super().__init__(f"{token_count} tokens")
        self.token_count = token_count


@dataclass(frozen=True, slots=True)
class _Layout:
    """The known groups of one epoch.

    Group i ends before piece ``ends[i]`` of ``order``. Up to there ``begun[i]`` sequences begin in ``tokens[i]`` tokens.
    """

    order: np.ndarray
    ends: np.ndarray
    begun: np.ndarray
    tokens: np.ndarray


class Section:
    """Pieces of one source and shard that are drawn as one text, epoch after epoch, every token once in each.

    ``tokens_of`` returns the tokens of pieces, including one for each document's end. It may have to read them, so it is
    called for no more than a sequence needs: in the first epoch for the pieces up to its group and a little beyond. Its
    result for a piece must never change. An epoch's pieces follow each other in an order of its own: N tokens give
    (N − 1) // ``length`` sequences, and at most ``length`` tokens are left over. A sequence belongs to the group in which it
    begins; the last one of a group extends into the next group. With an ``overlap`` of 0, sequences share no token with
    the next one: pieces are rows of conversations, and N tokens give N // ``length``. Thread-safe.
    """

    def __init__(
        self, pieces: np.ndarray, sizes: np.ndarray, tokens_of: TokensOf, length: int, by: int, overlap: int = 1
    ) -> None:
        self._pieces, self._sizes, self._tokens_of, self._length, self._by = pieces, sizes, tokens_of, length, by
        self._overlap = overlap
        self._order = self._ordered(0)
        self._counted = np.zeros(0, np.int64)  # the tokens of the first epoch's pieces, in their order
        self._first = _Layout(*self._order, np.zeros(0, np.int64), np.zeros(0, np.int64))
        self._lock = threading.RLock()
        self._layout = lru_cache(maxsize=2)(self._whole)
        self._group = lru_cache(maxsize=2)(self._made)

    @property
    def sequence_count(self) -> int | None:
        """The sequences of an epoch; None until all pieces are counted."""
        return self._sequences() if self._is_counted else None

    @property
    def sequence_count_expected(self) -> int:
        """The sequences of an epoch, estimated from the pieces that are counted so far."""
        counted_bytes = int(self._sizes[self._order[0][: len(self._counted)]].sum())
        return int(self._counted.sum()) * int(self._sizes.sum()) // max(1, counted_bytes) // self._length

    def place(self, number: int) -> tuple[Group, int]:
        """Return the group of sequence ``number``, and its number there.

        Raises NoSequence, and what ``tokens_of`` raises.
        """
        if not self._is_known(number):  # checked without the lock: draws need not wait for a thread that counts ahead
            with self._lock:
                self._count_up_to(number)
        epoch, within = divmod(number, self._sequences()) if self._is_counted else (0, number)
        begun = self._layout_of(epoch).begun
        index = int(np.searchsorted(begun, within, side="right"))
        group, order = self._group(epoch, index)
        return group, int(order[within - (int(begun[index - 1]) if index else 0)])

    # ── counting ──────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _is_counted(self) -> bool:
        return len(self._counted) == len(self._pieces)

    def _is_known(self, number: int) -> bool:
        if self._is_counted:
            return self._sequences() > 0
        begun = self._first.begun
        return len(begun) > 0 and number < int(begun[-1])

    def _sequences(self) -> int:
        return max(0, int(self._counted.sum()) - self._overlap) // self._length

    def _count_up_to(self, number: int) -> None:
        """Count pieces until the group of sequence ``number`` is known."""
        order, ends = self._order
        while not self._is_known(number) and not self._is_counted:
            before, wanted = len(self._counted), self._pieces_wanted(number)
            more = self._tokens_of(self._pieces[order[before:wanted]])
            self._counted = np.concatenate([self._counted, more])
            tokens = np.cumsum(self._counted)
            large = self._large(ends[ends <= wanted], tokens)
            self._first = _Layout(order, large, -(-tokens[large - 1] // self._length), tokens[large - 1])
        if not self._is_known(number):
            raise NoSequence(int(self._counted.sum()))

    def _pieces_wanted(self, number: int) -> int:
        """Return how many pieces to count next: most of those before a sequence at once, and then at most a group."""
        _, ends = self._order
        count, total = len(self._counted), int(self._counted.sum())
        group_end = int(ends[np.searchsorted(ends, count, side="right")])
        if not total:
            return group_end
        last = int(self._first.ends[-1]) if len(self._first.ends) else 0
        if np.any((ends > last) & (ends <= count)):  # the end of a group is known except for the tokens after it
            group_end = count + 1
        far = min(number * self._length * count // total, 2 * count)
        return min(max(group_end, far), len(self._pieces))

    # ── groups ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _made(self, epoch: int, index: int) -> tuple[Group, np.ndarray]:
        """Return a group, and the order in which its sequences are drawn."""
        layout = self._layout_of(epoch)
        first, before = (int(layout.ends[index - 1]), int(layout.begun[index - 1])) if index else (0, 0)
        pieces = tuple(int(piece) for piece in self._pieces[layout.order[first : int(layout.ends[index])]])
        quota = int(layout.begun[index]) - before
        # there are at most as many groups as pieces, so a number belongs to one group only
        number = epoch * len(self._pieces) + index
        offset = before * self._length - int(layout.tokens[index - 1]) if index else 0
        epoch_begins = epoch * self._sequences() if epoch else 0
        group = Group(number, pieces, quota, epoch, epoch_begins + int(layout.begun[index]), offset)
        by = key("group", self._by, number)
        # the last sequence also needs the next group, which is being read meanwhile
        return group, np.append(shuffled(quota - 1, by), quota - 1)

    def _layout_of(self, epoch: int) -> _Layout:
        return self._layout(epoch) if self._is_counted else self._first

    def _whole(self, epoch: int) -> _Layout:
        order, ends = self._ordered(epoch)
        counted = np.zeros(len(self._pieces), np.int64)
        counted[self._order[0]] = self._counted
        tokens = np.cumsum(counted[order])
        ends = np.append(self._large(ends[:-1], tokens), ends[-1])
        begun = np.minimum(-(-tokens[ends - 1] // self._length), self._sequences())
        return _Layout(order, ends, begun, tokens[ends - 1])

    def _ordered(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the order of the pieces, and how many of them precede the end of each group."""
        order = shuffled(len(self._pieces), key("epoch", self._by, epoch))
        groups = (np.cumsum(self._sizes[order]) - 1) // GROUP_BYTES
        return order, np.append(np.flatnonzero(np.diff(groups)) + 1, len(order))

    def _large(self, ends: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return the ends of groups such that a sequence begins in each, and none extends beyond the next group.

        ``tokens`` are those up to the end of each piece. When more pieces are counted, the same ends and perhaps more are
        found.
        """
        total, large, before = int(tokens[-1]), list[int](), 0
        for end in ends.tolist():
            if tokens[end - 1] - before >= self._length and total - tokens[end - 1] >= 2 * self._length:
                large.append(end)
                before = int(tokens[end - 1])
        return np.array(large, np.int64)


class Sections:
    """One shard's pieces of one source: one section, or in a large source several, which are drawn one after the other.

    Only the current section must be counted to find a sequence, so what an island reads after a restart is bounded. If there
    are several sections, each gives its quota of sequences in an epoch, and continues after them in the next one: whatever
    the quotas are, every place of a section is drawn before any is drawn again.
    """

    def __init__(self, sections: Sequence[Section], quotas: Sequence[int], by: int) -> None:
        self.sections, self.quotas, self._by = sections, quotas, by
        self._epoch = lru_cache(maxsize=2)(self._ordered)

    def place(self, number: int) -> Place:
        """Return the place of sequence ``number``. Raises as ``Section.place``."""
        if len(self.sections) == 1:
            return Place(0, 0, number)
        epoch, within = divmod(number, sum(self.quotas))
        order, ends = self._epoch(epoch)
        at = int(np.searchsorted(ends, within, side="right"))
        section = int(order[at])
        rank = within - (int(ends[at - 1]) if at else 0)
        return Place(section, epoch, epoch * self.quotas[section] + rank, rank)

    def _ordered(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        order = shuffled(len(self.sections), key("sections", self._by, epoch))
        return order, np.cumsum(np.array(self.quotas, np.int64)[order])


@dataclass(frozen=True, slots=True)
class Place:
    """Sequence ``number`` of a section. Among several sections it is the section's ``rank``-th in this ``epoch``."""

    section: int
    epoch: int
    number: int
    rank: int = 0


def divided(sizes: np.ndarray) -> np.ndarray:
    """Return the section of each of a shard's pieces, of similar sizes up to ``SECTION_BYTES``: (pieces,) int64."""
    behind = np.cumsum(sizes)
    count = max(1, -(-int(behind[-1]) // SECTION_BYTES)) if len(sizes) else 1
    return (behind - 1) * count // max(1, int(behind[-1]))


class Mixture:
    """The source of each sequence of a shard, and its number there, by the sources' weights."""

    def __init__(self, weights: Sequence[float], by: int) -> None:
        self._by = by
        self.counts = _shares(weights, BLOCK_SEQUENCES)
        self._slots = np.repeat(np.arange(len(weights)), self.counts)
        self._block = lru_cache(maxsize=4)(self._ordered)

    def source(self, number: int) -> tuple[int, int]:
        """Return the source of sequence ``number``, and its number among those of that source."""
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
    """Return integers with this sum, in proportion to the weights by largest remainders, and at least one each."""
    exact = [weight / sum(weights) * total for weight in weights]
    counts = [max(1, int(share)) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: (int(exact[i]) - exact[i], i))
    for source in by_remainder:
        if sum(counts) < total:
            counts[source] += 1
    while sum(counts) > total:
        counts[counts.index(max(counts))] -= 1
    return counts


READERS = 2


@dataclass(slots=True)
class Present:
    """The group that is drawn from, and the next one of its section."""

    section: int
    group: Group
    text: Future[GroupText]
    following: Future[GroupText]


class Groups:
    """The tokens of each shard's and source's current group, and of the next one, which a thread reads meanwhile."""

    def __init__(self, read: Callable[[int, Group], GroupText]) -> None:
        self._read = read
        self._threads = ThreadPoolExecutor(READERS, "text")
        self._counting = ThreadPoolExecutor(1, "counting")
        self._present: dict[tuple[int, int], Present] = {}
        self._ahead: dict[tuple[int, int], tuple[int, int]] = {}

    def window(
        self,
        whose: tuple[int, int],
        section_number: int,
        source: int,
        section: Section,
        group: Group,
        first: int,
        count: int,
    ) -> Window:
        """Return ``count`` tokens from the ``first`` of a group on; the last ones may be from the next group."""
        present = self._moved_to(whose, section_number, source, section, group)
        window = present.text.result().window(first, count)
        if len(window.tokens) == count:
            return window
        more = present.following.result().window(0, count - len(window.tokens))
        tokens = np.concatenate([window.tokens, more.tokens])
        return Window(tokens, window.is_repeated, window.omitted + more.omitted)

    def count_ahead(self, whose: tuple[int, int], sections: Sections, place: Place, number: int) -> None:
        """Count what the next section needs while sequence ``number`` and its neighbours are drawn.

        On a node that is new in a later epoch that is the whole section, which may take longer than a step should.
        """
        if len(sections.sections) == 1 or self._ahead.get(whose) == (place.epoch, place.section):
            return
        self._ahead[whose] = place.epoch, place.section
        following = sections.place(number - place.rank + sections.quotas[place.section])
        # what cannot be read is raised again when it is drawn
        self._counting.submit(sections.sections[following.section].place, following.number)

    def _moved_to(
        self, whose: tuple[int, int], section_number: int, source: int, section: Section, group: Group
    ) -> Present:
        before = self._present.get(whose)
        if before is not None and (before.section, before.group.number) == (section_number, group.number):
            return before
        text = None
        if before is not None:
            if before.section == section_number and before.group.number < group.number:
                text = before.following if section.place(before.group.following)[0].number == group.number else None
            if text is None:
                before.following.cancel()
        present = Present(
            section_number,
            group,
            text or self._threads.submit(self._read, source, group),
            self._threads.submit(self._read_following, source, section, group),
        )
        self._present[whose] = present
        return present

    def _read_following(self, source: int, section: Section, group: Group) -> GroupText:
        """Read the next group. It is placed here, in the thread, because its pieces may have to be counted first."""
        following, _ = section.place(group.following)
        return self._read(source, following)
