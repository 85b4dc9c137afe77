"""A real disk that fails where it is told to: it fills up, tears writes, forgets what was not synced, or its user dies."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

from orchestrator.disk import LocalDisk


class Died(BaseException):
    """The process ends here. Not an Exception: nothing of ours may catch it."""


class FaultyDisk(LocalDisk):
    """``faults`` maps the number of a call of ``append`` or ``sync``, from 1, to what happens at it:

    "before"   dies, nothing done            "torn"      an append that wrote a half, then dies
    "after"    done, then dies               "full"      a half is written, then OSError: no space left
                                             "error"     OSError: input/output error
    """

    def __init__(self, **faults: dict[int, str]) -> None:
        self._faults = faults
        self.calls = {"append": 0, "sync": 0}
        self._synced: dict[Path, int] = {}

    def append(self, path: Path, parts: Sequence[bytes]) -> None:
        fault = self._next("append")
        if fault == "before":
            raise Died
        if fault in ("torn", "full"):
            whole = b"".join(parts)
            super().append(path, [whole[: len(whole) // 2]])
            raise Died if fault == "torn" else OSError(errno.ENOSPC, "No space left on device")
        super().append(path, parts)
        if fault == "after":
            raise Died

    def sync(self, path: Path) -> None:
        fault = self._next("sync")
        if fault == "before":
            raise Died
        if fault == "error":
            raise OSError(errno.EIO, "Input/output error")
        super().sync(path)
        self._synced[path] = path.stat().st_size
        if fault == "after":
            raise Died

    def lose_power(self, folder: Path) -> None:
        """Only what was synced is there afterwards."""
        for path in folder.iterdir():
            self.truncate(path, min(self._synced.get(path, 0), path.stat().st_size))

    def _next(self, kind: str) -> str | None:
        self.calls[kind] += 1
        return self._faults.get(kind, {}).get(self.calls[kind])
