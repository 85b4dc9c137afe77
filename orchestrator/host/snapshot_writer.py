"""The writer of snapshots: after a restart only the records behind the last one need be replayed.

Responsible for: one in every so many records, taken between two steps, written in a thread of its own. Refuses to make
anything depend on one: where it cannot be written, the one before stays, or none.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from orchestrator.core.synchroniser import Synchroniser
from orchestrator.core.vocabulary import Instant
from orchestrator.disk import Disk, LocalDisk
from orchestrator.tape.driver import Driver
from orchestrator.tape.snapshot import Snapshot, encode
from orchestrator.tape.storage import TapeWriter, build, write_snapshot

log = logging.getLogger(__name__)


class SnapshotWriter:
    """``consider`` and ``close`` are for the pump. There is one for the first ``before`` records."""

    def __init__(self, path: Path, tape: TapeWriter, before: int, every: int, disk: Disk | None = None) -> None:
        self._path, self._tape, self._every, self._disk = path, tape, every, disk or LocalDisk()
        self._count = before
        self._writing = ThreadPoolExecutor(1, "snapshot")
        self._under_way: Future[None] | None = None

    def consider(self, driver: Driver[Synchroniser], at: Instant) -> None:
        """Take one if it is due. The state of core and folds is copied before this returns."""
        if driver.count - self._count < self._every or (self._under_way and not self._under_way.done()):
            return
        self._count = driver.count
        try:
            raw = encode(Snapshot(self._tape.mark, at, driver.core, driver.folds), build())
        except Exception:
            log.exception("no snapshot could be made of step %d", driver.count)
            return
        self._under_way = self._writing.submit(self._write, raw)

    def close(self) -> None:
        """The job is over: no synchroniser will recover it."""
        self._writing.shutdown(wait=True)
        self._disk.remove(self._path)

    def _write(self, raw: bytes) -> None:
        try:
            write_snapshot(self._path, raw, self._disk)
        except Exception as error:
            log.warning("a snapshot of %d bytes cannot be written: %s: %s", len(raw), type(error).__name__, error)
