"""A disk that is mirrored into an object store, operation by operation (``store_log`` has the format, and what holds).

A ``MirroredDisk`` does each operation on the disk below it and notes it. ``sync`` makes all that was noted durable below,
then in the store, as one segment: what is synced is in both, and a caller that waits for the disk waits for the store, too.
The files that the log gives are those of a disk that lost its power between two operations, and the readers of tape and
journal go on from such files.

Responsible for writing the log, for a writer that stops once it is fenced, and for bases in the background. Refuses to know
what the files mean.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from itertools import count, islice
from pathlib import Path

from orchestrator.errors import ConfigurationError, DataError, Fenced
from orchestrator.system.disk import Disk, HeldFile
from orchestrator.system.object_store import FolderObjects, ObjectStore, errors_of_option, open_store
from orchestrator.system.run_folder import SHARDS, STATUS
from orchestrator.system.store_log import (
    DELETED,
    NEWEST,
    REQUESTS_MAX,
    SCHEMA,
    Content,
    Extent,
    Files,
    Kind,
    Operation,
    Piece,
    Segment,
    base_after,
    base_name,
    content_or_none,
    digest_of,
    encode,
    has_log,
    log_name,
    next_name,
    restore,
    row_of,
    sealed,
    size_of,
    take_over,
)

log = logging.getLogger(__name__)
JOBS = "jobs"
"""The folder of a store that has the objects of jobs, each below its name."""
INLINE_BYTES_MAX = 64 << 10
"""Larger contents are objects of their own, put before the segment that names them."""
PIECE_BYTES = 8 << 20
SEGMENT_BYTES_MAX = 8 << 20
BASE_AFTER_BYTES = 8 << 20
BASE_AFTER_SEGMENTS = 1024
"""A recovery reads at most about this many segments: some seconds at 30 ms each, several at a time."""
BASE_AFTER_OBJECTS = 128
"""Superfluous objects go with a base: at most about 1 GiB of them waits for one."""
BASE_RETRY_SEGMENTS = 16
SLOW_S = 5.0
"""From then on a put that is under way is reported."""


class LogWriter:
    """Writes the log from its claim on. Any thread may note and flush.

    ``background`` does work in its own time: bases, and the deletion of what they make superfluous.
    """

    base_after_bytes = BASE_AFTER_BYTES

    def __init__(
        self,
        store: ObjectStore,
        files: Files,
        writer: str,
        requests: Executor,
        background: Callable[[Callable[[], None]], object],
    ) -> None:
        self._store, self._files, self._writer = store, files, writer
        self._requests, self._background = requests, background
        self._noting, self._flushing, self._counting = threading.Lock(), threading.Lock(), threading.Lock()
        self._noted: list[Operation] = []
        self._sizes = dict(files.sizes)
        self._noted_count = self._durable_count = 0
        self._in_flight: tuple[bytes, list[Operation]] | None = None
        self._fence: Fenced | None = None
        self._names = count(1)
        self._base = self._base_tried = files.base
        self._bytes_since_base, self._is_compacting = 0, False
        if len(files.claims) > 1:
            self._bytes_since_base = self.base_after_bytes  # only then what fenced writers left can be collected
        self._since_snapshot: list[Operation] = []
        self._superfluous: set[str] = set()
        self._dropped: set[str] = set()
        self.on_fenced: Callable[[Fenced], None] = lambda _: None
        self.puts = self.put_bytes = 0
        self.put_seconds, self.refusal = 0.0, ""
        self._waiting_since: float | None = None
        self._pieces_since: dict[str, float] = {}

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def waiting_since(self) -> float | None:
        """When the oldest put that is under way began, by the monotonic clock."""
        segment = self._waiting_since
        return min([*self._pieces_since.copy().values(), *([segment] if segment is not None else [])], default=None)

    def size(self, path: str) -> int | None:
        with self._noting:
            return self._sizes.get(path)

    def content_of(self, parts: Sequence[bytes | memoryview]) -> Content:
        """Return the content for an operation. If it is large, it is put into the store first. Raises OSError."""
        if sum(map(len, parts)) <= INLINE_BYTES_MAX:
            return (b"".join(parts),)
        names: list[str] = []
        cut = _cut(parts)
        waiting: deque[Future[Piece]] = deque()
        pieces: list[Piece] = []
        try:
            while True:
                for piece in islice(cut, REQUESTS_MAX - len(waiting)):  # copies of no more than these
                    names.append(self._next_name())
                    waiting.append(self._requests.submit(self._put_piece, piece, names[-1]))
                if not waiting:
                    return tuple(pieces)
                pieces.append(waiting.popleft().result())
        except OSError:
            wait(waiting)
            self._drop(names)
            raise

    @contextmanager
    def written(self, kind: Kind, path: str, parts: Sequence[bytes | memoryview]) -> Iterator[None]:
        """Put the content into the store if it is large, let the body write it to the disk, then note it. Raises OSError.

        If the disk refuses it, the next base removes the content's objects.
        """
        content = self.content_of(parts)
        try:
            yield
        except OSError:
            self._drop(extent.name for extent in content if isinstance(extent, Piece))
            raise
        self.note(kind, path, content)

    def _drop(self, names: Iterable[str]) -> None:
        with self._noting:
            self._dropped |= set(names)

    def note(self, kind: Kind, path: str, content: Content = (), size: int = 0) -> None:
        """Add an operation to those of the next segment. ``size`` is for a truncation."""
        with self._noting:
            before = self._sizes.get(path, 0)
            if kind == "truncate":
                if not self._shortened(path, size):
                    return
                operation = Operation(kind, path, size)
            else:
                operation = Operation(kind, path, before if kind == "append" else 0, content)
            after = {"append": before + size_of(content), "write": size_of(content), "truncate": size}
            if kind == "remove":
                self._sizes.pop(path, None)
            else:
                self._sizes[path] = after[kind]
            self._noted.append(operation)
            self._noted_count += 1

    def _shortened(self, path: str, size: int) -> bool:
        """Forget appends behind ``size`` that are in no segment yet, and return whether more has to be cut off.

        So attempts that are repeated while the store is down do not pile up.
        """
        own = [i for i, operation in enumerate(self._noted) if operation.path == path]
        while own and self._noted[own[-1]].kind == "append" and self._noted[own[-1]].start >= size:
            dropped = self._noted.pop(own.pop())
            self._sizes[path] = dropped.start
            self._dropped |= {extent.name for extent in dropped.content if isinstance(extent, Piece)}
            self._noted_count -= 1
        return self._sizes.get(path, 0) > size

    def flush(self) -> None:
        """Return once all that was noted before is in the store. Raises OSError, and may be repeated; Fenced."""
        with self._noting:
            wanted = self._noted_count
        with self._flushing:
            while self._durable_count < wanted or self._in_flight is not None:
                if self._fence is not None:
                    raise self._fence
                if self._in_flight is None and not self._begin_segment():
                    return
                self._put_segment()
            base = self._due_base()
        if base is not None:
            self._background(base)

    def _begin_segment(self) -> bool:
        """Fix the next segment's content. It stays the same until it is known to be in the store."""
        with self._noting:
            size, taken = 0, 0
            for operation in self._noted:
                size += sum(len(extent) for extent in operation.content if not isinstance(extent, Piece))
                if taken and size > SEGMENT_BYTES_MAX:
                    break
                taken += 1
            operations, self._noted = self._noted[:taken], self._noted[taken:]
        if not operations:
            return False
        segment = Segment(self._files.segment + 1, self._writer, operations=tuple(operations))
        self._in_flight = encode(segment), operations
        return True

    def _put_segment(self) -> None:
        assert self._in_flight is not None
        content, operations = self._in_flight
        name = log_name(self._files.segment + 1)
        self._waiting_since = time.monotonic()
        try:
            self._timed_put(name, content)
        except FileExistsError:
            there = content_or_none(self._store, name)
            if there is None:
                raise OSError(
                    f"the store {self._store.url} says both that {name} exists and that it does not"
                ) from None
            if there != content:
                self._be_fenced()
        finally:
            self._waiting_since = None
        changed = {operation.path for operation in operations if operation.kind != "append"}
        of_these = (extent for operation in operations if operation.path in changed for extent in operation.content)
        before = self._files.objects(changed) | {extent.name for extent in of_these if isinstance(extent, Piece)}
        for operation in operations:
            self._files.apply(operation)
        self._superfluous |= before - self._files.objects(changed)
        self._since_snapshot += operations if self._is_compacting else []
        self._files.segment += 1
        self._durable_count += len(operations)
        self._bytes_since_base += len(content)
        self._in_flight = None

    def _be_fenced(self) -> None:
        self._fence = fenced(self._store, self._files.segment + 1)
        log.critical("fenced: %s", self._fence)
        self.on_fenced(self._fence)
        raise self._fence

    def refuse_fenced(self) -> None:
        """Raise Fenced if another writer has begun, without writing. Raises OSError."""
        with self._flushing:
            if self._in_flight is None and content_or_none(self._store, log_name(self._files.segment + 1)) is not None:
                self._be_fenced()

    def _next_name(self) -> str:
        return f"objects/{self._writer}-{next(self._names):06d}"

    def _put_piece(self, content: bytes, name: str) -> Piece:
        """Put an object. ``name`` is new in each attempt: where it is unknown whether an object was made, it is not used."""
        self._pieces_since[name] = time.monotonic()
        try:
            self._timed_put(name, content)
        finally:
            del self._pieces_since[name]
        return Piece(name, len(content), digest_of(content), len(content))

    def _timed_put(self, name: str, content: bytes) -> None:
        """Create an object and count it. ``refusal`` says why the last put failed; empty once one succeeds."""
        began = time.monotonic()
        try:
            self._store.create(name, content)
        except FileExistsError:
            raise
        except OSError as error:
            self.refusal = error.strerror or str(error)
            raise
        seconds = time.monotonic() - began
        with self._counting:
            self.puts, self.put_bytes = self.puts + 1, self.put_bytes + len(content)
            self.put_seconds, self.refusal = self.put_seconds + seconds, ""

    # ── retention ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _due_base(self) -> Callable[[], None] | None:
        """Return the work for a base if one is due. Requires ``_flushing`` to be held."""
        since, waste = self._files.segment - self._base_tried, len(self._superfluous) + len(self._dropped)
        is_due = (
            self._bytes_since_base >= self.base_after_bytes
            or since >= BASE_AFTER_SEGMENTS
            or (waste >= BASE_AFTER_OBJECTS and since >= BASE_RETRY_SEGMENTS)
        )
        if self._is_compacting or not is_due:
            return None
        self._is_compacting, self._bytes_since_base, self._base_tried = True, 0, self._files.segment
        self._since_snapshot = []
        snapshot = Files(self._files.segment, self._files.claims, self._files.files)
        with self._noting:
            self._superfluous |= self._dropped
            self._dropped = set()
        superfluous, self._superfluous = self._superfluous, set()
        return lambda: self._compact(snapshot, superfluous)

    def _compact(self, snapshot: Files, superfluous: set[str]) -> None:
        try:
            is_done = self._write_base(snapshot, superfluous)
        except (OSError, DataError) as error:
            log.warning("older segments are kept for longer, because a base cannot be written: %s", error)
            is_done = False
        finally:
            self._is_compacting = False
        if not is_done:
            with self._flushing:
                self._superfluous |= superfluous

    def _write_base(self, snapshot: Files, superfluous: set[str]) -> bool:
        """Write a base and delete what it makes superfluous. Return False if another writer's base came first."""
        pieces = {path: self._pieces_of(content) for path, content in snapshot.files.items()}
        rows = {path: [row_of(piece) for piece in own] for path, own in pieces.items()}
        about = {"schema": SCHEMA, "segment": snapshot.segment, "claims": snapshot.claims, "files": rows}
        self._store.create(base_name(snapshot.segment), sealed(json.dumps(about).encode() + b"\n"))
        own = str(snapshot.segment).encode()
        before = self._base
        while True:
            with suppress(FileExistsError):
                self._store.create(next_name(before), own)
            later = base_after(self._store, before)
            if later == snapshot.segment:
                break
            if later is None or later > snapshot.segment:
                return False  # a successor is ahead: all that is here is its own business
            before = later
        self._store.put(NEWEST, own)
        with self._flushing:
            self._superfluous |= self._go_on_from(Files(snapshot.segment, snapshot.claims, pieces))
            first, self._base = self._base, snapshot.segment
        segments = (n for n in range(first + 1, snapshot.segment + 1) if n not in set(snapshot.claims))
        self._store.delete([*map(log_name, segments), *sorted(superfluous), *([base_name(first)] if first else [])])
        return True

    def _pieces_of(self, content: Iterable[Extent]) -> list[Piece]:
        """Return the content as objects only: what came inline between two of them becomes one."""
        pieces: list[Piece] = []
        inline: list[bytes] = []

        def put_inline() -> None:
            pieces.extend(self._put_piece(piece, self._next_name()) for piece in _cut(inline))
            inline.clear()

        for extent in content:
            if not isinstance(extent, Piece):
                inline.append(extent)
                continue
            if inline:
                put_inline()
            pieces.append(extent)
        put_inline()
        return pieces

    def _go_on_from(self, base: Files) -> set[str]:
        """Have the files as a reader of this base sees them; return the base's objects that are needed no more since.

        Only so two writers agree on what is superfluous, when one takes over while the other is still deleting.
        """
        of_base = base.objects()
        for operation in self._since_snapshot:
            base.apply(operation)
        base.segment = self._files.segment
        self._files = base
        return of_base - base.objects()


def fenced(store: ObjectStore, number: int) -> Fenced:
    """Return the error of a writer that finds its next segment taken."""
    return Fenced(
        detail=f"Another process has begun segment {number} of the log in {store.url}.",
        remedy="It continues from there; this one stops.",
    )


def _cut(parts: Sequence[bytes | memoryview]) -> Iterator[bytes]:
    """Yield the parts' bytes in pieces of ``PIECE_BYTES``, the last one shorter."""
    piece = bytearray()
    for part in parts:
        rest = memoryview(part).cast("B")
        while rest:
            room = PIECE_BYTES - len(piece)
            piece += rest[:room]
            rest = rest[room:]
            if len(piece) == PIECE_BYTES:
                yield bytes(piece)
                piece = bytearray()
    if piece:
        yield bytes(piece)


# ── the disk ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class MirroredDisk:
    """A ``Disk`` for the files below ``folder``. See the top of this module.

    ``replace`` is durable on the disk below when it returns, and in the store before all that is noted later.
    """

    def __init__(self, below: Disk, writer: LogWriter, folder: Path) -> None:
        self._below, self.writer, self._folder = below, writer, folder

    def files(self, folder: Path) -> dict[str, int]:
        return self._below.files(folder)

    def hold(self, path: Path, *, new: bool) -> HeldFile:
        return _MirroredFile(self._below.hold(path, new=new), self.writer, self._name(path))

    def append(self, path: Path, parts: Sequence[bytes | memoryview]) -> None:
        with self.writer.written("append", self._name(path), parts):
            self._below.append(path, parts)

    def read(self, path: Path, start: int = 0, count: int = -1) -> bytes:
        return self._below.read(path, start, count)

    def sync(self, path: Path) -> None:
        self._below.sync(path)
        self.writer.flush()

    def truncate(self, path: Path, size: int) -> None:
        self._below.truncate(path, size)
        self.writer.note("truncate", self._name(path), size=size)

    def replace(self, path: Path, data: bytes) -> None:
        with self.writer.written("write", self._name(path), [data]):
            self._below.replace(path, data)

    def replace_held(self, path: Path, data: bytes) -> HeldFile:
        with self.writer.written("write", self._name(path), [data]):
            file = self._below.replace_held(path, data)
        return _MirroredFile(file, self.writer, self._name(path))

    def remove(self, path: Path) -> None:
        self._below.remove(path)
        if self.mirrors(path):
            self.writer.note("remove", self._name(path))

    def boot(self) -> str:
        return self._below.boot()

    def keep(self, path: Path) -> None:
        """Mirror a file that another module wrote, once. Does nothing if there is none."""
        if not self.mirrors(path):
            with suppress(FileNotFoundError):
                self.writer.note("write", self._name(path), self.writer.content_of([self._below.read(path)]))

    def mirrors(self, path: Path) -> bool:
        """Return whether the log has this file."""
        return self.writer.size(self._name(path)) is not None

    @property
    def trouble(self) -> str | None:
        """Return what the store refuses, or has not done for a while, or None."""
        since = self.writer.waiting_since
        waited = time.monotonic() - since if since is not None else 0.0
        if waited > SLOW_S:
            return f"the store {self.writer.url} has not answered for {waited:.0f} s"
        return self.writer.refusal or None

    def _name(self, path: Path) -> str:
        return path.relative_to(self._folder).as_posix()


class _MirroredFile:
    """A held file. An append is noted once it is whole below."""

    def __init__(self, below: HeldFile, writer: LogWriter, name: str) -> None:
        self._below, self._writer, self._name = below, writer, name

    def append(self, data: bytes) -> None:
        with self._writer.written("append", self._name, [data]):
            self._below.append(data)

    def rewrite(self, start: int, data: bytes) -> None:
        self._below.rewrite(start, data)

    def truncate(self, size: int) -> None:
        self._below.truncate(size)
        self._writer.note("truncate", self._name, size=size)

    def sync(self) -> None:
        self._below.sync()
        self._writer.flush()

    def close(self) -> None:
        self._below.close()

    @property
    def closed(self) -> bool:
        return self._below.closed


def shard_log(job: str, number: int) -> str:
    """Return the name of the log of a job's shard in another process, for ``JobObjects``."""
    return f"{job}/{SHARDS}/{number}"


class JobObjects(FolderObjects):
    """The objects of one log in a store: that of a job, or of one of its shards."""

    def __init__(self, store: ObjectStore, job: str) -> None:
        super().__init__(store, f"{JOBS}/{job}")


def delete_log(store: ObjectStore, job: str) -> None:
    """Remove the log of a job that was deleted. Raises OSError, and may be repeated.

    The mark stays for `atoll store gc`, which removes what is left then: a listing may be stale, and a synchroniser that was
    believed dead may still write.
    """
    objects = JobObjects(store, job)
    objects.put(DELETED, b"")
    objects.delete(name for name in objects.sizes() if name != DELETED)


def refuse_to_leave_logs(runs: Path, before: str | None, url: str) -> None:
    """Raise ConfigurationError if a job that has not ended has its log in the store ``before``, and none at ``url``.

    It would begin anew, or fail. If the store before cannot be read, no such job can go on, and any store is accepted.
    """
    if before is None or before == url or not runs.is_dir():
        return
    old, new = open_store(before), open_store(url)
    try:
        jobs = [path.name for path in sorted(runs.iterdir()) if path.is_dir() and not (path / STATUS).exists()]
        logs = [job for job in jobs if has_log(JobObjects(old, job))]
    except OSError as error:
        log.warning("the store before is not looked at for jobs: %s", error)
        return
    with errors_of_option():
        left = [job for job in logs if not has_log(JobObjects(new, job))]
    if left:
        raise ConfigurationError(
            detail=f"--store {url} has no log of {', '.join(left[:3])}, which has not ended and has its log in {before}. "
            "Give that store, end or delete the job first, or copy the store's content."
        )


def mirrored(
    store: ObjectStore,
    below: Disk,
    folder: Path,
    requests: Executor | None = None,
    background: Callable[[Callable[[], None]], object] | None = None,
) -> MirroredDisk:
    """Take over the log in ``store``, restore the files of ``folder`` from it, and return the disk that goes on with it.

    Raises OSError, DataError, Fenced if another process takes over meanwhile and removes what this one still reads.
    """
    requests = requests or ThreadPoolExecutor(REQUESTS_MAX, "store")
    writer = secrets.token_hex(8)
    files = take_over(store, writer, requests)
    try:
        read = restore(files, store, below, folder, requests)
    except DataError as error:
        if content_or_none(store, log_name(files.segment + 1)) is not None:  # its claim, which is never deleted
            raise fenced(store, files.segment + 1) from error
        raise
    log.info("the log in %s has %d segments; %d bytes were read from the store", store.url, files.segment, read)
    run = background or ThreadPoolExecutor(1, "bases").submit
    return MirroredDisk(below, LogWriter(store, files, writer, requests, run), folder)
