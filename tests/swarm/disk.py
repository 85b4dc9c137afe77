"""A disk in memory under tape and journal, for processes that die and machines that lose power.

    process dies     appended data stays, because the operating system has it; an append may be cut short
    power is lost    synced data stays, with its name; of data appended after that any part may survive, its end possibly
                     zeros or with flipped bits; files that were never synced may be gone, and removed ones back
    full             half of an append is written, and it raises ENOSPC
    error            a sync raises EIO, and unsynced data never becomes durable (Linux marks its pages as clean)

The disk is never better than POSIX allows. ``fault_source`` decides the fault of each operation.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import Any

from orchestrator.parameters.journal import SUFFIX


class Died(BaseException):
    """The process ends here. It is not an Exception, so that no product code catches it."""


class DiskFault(StrEnum):
    """The fault of one operation. ``TORN`` is for appends, ``FULL`` for appends and replacements, ``ERROR`` for syncs."""

    BEFORE = "before"
    """The process dies before the operation."""
    AFTER = "after"
    """The process dies after the operation."""
    TORN = "torn"
    """The process dies half way."""
    FULL = "full"
    ERROR = "error"


class Operation(StrEnum):
    APPEND = "append"
    SYNC = "sync"
    REPLACE = "replace"


FaultSource = Callable[[Operation, Path], DiskFault | None]


def no_faults(_: Operation, __: Path) -> DiskFault | None:
    """Return no fault for any operation."""
    return None


@dataclass(slots=True)
class _Content:
    """A file's content. Its name and the ``synced`` bytes of ``data`` survive a power loss, except ``holes``, which
    become zeros.
    """

    data: bytearray = field(default_factory=bytearray)
    synced: int = 0
    named: bool = False
    holes: list[tuple[int, int]] = field(default_factory=list)
    previous: _Content | None = None
    """What a loss of power may bring back, until this is synced."""

    def truncate(self, size: int) -> None:
        del self.data[size:]
        self.synced = min(self.synced, size)
        self.holes = [(start, min(end, size)) for start, end in self.holes if start < size]


class SimulatedDisk:
    """A ``system.disk.Disk``. It counts refused operations, and files whose ends a power loss damaged."""

    def __init__(self, fault_source: FaultSource = no_faults) -> None:
        self.fault_source = fault_source
        self.refused = self.spoilt = 0
        self._contents: dict[Path, _Content] = {}
        self._removed: dict[Path, _Content] = {}
        self._held: dict[Path, SimulatedFile] = {}
        self._boots = 1

    # ── a disk ────────────────────────────────────────────────────────────────────────────────────────────────────

    def files(self, folder: Path) -> dict[str, int]:
        return {
            path.name: len(content.data) for path, content in tuple(self._contents.items()) if path.parent == folder
        }

    def hold(self, path: Path, *, new: bool) -> SimulatedFile:
        if new and path in self._contents:
            raise FileExistsError(errno.EEXIST, "File exists", str(path))
        if not new and path not in self._contents:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        if path in self._held:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable", str(path))
        self._contents.setdefault(path, _Content())
        return self._hold(path)

    def append(self, path: Path, parts: Sequence[bytes | memoryview]) -> None:
        content = self._contents.setdefault(path, _Content())
        whole = b"".join(parts)
        fault = self._befalls(Operation.APPEND, path)
        if fault in (DiskFault.TORN, DiskFault.FULL):
            content.data += whole[: len(whole) // 2]
            raise Died if fault is DiskFault.TORN else OSError(errno.ENOSPC, "No space left on device", str(path))
        content.data += whole
        if fault is DiskFault.AFTER:
            raise Died

    def read(self, path: Path, start: int = 0, count: int = -1) -> bytes:
        if path not in self._contents:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        data = self._contents[path].data
        return bytes(data[start:] if count < 0 else data[start : start + count])

    def sync(self, path: Path) -> None:
        content = self._contents[path]
        fault = self._befalls(Operation.SYNC, path)
        if fault is DiskFault.ERROR:
            content.holes.append((content.synced, len(content.data)))
            raise OSError(errno.EIO, "Input/output error", str(path))
        content.synced, content.named, content.previous = len(content.data), True, None
        self._removed = {gone: old for gone, old in self._removed.items() if gone.parent != path.parent}
        if fault is DiskFault.AFTER:
            raise Died

    def truncate(self, path: Path, size: int) -> None:
        if path not in self._contents:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        self._contents[path].truncate(size)

    def rewrite(self, path: Path, start: int, data: bytes) -> None:
        """Rewrite existing bytes with the same content, which can only affect the holes."""
        content = self._contents[path]
        if content.data[start : start + len(data)] != data:
            raise ValueError(f"{path} is to be changed at {start}")
        content.holes = [hole for hole in content.holes if not start <= hole[0] < hole[1] <= start + len(data)]

    def replace(self, path: Path, data: bytes) -> None:
        """Write beside the file, sync and rename, so that no intermediate state is ever visible."""
        self._replace(path, _Content(bytearray(data), synced=len(data), named=True))

    def replace_held(self, path: Path, data: bytes) -> SimulatedFile:
        """Replace the file, whose new name is durable only once it is synced."""
        if path not in self._held:
            raise ValueError(f"{path} is not held")
        new = _Content(bytearray(data), synced=len(data), previous=self._contents[path])
        self._replace(path, new)
        return self._hold(path)

    def remove(self, path: Path) -> None:
        content = self._contents.pop(path, None)
        if content is not None and content.named:
            self._removed[path] = content

    def boot(self) -> str:
        return str(self._boots)

    # ── what befalls it ───────────────────────────────────────────────────────────────────────────────────────────

    def let_go(self, path: Path, file: SimulatedFile) -> None:
        if self._held.get(path) is file:
            del self._held[path]

    def lose_process(self) -> None:
        """Release all files: their process is gone."""
        self._held.clear()

    def lose_power(self, chance: Random | None = None) -> None:
        """Keep only what was synced. With ``chance``, parts of the rest may survive."""
        self.lose_process()
        self._boots += 1
        for path in sorted(self._contents):
            content = self._contents[path]
            while content.previous is not None and (chance is None or chance.random() < 0.5):
                content = self._contents[path] = content.previous
            content.named, content.previous = content.named or content.previous is not None, None
            rest = len(content.data) - content.synced
            size = content.synced + (chance.randint(0, rest) if chance else 0)
            if not content.named and (chance is None or chance.random() < 0.5):
                del self._contents[path]
                continue
            content.truncate(size)
            for start, end in content.holes:
                content.data[start:end] = bytes(end - start)
            if chance is not None and size > content.synced:
                self.spoilt += _spoil(content, chance)
            content.synced, content.named, content.holes = len(content.data), True, []
        for path in sorted(self._removed):
            if chance is not None and chance.random() < 0.5:
                self._contents.setdefault(path, self._removed[path])
        self._removed.clear()

    def lose_everything(self) -> None:
        """Become another machine's disk, an empty one."""
        self.lose_process()
        self._boots += 1
        self._contents.clear()
        self._removed.clear()

    def _hold(self, path: Path) -> SimulatedFile:
        file = self._held[path] = SimulatedFile(self, path)
        return file

    def _replace(self, path: Path, content: _Content) -> None:
        fault = self._befalls(Operation.REPLACE, path)
        if fault is DiskFault.FULL:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        self._contents[path] = content
        if fault is DiskFault.AFTER:
            raise Died

    def _befalls(self, operation: Operation, path: Path) -> DiskFault | None:
        fault = self.fault_source(operation, path)
        self.refused += fault in (DiskFault.FULL, DiskFault.ERROR)
        if fault is DiskFault.BEFORE:
            raise Died
        return fault


class SimulatedFile:
    """An ``orchestrator.system.disk.HeldFile``."""

    def __init__(self, disk: SimulatedDisk, path: Path) -> None:
        self._disk, self._path, self.closed = disk, path, False

    def append(self, data: bytes) -> None:
        if self.closed:
            raise ValueError(f"{self._path} is closed")
        self._disk.append(self._path, [data])

    def rewrite(self, start: int, data: bytes) -> None:
        self._disk.rewrite(self._path, start, data)

    def truncate(self, size: int) -> None:
        self._disk.truncate(self._path, size)

    def sync(self) -> None:
        if self.closed:
            raise ValueError(f"{self._path} is closed")
        self._disk.sync(self._path)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._disk.let_go(self._path, self)


def _spoil(content: _Content, chance: Random) -> bool:
    """Damage the unsynced end of a file: zeros, or wrong bits. Return whether it was damaged."""
    kind, where = chance.randrange(3), chance.randrange(content.synced, len(content.data))
    if kind == 1:
        content.data[where:] = bytes(len(content.data) - where)
    elif kind == 2:
        content.data[where] ^= 1 << chance.randrange(8)
    return kind > 0


class AtOnce(Executor):
    """An executor that runs work in the thread that submits it."""

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*arguments, **named))
        return done


class StoreFault(StrEnum):
    """The fault of one put. A put is done as a whole or not at all, so a torn one is one that was not done."""

    BEFORE = "before"
    """The process dies before the put, or half way."""
    AFTER = "after"
    """The process dies after the put."""
    DOWN = "down"
    """The store refuses."""
    UNANSWERED = "unanswered"
    """The put is done, but the answer is lost."""


class SimulatedStore:
    """An ``object_store.ObjectStore`` in memory. ``fault_source`` decides the fault of each put, by its object's name.

    With ``stale_count``, listings lack the newest so many objects.
    """

    url = "memory"

    def __init__(self, fault_source: Callable[[str], StoreFault | None] = lambda _: None, stale_count: int = 0) -> None:
        self.objects: dict[str, bytes] = {}
        self.fault_source, self.stale_count = fault_source, stale_count
        self.refused = 0

    def create(self, name: str, content: bytes) -> None:
        self._put(name, content, may_exist=False)

    def put(self, name: str, content: bytes) -> None:
        self._put(name, content, may_exist=True)

    def _put(self, name: str, content: bytes, *, may_exist: bool) -> None:
        fault = self.fault_source(name)
        if fault is StoreFault.BEFORE:
            raise Died
        if fault is StoreFault.DOWN:
            self.refused += 1
            raise OSError(errno.EIO, "the store memory cannot be reached")
        exists = name in self.objects
        if may_exist or not exists:
            self.objects[name] = bytes(content)
        if fault is StoreFault.AFTER:
            raise Died
        if fault is StoreFault.UNANSWERED:
            self.refused += 1
            raise OSError(errno.EIO, "the store memory did not answer in time")
        if exists and not may_exist:
            raise FileExistsError(errno.EEXIST, "The object exists", name)

    def get(self, name: str) -> bytes:
        if name not in self.objects:
            raise FileNotFoundError(errno.ENOENT, "No such object", name)
        return self.objects[name]

    def sizes(self, prefix: str) -> dict[str, int]:
        seen = list(self.objects)[: len(self.objects) - self.stale_count]
        return {name: len(self.objects[name]) for name in sorted(seen) if name.startswith(prefix)}

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            self.objects.pop(name, None)


class FaultyDisk(SimulatedDisk):
    """A disk on which only the journal has faults, as scripted: ``faults`` maps the number of a journal's ``append`` or
    ``sync``, from 1, to its fault.
    """

    def __init__(self, **faults: dict[int, str]) -> None:
        super().__init__(self._scripted)
        self.calls = {"append": 0, "sync": 0}
        self._faults = faults

    def _scripted(self, operation: Operation, path: Path) -> DiskFault | None:
        if path.suffix != SUFFIX:
            return None
        self.calls[operation] += 1
        fault = self._faults.get(operation, {}).get(self.calls[operation])
        return DiskFault(fault) if fault else None
