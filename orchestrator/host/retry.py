"""Writes to a disk that may refuse for a while: retried until they are done, and visible meanwhile.

While the journal cannot be written no merge is announced, and while the tape cannot be written nothing is decided. Islands
train on either way, keep their work and offer it again. Continuing without either file would lose what was announced.

    Retrier          repeats a write, and says what it waits for
    RetryingSink     the tape as the driver's sink; makes a new epoch, and Θ's beginning, durable before they are announced
    PeriodicSync     durability sync: the tape survives a loss of power      NoSync   async: the death of the process only
    SnapshotWriter   writes a snapshot of core and folds every so many records, in a thread of its own, and seals the tape
                     up to it

A restart replays only the records behind the last snapshot. Nothing depends on one: if a snapshot cannot be written, the
one before stays. A segment of the tape is sealed only after the snapshot at its end is durable. So a restart reads
sealed segments only if its snapshot cannot be used.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from orchestrator.core.events import OuterStateSeeded, SynchroniserRestarted
from orchestrator.core.synchroniser import Synchroniser
from orchestrator.core.vocabulary import Instant
from orchestrator.errors import InfrastructureError, first_line, in_words
from orchestrator.specification.config import JobSpec
from orchestrator.status import StoreStatus
from orchestrator.system.disk import Disk, LocalDisk
from orchestrator.system.mirror import MirroredDisk
from orchestrator.tape.driver import Driver
from orchestrator.tape.schema import Mark, Record
from orchestrator.tape.sealing import SEAL_BYTES
from orchestrator.tape.snapshot import Snapshot, encode
from orchestrator.tape.storage import TapeWriter, build, write_snapshot

Result = TypeVar("Result")
log = logging.getLogger(__name__)
RETRY_S = 1.0
TAPE_REFUSES = "the tape cannot be written"
JOURNAL_REFUSES = "the journal cannot be written"
STORE_REFUSES = "the store cannot be used"
RUN_FOLDER_REFUSES = "the run's folder cannot be written"
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
SYNC_EVERY_S = 0.5


class Retrier:
    """``trouble`` says what is being waited for, if anything is."""

    def __init__(self, retry_s: float = RETRY_S) -> None:
        self._retry_s = retry_s
        self._closed = threading.Event()
        self._troubles: dict[str, str] = {}

    @property
    def trouble(self) -> str | None:
        troubles = dict(self._troubles)
        return "; ".join(f"{operation}: {error}" for operation, error in sorted(troubles.items())) or None

    def until_done(self, operation: str, work: Callable[[], Result]) -> Result:
        """Return the result of ``work``, once that is done. Raises InfrastructureError once the retrier is closed."""
        while True:
            try:
                result = work()
            except OSError as error:
                if self._troubles.get(operation) != first_line(error):
                    log.error("%s; it will be tried again: %s", operation, error)
                self._troubles[operation] = first_line(error)
            else:
                self._troubles.pop(operation, None)
                return result
            if self._closed.wait(self._retry_s):
                raise InfrastructureError(detail=f"{operation}: {self._troubles[operation]}")

    def close(self) -> None:
        """End every retry under way."""
        self._closed.set()


def only_full(work: Callable[[], None]) -> None:
    """Do the work. OSError is raised only for a disk that is full, for which one waits; InfrastructureError for others."""
    try:
        work()
    except OSError as error:
        if error.errno in FULL:
            raise
        raise InfrastructureError(detail=str(error)) from error


def left_undone(retrier: Retrier, what: str, work: Callable[[], None]) -> str:
    """Do the work, once a full disk has room again; else return why it could not be: no reason to call the job failed."""
    try:
        retrier.until_done(RUN_FOLDER_REFUSES, lambda: only_full(work))
    except Exception as error:
        log.exception("%s could not be written", what)
        return f"{what} could not be written ({in_words(error)})"
    return ""


def store_status(disk: MirroredDisk) -> StoreStatus:
    writer = disk.writer
    puts, put_bytes, put_seconds = writer.puts, writer.put_bytes, writer.put_seconds
    return StoreStatus(puts=puts, put_bytes=put_bytes, put_seconds=put_seconds, trouble=disk.trouble)


class RetryingSink:
    """A tape whose disk may refuse for a while. Some records are durable before anything is announced that rests on them.

    An epoch is, so that none is used twice, and Θ is: islands are given it next, and a successor that did not know of it
    would hear of their training before it had made Θ again. Before anything is announced, ``settle`` makes durable what is
    in the journal.
    """

    def __init__(self, tape: TapeWriter, retrier: Retrier, settle: Callable[[], None]) -> None:
        self._tape, self._retrier, self._settle = tape, retrier, settle
        self._settled = False

    def append(self, record: Record) -> None:
        if not self._settled:
            self._retrier.until_done(JOURNAL_REFUSES, self._settle)
            self._settled = True
        self._retrier.until_done(TAPE_REFUSES, lambda: self._tape.append(record))
        if isinstance(record.event, (SynchroniserRestarted, OuterStateSeeded)):
            self._retrier.until_done(TAPE_REFUSES, self._tape.sync)


def tape_sync_of(spec: JobSpec, tape: TapeWriter) -> tuple[Retrier, PeriodicSync | NoSync]:
    """The sync of this job's tape, and the retrier of what its disk refuses."""
    retrier = Retrier()
    return retrier, NoSync(tape) if spec.synchroniser.durability.kind == "async" else PeriodicSync(tape, retrier)


class PeriodicSync:
    """Makes the tape durable twice a second, so that islands need not keep their reports for long."""

    def __init__(self, tape: TapeWriter, retrier: Retrier) -> None:
        self._tape, self._retrier = tape, retrier
        self._closed, self._trouble = threading.Event(), ""
        threading.Thread(target=self._run, name="sync", daemon=True).start()

    def durable_count(self) -> int:
        """The number of the last record that is durable, as the job's policy has it."""
        return self._tape.synced_count

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(SYNC_EVERY_S):
            if self._tape.synced_count < self._tape.count:
                try:
                    self._retrier.until_done(TAPE_REFUSES, self._tape.sync)
                except (InfrastructureError, ValueError):
                    pass  # nobody waits any more, or the tape was closed just now
                except Exception as error:  # islands would keep all their reports for ever
                    reason = in_words(error)
                    if reason != self._trouble:
                        log.error("the tape cannot be made durable: %s", reason, exc_info=error)
                    self._trouble = reason


class NoSync:
    """The policy of durability async: a record counts as durable once the operating system has it."""

    def __init__(self, tape: TapeWriter) -> None:
        self._tape = tape

    def durable_count(self) -> int:
        return self._tape.count

    def close(self) -> None:
        """There is nothing to end."""


class SnapshotWriter:
    """``consider`` and ``close`` are for the pump. There is one for the first ``before`` records.

    One is due after ``every`` records, and also once the plain segment of the tape has grown by ``seal_bytes``, so that it
    can be sealed.
    """

    def __init__(
        self,
        path: Path,
        tape: TapeWriter,
        before: int,
        every: int,
        disk: Disk | None = None,
        seal_bytes: int = SEAL_BYTES,
    ) -> None:
        self._path, self._tape, self._every, self._disk = path, tape, every, disk or LocalDisk()
        self._count, self._seal_bytes, self._size = before, seal_bytes, 0
        self._sealed: Mark | None = None
        self._writing = ThreadPoolExecutor(1, "snapshot")
        self._under_way: Future[None] | None = None

    def consider(self, driver: Driver[Synchroniser], at: Instant) -> None:
        """Take one if it is due. The state of core and folds is copied before this returns."""
        if self._under_way and not self._under_way.done():
            return
        if (sealed := self._sealed) is not None:
            self._sealed = None
            self._cut(sealed)
        mark = self._tape.mark
        if driver.count - self._count < self._every and mark.size - self._size < self._seal_bytes:
            return
        self._count, self._size = driver.count, mark.size
        try:
            raw = encode(Snapshot(mark, at, driver.core, driver.folds), build())
        except Exception:
            log.exception("no snapshot could be made of step %d", driver.count)
            return
        self._under_way = self._writing.submit(self._write, raw, mark)

    def close(self) -> None:
        """The job is over: no synchroniser will recover it."""
        self.let_go()
        self._disk.remove(self._path)

    def let_go(self) -> None:
        """Wait for what is being written. Nothing is removed: another synchroniser goes on from it."""
        self._writing.shutdown(wait=True)

    def _write(self, raw: bytes, mark: Mark) -> None:
        try:
            write_snapshot(self._path, raw, self._disk)
        except Exception as error:
            log.warning("a snapshot of %d bytes cannot be written: %s: %s", len(raw), type(error).__name__, error)
            return
        if mark.size < self._seal_bytes:
            return
        try:
            self._tape.seal(mark)
        except Exception as error:
            log.warning("the tape cannot be sealed up to record %d: %s: %s", mark.count, type(error).__name__, error)
        else:
            self._sealed = mark

    def _cut(self, sealed: Mark) -> None:
        """Let the tape go on in a new segment. If it cannot, it goes on in this one, and is sealed anew later."""
        try:
            self._tape.cut(sealed)
        except OSError as error:
            log.warning("the tape cannot go on in a new segment: %s", error)
        else:
            self._size = 0
