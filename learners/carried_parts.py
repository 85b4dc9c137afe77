"""A checkpoint's files between an island and the machine of its synchroniser, where they share no folder.

    saving      PartSpool    this process writes files; the synchroniser asks for them window by window and stores them
    restoring   HeadStore    this process reads files of the checkpoint on that machine window by window

Windows travel by the job's channel. At most ``WINDOWS_MAX`` are held here, so a slow line or a slow disk stops the thread
that writes, and never the loop that trains. What is in the files, and where they go, is known elsewhere. Nothing here uses
Ray.
"""

from __future__ import annotations

import io
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import IO

from learners.handed_over import HandedOver
from orchestrator.actors import PART_ENDS, PartWindow, SavedPlace
from orchestrator.channel.endpoint import Payload
from orchestrator.channel.frames import SHARD
from orchestrator.checkpoints.folder import FileTarget, Folder
from orchestrator.checkpoints.manifest import manifest_digest
from orchestrator.checkpoints.reading import manifest_of
from orchestrator.checkpoints.writing import is_place
from orchestrator.core.vocabulary import Epoch
from orchestrator.errors import AtollError, InfrastructureError, in_words
from orchestrator.system.roots import AllowedRoots

log = logging.getLogger(__name__)

WINDOW_BYTES = 16 << 20
WINDOWS_MAX = 3
"""The one that is being pulled, the next one, and the one that is being filled."""
PATIENCE_S = 180.0
"""A part is given up when the synchroniser has not asked for so long. It asks at least every few seconds."""


ReadWindow = Callable[[str, int, int], tuple[int, memoryview]]
"""Returns a file's size, and its bytes from one offset to another or to its end."""


class CarriedParts:
    """The ways of one process to the checkpoints of its job: the folder itself, or through the channel.

    ``reader`` returns the way to read files on the machine of the synchroniser with this name.
    """

    def __init__(self, handed_over: HandedOver, reader: Callable[[Epoch, str], ReadWindow]) -> None:
        self._handed_over, self._reader = handed_over, reader
        self._lock = threading.Lock()
        self._spools: dict[int, PartSpool] = {}
        """The newest checkpoint's, by its number."""

    def spool(self, epoch: Epoch, checkpoint: int) -> PartSpool:
        """Return the spool of this checkpoint. An earlier one is given up."""
        with self._lock:
            for number in [number for number in self._spools if number < checkpoint]:
                self._spools.pop(number).end(f"checkpoint {checkpoint} has begun")
            if checkpoint not in self._spools:
                self._spools[checkpoint] = PartSpool(partial(self._handed_over.payload, epoch))
            return self._spools[checkpoint]

    def stored(self, epoch: Epoch, checkpoint: int, problem: str) -> None:
        """Take the synchroniser's answer (``PartSpool.stored``)."""
        self.spool(epoch, checkpoint).stored(problem)
        self._handed_over.withdraw_unheld()

    @contextmanager
    def target(self, roots: AllowedRoots, epoch: Epoch, checkpoint: int, url: str) -> Iterator[FileTarget]:
        """Yield the checkpoint's folder, or the way to it if this machine does not see it. At the end all is durable."""
        spool = self.spool(epoch, checkpoint)
        try:
            folder = Folder.within(roots, url)
            if not folder.is_local or is_place(folder, spool.place()):
                spool.end()
                yield folder
                return
            log.info("%s is not seen here; the synchroniser gets this part of checkpoint %d", url, checkpoint)
            yield spool
            spool.finish()
        except BaseException as error:
            spool.end(in_words(error))
            raise

    @contextmanager
    def saved(self, roots: AllowedRoots, epoch: Epoch, place: SavedPlace) -> Iterator[Folder]:
        """Yield the folder of a checkpoint to restore from, on this machine or on the synchroniser's."""
        try:
            folder = Folder.within(roots, place.url)
            is_here = not folder.is_local or manifest_digest(manifest_of(folder)) == place.digest
        except (AtollError, OSError):
            is_here = False
        if is_here:
            yield folder
            return
        log.info("%s is not seen here; it is read from the synchroniser's machine", place.url)
        window = self._reader(epoch, place.synchroniser)
        try:
            yield Folder.through(HeadStore(place.url, window), place.url)
        finally:
            window("", 0, 0)


class PartSpool:
    """The files of one process for one checkpoint, as a ``FileTarget``. ``hand`` serves a window over the channel."""

    def __init__(self, hand: Callable[[str, memoryview], Payload]) -> None:
        self._hand = hand
        self._changed = threading.Condition()
        self._windows: dict[int, tuple[str, Payload]] = {}
        self._count = self._asked = 0
        self._asked_at = time.monotonic()
        self._place: str | None = None
        self._all_written = self._stored = False
        self._problem = ""

    # ── the synchroniser's calls ──────────────────────────────────────────────────────────────────────────────────

    def window(self, place: str, number: int, timeout_s: float) -> PartWindow | None:
        """Return this window, None if it is not there in time, or ``PART_ENDS`` behind the last one.

        ``place`` is the text by which the checkpoint's folder is recognised. Windows below ``number`` − 1 have arrived.
        Raises InfrastructureError if the part was given up here.
        """
        with self._changed:
            self._place, self._asked, self._asked_at = place, max(self._asked, number), time.monotonic()
            for arrived in [window for window in self._windows if window < number - 1]:
                del self._windows[arrived]
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: number in self._windows or self._all_written or bool(self._problem), timeout_s
            )
            self._asked_at = time.monotonic()
            if self._problem:
                raise InfrastructureError(detail=self._problem)
            if number in self._windows:
                name, payload = self._windows[number]
                return PartWindow(name, payload.byte_count, payload.carried(SHARD))
            return PART_ENDS if self._all_written and number >= self._count else None

    def stored(self, problem: str) -> None:
        """Take the answer of the synchroniser: all files are on its disk, or the problem."""
        with self._changed:
            self._stored, self._problem = not problem, self._problem or problem
            self._windows.clear()
            self._changed.notify_all()

    # ── the thread that writes ────────────────────────────────────────────────────────────────────────────────────

    def place(self) -> str:
        """Return the text by which the checkpoint's folder is recognised, once the synchroniser has said it."""
        with self._changed:
            self._wait(lambda: self._place is not None)
            assert self._place is not None
            return self._place

    def sub(self, name: str) -> PartSpool:
        """Return itself: the synchroniser knows whose part this is."""
        return self

    def write(self, name: str, content: bytes | memoryview) -> None:
        self.write_all(name, [content])

    def write_all(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Give the file to the synchroniser, as fast as that stores it. Raises OSError with the reason if it cannot."""
        for content in _windows(chunks):
            with self._changed:
                self._wait(lambda: self._count < self._asked + WINDOWS_MAX - 1)
            payload = self._hand(f"part/{name}/{self._count}", content)
            with self._changed:
                self._windows[self._count] = (name, payload)
                self._count += 1
                self._changed.notify_all()

    def sync(self) -> None:
        """Do nothing: the synchroniser stores each file durably before it takes the next one."""

    def finish(self) -> None:
        """Return once all files are on the synchroniser's disk. Raises OSError with the reason if they are not."""
        with self._changed:
            self._all_written = True
            self._changed.notify_all()
            self._wait(lambda: self._stored)

    def end(self, problem: str = "") -> None:
        """Give nothing any more: this process wrote the files itself, or gave them up because of the problem."""
        with self._changed:
            self._all_written, self._problem = True, self._problem or problem
            self._windows.clear()
            self._changed.notify_all()

    def _wait(self, situation: Callable[[], bool]) -> None:
        """Wait for the situation. Requires ``_changed`` to be held. Raises OSError if the part is given up meanwhile."""
        while not (self._problem or situation()):
            if time.monotonic() - self._asked_at > PATIENCE_S:
                self._problem = f"the synchroniser has not asked for this part for {PATIENCE_S:g} s"
                self._windows.clear()
            self._changed.wait(1.0)
        if self._problem:
            raise OSError(self._problem)


def _windows(chunks: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    """Cut and join the chunks to windows of WINDOW_BYTES, at least one. Whole windows of a chunk are not copied."""
    joined, is_empty = bytearray(), True
    for chunk in chunks:
        rest = memoryview(chunk).cast("B")
        while rest:
            if not joined and len(rest) >= WINDOW_BYTES:
                part, rest = rest[:WINDOW_BYTES], rest[WINDOW_BYTES:]
                yield part
                is_empty = False
                continue
            part = rest[: WINDOW_BYTES - len(joined)]
            joined += part
            rest = rest[len(part) :]
            if len(joined) == WINDOW_BYTES:
                yield memoryview(joined)
                joined, is_empty = bytearray(), False
    if joined or is_empty:
        yield memoryview(joined)


class HeadStore:
    """The files below ``path`` on the synchroniser's machine (``checkpoints.folder.RemoteStore``)."""

    def __init__(self, path: str, read: ReadWindow) -> None:
        self._path, self._read = path.strip("/"), read

    def open(self, path: str, mode: str) -> IO[bytes]:
        return io.BufferedReader(_HeadFile(self._name(path), self._read), WINDOW_BYTES)

    def size(self, path: str) -> int:
        return self._read(self._name(path), 0, 0)[0]

    def _name(self, path: str) -> str:
        return path.strip("/").removeprefix(f"{self._path}/")


class _HeadFile(io.RawIOBase):
    def __init__(self, name: str, read: ReadWindow) -> None:
        super().__init__()
        self._name, self._read_window = name, read
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at}.get(whence)
        self._at = (self._read_window(self._name, 0, 0)[0] if base is None else base) + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, target: object) -> int:
        into = memoryview(target).cast("B")  # type: ignore[arg-type]
        _, content = self._read_window(self._name, self._at, self._at + min(len(into), WINDOW_BYTES))
        into[: len(content)] = content
        self._at += len(content)
        return len(content)
