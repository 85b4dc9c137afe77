"""Processes that count the tokens of pieces of files, each piece once: what an index is made of.

A process takes one file's pieces at a time and sends each as soon as it is counted, so that nothing but the piece at hand is
lost when it is stopped. It reads and tokenises as islands do. Responsible for what is in a piece's count; refuses to know
where counts are training (``learners.data_indexing``).

The tokens of a source's pieces, counted as an island comes to them, and kept on the node for its next life.

    piece tokens crc32
      a line for each piece, of all islands of the node; what is damaged is passed over

The numbers follow from the files, the tokenizer and what is held out, which the name of the file is a digest of. So every
island counts the same, and the file only saves time: without it an island that begins again reads the pieces that its
shard has drawn. Responsible for numbers; who reads the pieces is ``streamed``.

The text of one source as tokens: how many each piece has, and groups of pieces as an island draws from them.

How many tokens a piece has is said by an index, or counted the first time that somebody asks: for that a piece is read, and
its tokens are held for a while, because the group that it belongs to is usually read next. A piece that has other tokens
when it is read (its file changed, or a store failed) is cut or repeated to the number that was counted, so that no place
behind it moves; the group marks where.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from multiprocessing import connection, get_context, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from learners import tokenizer
from learners.corpus import document_count
from learners.streaming.documents import Continuation, Reader, Unreadable, chosen
from learners.streaming.held_out import HeldOut, digest
from orchestrator.errors import AtollError, InfrastructureError
from orchestrator.specification.sections import DataSection
from orchestrator.system.roots import EVERYTHING
from orchestrator.text import data_index
from orchestrator.text.file_kinds import kind_of

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


TASK_PIECES = 8
"""Of a file that is not compressed; one that is, is decompressed by one process."""


@dataclass(frozen=True, slots=True)
class Task:
    """Pieces ``numbers`` of the ``count`` of a file of ``source``, whose first piece is that source's ``first``."""

    source: int
    path: str
    size: int
    first: int
    count: int
    numbers: frozenset[int]
    text_field: str


@dataclass(frozen=True, slots=True)
class PieceCount:
    """``piece`` of ``source``: its documents, their bytes, and their tokens with those that stand around each.

    Those that are held out by ratio are left out. ``listed`` are digest and tokens of each that a job may hold out one by
    one, as ``data_index.listed`` has them. ``unreadable`` are place and reason of what was passed over, and ``is_cut`` tells
    of too much text.
    """

    source: int
    piece: int
    tokens: int
    documents: int
    text_bytes: int
    listed: tuple[tuple[int, int], ...]
    unreadable: tuple[tuple[int, str], ...]
    is_cut: bool


def tasks(source: int, path: str, size: int, first: int, missing: Sequence[int], count: int, field: str) -> list[Task]:
    """The work on one file, of whose ``count`` pieces these are ``missing``."""
    whole = kind_of(path).is_compressed
    step = max(1, len(missing) if whole else TASK_PIECES)
    parts = (frozenset(missing[at : at + step]) for at in range(0, len(missing), step))
    return [Task(source, path, size, first, count, part, field) for part in parts]


def counts(
    work: Sequence[Task], section: DataSection, held_out: HeldOut, listed: Set[int], process_count: int
) -> Generator[PieceCount, None, None]:
    """Every piece of ``work`` as it is counted, by so many processes. They end when this does.

    ``listed`` are the digests of documents that a job may hold out one by one. Raises what a process has raised of ours, and
    InfrastructureError for one that has died.
    """
    waiting = list(reversed(work))
    with _processes(min(process_count, len(work)), (section, held_out, frozenset(listed))) as ends:
        busy = set(ends)
        for end in ends:
            end.send(waiting.pop())
        while busy:
            ready = connection.wait(tuple(busy))
            for end in busy.intersection(ready):
                message = _received(end)
                if isinstance(message, PieceCount):
                    yield message
                elif isinstance(message, AtollError):
                    raise message
                elif waiting:
                    end.send(waiting.pop())
                else:
                    busy.remove(end)


def _received(end: Connection) -> Any:
    try:
        return end.recv()
    except (EOFError, ConnectionError) as error:
        detail = "A process that counts tokens has died; its reason, if it had one, is above."
        remedy = "If there is none, it was killed for want of memory: give fewer --processes. The same command goes on."
        raise InfrastructureError(detail=detail, remedy=remedy) from error


@contextmanager
def _processes(count: int, arguments: tuple[Any, ...]) -> Iterator[list[Connection]]:
    context = get_context("spawn")  # libraries of tokenizers keep threads, which do not survive a fork
    started, ends = [], []
    resource_tracker.ensure_running()  # it takes the mask away again when it is started
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, *arguments), daemon=True)
            process.start()
            theirs.close()
            started.append(process)
            ends.append(ours)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield ends
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for process in started:
            process.terminate()
        for process in started:
            process.join()


def _work(end: Connection, section: DataSection, held_out: HeldOut, listed: frozenset[int]) -> None:
    """Count what is asked for until nobody asks any more."""
    # Ctrl-C reaches all of them, and is answered by who started them, with the signal blocked from their first instant
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["RAYON_NUM_THREADS"] = "1"  # each process has one core, or they get in each other's way
    logging.disable()  # what could not be read is sent along
    try:
        tokens = tokenizer.load(section, EVERYTHING)
        while True:
            task: Task = end.recv()
            for count in counted(task, tokens, held_out, listed):
                end.send(count)
            end.send(None)
    except (EOFError, ConnectionError):
        return
    except AtollError as error:
        end.send(error)


def counted(task: Task, tokens: tokenizer.Tokenizer, held_out: HeldOut, listed: Set[int]) -> Iterator[PieceCount]:
    """The pieces of a task, in turn."""
    unreadable = Unreadable(most=1 << 62)
    reader = Reader(EVERYTHING, task.text_field, unreadable)
    if kind_of(task.path).is_compressed:
        pieces = reader.pieces(task.path, task.count, task.size)
    else:
        pieces = ((n, reader.documents(task.path, n, task.count, task.size)) for n in sorted(task.numbers))
    for number, documents in pieces:
        if number in task.numbers:
            digests = list(map(digest, documents))
            following = iter(digests)
            training = list(chosen(documents, lambda _: next(following) >= held_out.limit))  # noqa: B023 used up at once
            numbers = [one for one in digests if one >= held_out.limit]
            lengths, around = tokens.counts(training), 1 + len(tokens.beginning)
            yield PieceCount(
                task.source,
                task.first + number,
                sum(lengths) + around * document_count(training),
                document_count(training),
                sum(map(len, training)),
                tuple(_listed(training, numbers, [around + length for length in lengths], listed)),
                tuple((place, reason) for (_, place), reason in unreadable.reasons.items()),
                bool(unreadable.cut),
            )
        unreadable.reasons.clear()
        unreadable.cut.clear()


def _listed(
    parts: Sequence[bytes], numbers: Sequence[int], lengths: Sequence[int], listed: Set[int]
) -> Iterator[tuple[int, int]]:
    """Digest and tokens of each part that a job may hold out one by one, with how it lies among the others."""
    follows = [isinstance(part, Continuation) for part in parts] + [False]
    for at, (number, length) in enumerate(zip(numbers, lengths, strict=True)):
        if number in listed:
            is_next_listed = follows[at + 1] and numbers[at + 1] in listed
            yield number, data_index.listed(length, follows[at], follows[at + 1], is_next_listed)


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
