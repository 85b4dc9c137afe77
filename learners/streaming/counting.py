"""Processes that count the tokens of pieces of files, each piece once: what an index is made of.

A process takes one file's pieces at a time and sends each as soon as it is counted, so that nothing but the piece at hand is
lost when it is stopped. It reads and tokenises as islands do. Responsible for what is in a piece's count; refuses to know
where counts are training (``learners.data_indexing``).
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Generator, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection, get_context, resource_tracker
from multiprocessing.connection import Connection
from typing import Any

from learners import tokenizer
from learners.corpus import document_count
from learners.streaming.documents import Continuation, Reader, Unreadable, chosen
from learners.streaming.held_out import HeldOut, digest
from orchestrator import data_index
from orchestrator.errors import AtollError, InfrastructureError
from orchestrator.file_kinds import kind_of
from orchestrator.roots import EVERYTHING

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
    work: Sequence[Task], section: Mapping[str, Any], held_out: HeldOut, listed: Set[int], process_count: int
) -> Generator[PieceCount, None, None]:
    """Every piece of ``work`` as it is counted, by so many processes. They end when this does.

    ``listed`` are the digests of documents that a job may hold out one by one. Raises what a process has raised of ours, and
    InfrastructureError for one that has died.
    """
    waiting = list(reversed(work))
    with _processes(min(process_count, len(work)), (dict(section), held_out, frozenset(listed))) as ends:
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


def _work(end: Connection, section: dict[str, Any], held_out: HeldOut, listed: frozenset[int]) -> None:
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
