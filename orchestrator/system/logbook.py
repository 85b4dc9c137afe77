"""The logbook of a process of a job, a file that outlives it: logging, prints, tracebacks, a library's last output.

    RUN_DIR/logs/synchroniser-1.log, controller-1.log, evaluator-1.log
    RUN_DIR/logs/islands/asia-2.log           the second incarnation of asia
    RUN_DIR/logs/islands/asia-2.log.older     what came before, once that was longer than BYTES_MAX

The newest LIVES_KEPT of each are kept, so that a job's logs are bounded however often its processes die.

Names, writes, reads and finds logbooks. The descriptors 1 and 2 are redirected to the file, so native code writes there too,
and output is with the kernel at once: SIGKILL loses at most an incomplete line. Each node writes to its own disk;
``runtime.head_copies`` copies the last part to the job's run folder, where the service reads it. If the file cannot be
created, the process keeps its previous output.
"""

from __future__ import annotations

import faulthandler
import glob
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TextIO

from orchestrator.system import printable
from orchestrator.system.run_folder import ISLAND_LOGS, LOGS

BYTES_MAX = 4 << 20
"""The limit of each of the two halves. They may exceed it by the output of ``CHECK_S``."""
CHECK_S = 1.0
OLDER = ".older"
COPY_BYTES = 64 << 10
"""At least so much of the end of a log is copied from other machines, if it is that long."""
LIVES_KEPT = 10
"""Logbooks of one island, or kind of process: the newest. An island that fails again and again begins one each time."""
REPEATS_MAX, REPEAT_WINDOW_S = 100, 60.0
NUMBER_DIGITS_MAX = 9
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


log = logging.getLogger(__name__)

_current: Logbook | None = None


@dataclass(frozen=True, slots=True)
class Logbook:
    """A logbook. ``number`` is an island's incarnation, or the number of the process among its kind; from 1."""

    source: str
    number: int
    of_island: bool
    path: Path

    @property
    def older(self) -> Path:
        """The path of the older half."""
        return self.path.with_name(self.path.name + OLDER)


def island_logbook(run_dir: Path, island: str, incarnation: int) -> Logbook:
    return Logbook(island, incarnation, True, run_dir / LOGS / ISLAND_LOGS / f"{island}-{incarnation}.log")


def job_of(book: Logbook) -> str:
    """Return the job of an island with this logbook."""
    return book.path.parents[2].name


def rank_logbook(book: Logbook, rank: int) -> Logbook:
    """Return the logbook of the process with this rank, in an island whose rank 0 has ``book``."""
    if rank == 0:
        return book
    source = f"{book.source}-host{rank}"
    return Logbook(source, book.number, True, book.path.with_name(f"{source}-{book.number}.log"))


def service_logbook(run_dir: Path, source: str, number: int = 1) -> Logbook:
    """Return the logbook of the synchroniser, the controller, or an evaluator."""
    return Logbook(source, number, False, run_dir / LOGS / f"{source}-{number}.log")


def logbooks(run_dir: Path) -> list[Logbook]:
    """Return all logbooks in the folder: islands first, by name and number."""
    books = []
    for of_island, folder in ((True, run_dir / LOGS / ISLAND_LOGS), (False, run_dir / LOGS)):
        for path in folder.glob("*-*.log"):
            source, _, number = path.stem.rpartition("-")
            if _is_number(number):
                books.append(Logbook(source, int(number), of_island, path))
    return sorted(books, key=lambda book: (not book.of_island, book.source, book.number))


@dataclass(frozen=True, slots=True)
class LogAddition:
    """The bytes that were added to a log, from ``start`` on. The next addition begins at ``end``."""

    start: int
    end: int
    content: bytes


def addition(path: Path, at: int) -> LogAddition | None:
    """Return what was added to the log since byte ``at``, the last COPY_BYTES of it at most; None if it cannot be read.

    If the log was rotated since, it is the rest of the older half, and the new one is read from its beginning next.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < at:
                return _older_addition(path.with_name(path.name + OLDER), at)
            start = max(at, size - COPY_BYTES)
            file.seek(start)
            content = file.read(size - start)
    except OSError:
        return None
    return LogAddition(start, start + len(content), content)


def _older_addition(older: Path, at: int) -> LogAddition:
    try:
        with older.open("rb") as file:
            start = max(at, os.fstat(file.fileno()).st_size - COPY_BYTES)
            file.seek(start)
            return LogAddition(start, 0, file.read(COPY_BYTES))
    except OSError:
        return LogAddition(at, 0, b"")


def keep(book: Logbook) -> None:
    """Redirect all output of this process to the end of its logbook. A later call switches to another logbook.

    Logbooks of the same source but the newest ``LIVES_KEPT`` are removed.
    """
    global _current
    try:
        book.path.parent.mkdir(parents=True, exist_ok=True)
        _turn_to(book.path)
    except OSError as error:
        log.warning("%s cannot be written: %s", book.path, error)
        return
    remove_older(book)
    sys.stdout, sys.stderr = (_by_lines(number) for number in (1, 2))
    logging.Formatter.converter = time.gmtime
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, force=True)
    write_printable(FORMAT)
    faulthandler.enable(file=sys.stderr)
    _current = book
    _begin_keeping_short(book.path, book.older, lambda: book is _current)


_part: ContextVar[Logbook | None] = ContextVar("part", default=None)
"""The logbook to which this thread's entries belong, in a process of several jobs."""


class _PartWriter(RotatingFileHandler):
    """Writes to one of a process's logbooks: the entries of its threads, and those of threads that belong to none.

    What the process prints, and entries of no job, are on its own output as well.
    """

    def __init__(self, book: Logbook) -> None:
        book.path.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(book.path, maxBytes=BYTES_MAX, backupCount=1, encoding="utf-8", errors="backslashreplace")
        self.namer = lambda _: str(book.older)
        self.addFilter(lambda _: _part.get() in (None, book))
        self.setFormatter(_OfOneLine(FORMAT))

    def _open(self) -> TextIOWrapper:
        return open(
            self.baseFilename,
            "a",
            encoding=self.encoding,
            errors=self.errors,
            opener=lambda path, flags: os.open(path, flags, 0o600),
        )


def begin_part(book: Logbook) -> tuple[Context, logging.Handler]:
    """Write what is logged in the returned context to this logbook, for as long as the root logger has the handler.

    If the file cannot be created, that is logged, and the entries are on the process's output only.
    """
    try:
        writer: logging.Handler = _PartWriter(book)
    except OSError as error:
        log.warning("%s cannot be written: %s", book.path, error)
        writer = logging.NullHandler()
    else:
        remove_older(book)
    logging.getLogger().addHandler(writer)
    context = copy_context()
    context.run(_part.set, book)
    return context, writer


def write_part(book: Logbook) -> None:
    """Have what this thread logs from now on belong to the logbook, for which ``begin_part`` was called."""
    _part.set(book)


def keep_output_short(path: Path) -> None:
    """Bound the size of this process's output file, if it is this one: rotate it at BYTES_MAX, with one older half."""
    try:
        is_output = os.path.samestat(os.fstat(1), path.stat())
    except OSError:
        return
    if is_output:
        _begin_keeping_short(path, path.with_name(path.name + OLDER), lambda: True)


def write_printable(form: str) -> None:
    """Write each log entry from now on as one line, whatever names and reasons it contains; tracebacks follow it."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(_OfOneLine(form))


class _OfOneLine(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable.line(record.message)
        return super().formatMessage(record)


def remove_older(book: Logbook) -> None:
    """Remove the oldest logbooks of the book's source, so that ``LIVES_KEPT`` are left. Errors are ignored."""
    numbers = (path.stem.rpartition("-") for path in book.path.parent.glob(f"{glob.escape(book.source)}-*.log"))
    older = sorted(int(number) for source, _, number in numbers if source == book.source and _is_number(number))
    for number in [number for number in older if number < book.number][: -(LIVES_KEPT - 1)]:
        path = book.path.with_name(f"{book.source}-{number}.log")
        for one in (path, path.with_name(path.name + OLDER)):
            with suppress(OSError):
                one.unlink(missing_ok=True)


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) <= NUMBER_DIGITS_MAX


def _by_lines(descriptor: int) -> TextIO:
    """A stream that keeps no line to itself, and chokes on no character."""
    return open(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _turn_to(path: Path) -> None:
    """The descriptors of standard output and error lead into this file."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for standard in (1, 2):
        os.dup2(file, standard)
    os.close(file)


def _begin_keeping_short(path: Path, older: Path, is_current: Callable[[], bool]) -> None:
    threading.Thread(target=_keep_short, args=(path, older, is_current), name="logbook", daemon=True).start()


def _keep_short(path: Path, older: Path, is_current: Callable[[], bool]) -> None:
    while True:
        time.sleep(CHECK_S)
        if not is_current():
            return
        try:
            if path.stat().st_size > BYTES_MAX:
                os.replace(path, older)
                _turn_to(path)
        except OSError as error:  # somebody removed the folder: what is said goes where it went
            log.warning("%s cannot be kept short: %s", path, error)
            return


class RepeatLimit(logging.Filter):
    """Allows ``records_max`` records in ``window_s`` from one line of code; the next one says how many were omitted.

    Repeated requests thus cannot fill a log, or push everything else out of it. Not synchronised between threads: counts may
    be off by a few.
    """

    def __init__(self, records_max: int = REPEATS_MAX, window_s: float = REPEAT_WINDOW_S) -> None:
        super().__init__()
        self._records_max, self._window_s = records_max, window_s
        self._windows: dict[tuple[str, int], tuple[float, int]] = {}
        """By file and line of code: when the window began, and how many records came in it."""

    def filter(self, record: logging.LogRecord) -> bool:
        place = (record.pathname, record.lineno)
        began, count = self._windows.get(place, (record.created, 0))
        if not 0.0 <= record.created - began < self._window_s:
            if (omitted_count := count - self._records_max) > 0:
                record.msg = f"{record.getMessage()} ({omitted_count} similar records before it were omitted)"
                record.args = None
            began, count = record.created, 0
        self._windows[place] = (began, count + 1)
        return count < self._records_max
