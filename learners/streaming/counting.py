"""Counts the tokens of pieces of files: once for an index, or as an island needs them.

``counts`` runs processes for an index. Each takes pieces of one file at a time and sends every count at once, so that only
the current piece is lost when it is stopped. It reads and tokenises as islands do.

``TokenCounts`` are the counts of one source, kept on the node for an island's next life:

   piece tokens crc32
     a line for each piece, of all islands of the node; damaged lines are ignored

The counts depend only on the files, the tokenizer and what is held out; the name of the file is a digest of these. So every
island counts the same, and the file only saves time: without it a restarted island reads the pieces that its shard has
drawn.

``SourceTokens`` gives the text of a source as tokens, in groups of pieces. The tokens of a piece are counted by an index, or
when first needed: then the piece is read, and its tokens are kept for a while, because its group is usually read next. If a
piece has other tokens when it is read (its file changed, or a store failed), it is cut or repeated to the counted number, so
that no later place moves; the group records where.
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
from learners.held_out import HeldOut, digest
from learners.streaming.documents import Continuation, Reader, Unreadable, chosen
from orchestrator.errors import AtollError, InfrastructureError
from orchestrator.specification.training_sections import DataSection
from orchestrator.system.roots import EVERYTHING
from orchestrator.text import data_index
from orchestrator.text.file_kinds import kind_of

UNKNOWN = -1

log = logging.getLogger(__name__)

LINE_BYTES, LINES_PER_PIECE = 32, 16
"""Lines read back per piece: islands of one node that count the same piece write a line each."""
WRITTEN_TOGETHER = 64
MANY = 256

Count = Callable[[Sequence[int]], Iterable[tuple[int, int]]]
"""Reads pieces and returns the tokens of each, with its number."""


class TokenCounts:
    """The counts of one source of ``piece_count`` pieces, for all threads of an island. ``path`` None keeps no file."""

    def __init__(self, piece_count: int, path: Path | None) -> None:
        self._path = path
        self._known = np.full(piece_count, UNKNOWN, np.int64)
        self._lock = threading.Lock()
        self._read_back()

    def of(self, pieces: np.ndarray, count: Count) -> np.ndarray:
        """Return the tokens of these pieces: (pieces,) int64. Unknown ones are counted. Raises what ``count`` raises."""
        missing = pieces[self._known[pieces] == UNKNOWN].tolist()
        counted = list[tuple[int, int]]()
        if len(missing) >= MANY:
            log.info("%d pieces are read to count their tokens, before the next sequence is drawn", len(missing))
        try:
            for piece, tokens in count(missing) if missing else ():
                if self._known[piece] == UNKNOWN:  # another thread may have counted the same piece
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
        """Remove the file, because the text is not what was counted. This life continues with its counts."""
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
                log.info("token counts cannot be kept in %s: %s", self._path, error.strerror or error)
                self._path = None


def kept_in(folder: Path, *of: object) -> Path:
    """Return the file for the counts that depend on all of ``of``."""
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
"""Pieces of an uncompressed file in a task. One process decompresses a whole compressed file."""


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
    """The count of ``piece`` of ``source``: documents, their bytes, and their tokens with those around each.

    Documents held out by ratio are excluded. ``listed`` are digest and tokens of each that a job may hold out one by one, as
    in ``data_index.listed``. ``unreadable`` are place and reason of what could not be read; ``is_cut`` means that there was
    too much text.
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
    """Return the tasks for the ``missing`` pieces of a file with ``count`` pieces."""
    whole = kind_of(path).is_compressed
    step = max(1, len(missing) if whole else TASK_PIECES)
    parts = (frozenset(missing[at : at + step]) for at in range(0, len(missing), step))
    return [Task(source, path, size, first, count, part, field) for part in parts]


def counts(
    work: Sequence[Task], section: DataSection, held_out: HeldOut, listed: Set[int], process_count: int
) -> Generator[PieceCount, None, None]:
    """Yield every piece of ``work`` as it is counted, by this many processes, which end with the generator.

    ``listed`` are the digests of documents that a job may hold out one by one. Raises our errors from a process, and
    InfrastructureError if a process has died.
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
        detail = "A process that counts tokens has died; its reason, if any, is above."
        remedy = (
            "If there is none, it was killed for lack of memory: give fewer --processes. The same command continues."
        )
        raise InfrastructureError(detail=detail, remedy=remedy) from error


@contextmanager
def _processes(count: int, arguments: tuple[Any, ...]) -> Iterator[list[Connection]]:
    context = get_context("spawn")  # tokenizer libraries keep threads, which do not survive a fork
    started, ends = [], []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    resource_tracker.ensure_running()  # started now, because starting it resets the signal mask
    signal.pthread_sigmask(signal.SIG_SETMASK, {*before, signal.SIGINT})
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
            process.kill()  # SIGTERM is blocked in all processes of a machine that joined
        for process in started:
            process.join()


def _work(end: Connection, section: DataSection, held_out: HeldOut, listed: frozenset[int]) -> None:
    """Count requested tasks until there are no more requests."""
    # Ctrl-C reaches all processes, but only the parent answers it; the signal is blocked from the start
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["RAYON_NUM_THREADS"] = "1"  # each process has one core; more threads would compete
    logging.disable()  # what could not be read is sent to the parent
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
    """Yield the counts of a task's pieces, in order."""
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
    """Yield digest and tokens of each part that a job may hold out one by one, with its position among the others."""
    follows = [isinstance(part, Continuation) for part in parts] + [False]
    for at, (number, length) in enumerate(zip(numbers, lengths, strict=True)):
        if number in listed:
            is_next_listed = follows[at + 1] and numbers[at + 1] in listed
            yield number, data_index.listed(length, follows[at], follows[at + 1], is_next_listed)


HELD_BYTES_MAX = 32 << 20
"""The limit of tokens of a source's pieces that were counted but not yet read."""

Read = Callable[[Sequence[int]], Iterator[tuple[int, np.ndarray]]]
"""Reads pieces and yields the tokens of each with its number, with a separator after each document."""


@dataclass(frozen=True, slots=True)
class Window:
    """Neighbouring tokens. ``is_repeated`` means that they begin in a range that repeats others; ``omitted`` tokens are
    missing among them.
    """

    tokens: np.ndarray
    is_repeated: bool = False
    omitted: int = 0


@dataclass(frozen=True, slots=True)
class GroupText:
    """The tokens of a group. ``repeats`` are ranges of tokens that repeat others; ``omissions`` are places, with the
    number of tokens that are missing there.
    """

    tokens: np.ndarray
    repeats: tuple[tuple[int, int], ...] = ()
    omissions: tuple[tuple[int, int], ...] = ()

    def window(self, first: int, count: int) -> Window:
        """Return ``count`` tokens from ``first`` on, or as many as there are."""
        is_repeated = any(start <= first < end for start, end in self.repeats)
        omitted = sum(tokens for at, tokens in self.omissions if first < at <= first + count)
        return Window(self.tokens[first : first + count], is_repeated, omitted)


class SourceTokens:
    """The tokens of a source, for all threads.

    ``misread`` is called with a piece, its counted tokens and its actual ones.
    """

    def __init__(
        self, counts: np.ndarray | TokenCounts, read: Read, separator: int, misread: Callable[[int, int, int], None]
    ) -> None:
        self._counts, self._read, self._separator, self._misread = counts, read, separator, misread
        self._held: OrderedDict[int, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, pieces: np.ndarray) -> np.ndarray:
        """Return the number of tokens of these pieces: (pieces,) int64. Raises what reading raises."""
        return self._counts[pieces] if isinstance(self._counts, np.ndarray) else self._counts.of(pieces, self._count)

    def text(self, pieces: Sequence[int]) -> GroupText:
        """Return the tokens of these pieces, in order, as many as were counted. Raises what reading raises."""
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
