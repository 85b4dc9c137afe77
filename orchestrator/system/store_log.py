"""The durable log of one job's folder in an object store: operations on its files, in one order.

    JOB/log/NNNNNNNNNNNN      segments: operations on files, in one order, numbered from 1 without a gap
    JOB/objects/WRITER-N      pieces of large contents, which segments name
    JOB/base/NNNNNNNNNNNN     the files as they are after that segment, so that older segments can go
    JOB/next/NNNNNNNNNNNN     the base that follows this one; of base 0, which has no files, the first
    JOB/newest                a base that was the newest once: where to begin
    JOB/deleted               the job was deleted: nothing here is needed any more

**One writer.** A writer begins by creating the segment that its predecessor would write next (*its claim*). Creating is
exclusive, so the predecessor cannot write another word: it finds that segment under its own number and is fenced. No clock
and no lease is needed, and no listing is trusted: the log's end is where a claim succeeds.

**Retention.** Segments up to a base are deleted. A reader must not take a deleted segment for the log's end. So the writer
first creates ``next`` of the base before, and deletes only then. A claim counts only if its base has no ``next`` afterwards.
Claims are never deleted: a writer that slept finds its successor's, however late it wakes. Only ``newest`` is ever replaced,
and may be as old as it likes.

Responsible for all of that, and for refusing damaged or missing objects. Refuses to know what the files mean.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

from orchestrator.errors import DataError, InfrastructureError
from orchestrator.system.disk import Disk
from orchestrator.system.object_store import ObjectStore

SCHEMA = "atoll-log/1"
READ_AHEAD_MAX = 32
REQUESTS_MAX = 8
ATTEMPTS_MAX = 20
_OBJECT = re.compile(r"objects/[0-9a-z]+-[0-9]+")


@dataclass(frozen=True, slots=True)
class Piece:
    """The first ``used`` bytes of an object of ``size`` bytes with this digest."""

    name: str
    size: int
    digest: str
    used: int


Extent: TypeAlias = bytes | Piece
Content: TypeAlias = tuple[Extent, ...]
Kind: TypeAlias = Literal["append", "write", "truncate", "remove"]


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation on one file. ``start`` is the file's size before an append, and after a truncation."""

    kind: Kind
    path: str
    start: int = 0
    content: Content = ()


class Files:
    """The files of the folder as the log has them, up to ``segment``, read from ``base`` on. ``sizes`` are theirs in bytes.

    ``claims`` are the segments with which writers began.
    """

    def __init__(
        self, segment: int = 0, claims: Iterable[int] = (), files: Mapping[str, Sequence[Extent]] | None = None
    ) -> None:
        self.segment, self.claims, self.base = segment, list(claims), segment
        self.files: dict[str, list[Extent]] = {path: list(content) for path, content in (files or {}).items()}
        self.sizes = {path: size_of(extents) for path, extents in self.files.items()}

    def apply(self, operation: Operation) -> None:
        """Raises DataError for an operation that does not fit."""
        if operation.kind == "remove":
            self.files.pop(operation.path, None)
            self.sizes.pop(operation.path, None)
            return
        if operation.kind == "write":
            self.files[operation.path] = list(operation.content)
            self.sizes[operation.path] = size_of(operation.content)
            return
        extents, size = self.files.setdefault(operation.path, []), self.sizes.get(operation.path, 0)
        if operation.kind == "append":
            if size != operation.start:
                raise DataError(
                    detail=f"The log in the store does not fit together: {operation.path} has {size:,} bytes and goes on at "
                    f"{operation.start:,}. Restore the store from a copy."
                )
            extents.extend(operation.content)
            self.sizes[operation.path] = size + size_of(operation.content)
            return
        surplus = size - operation.start
        self.sizes[operation.path] = min(size, operation.start)
        while surplus > 0:
            last = extents.pop()
            length = length_of(last)
            if length > surplus:
                used = length - surplus
                extents.append(replace(last, used=used) if isinstance(last, Piece) else last[:used])
            surplus -= length

    def objects(self, paths: Iterable[str] | None = None) -> set[str]:
        """Return the names of the objects that the files at these paths consist of, or all files."""
        of_paths = self.files.values() if paths is None else (self.files.get(path, ()) for path in paths)
        return {extent.name for extents in of_paths for extent in extents if isinstance(extent, Piece)}


def length_of(extent: Extent) -> int:
    return extent.used if isinstance(extent, Piece) else len(extent)


def size_of(extents: Iterable[Extent]) -> int:
    return sum(map(length_of, extents))


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment: its writer's claim, or operations."""

    number: int
    writer: str
    is_claim: bool = False
    operations: tuple[Operation, ...] = ()


def log_name(number: int) -> str:
    return f"log/{number:012d}"


def base_name(number: int) -> str:
    return f"base/{number:012d}"


def next_name(number: int) -> str:
    return f"next/{number:012d}"


NEWEST = "newest"
DELETED = "deleted"


def encode(segment: Segment) -> bytes:
    """Return a digest, a line that describes the segment, and its inline bytes."""
    rows, inline = [], []
    for operation in segment.operations:
        rows.append([operation.kind, operation.path, operation.start, [row_of(extent) for extent in operation.content]])
        inline += [extent for extent in operation.content if not isinstance(extent, Piece)]
    about = {
        "schema": SCHEMA,
        "segment": segment.number,
        "writer": segment.writer,
        "claim": segment.is_claim,
        "operations": rows,
    }
    return sealed(json.dumps(about, separators=(",", ":")).encode() + b"\n" + b"".join(inline))


def decode(name: str, raw: bytes) -> Segment:
    """Raises DataError unless these bytes are a whole segment of this format."""
    about, inline = opened(name, raw)
    try:
        operations, at = [], 0
        for kind, path, start, rows in about["operations"]:
            content: list[Extent] = []
            for row in rows:
                if isinstance(row, int):
                    content.append(inline[at : at + row])
                    at += row
                else:
                    content.append(_piece(row))
            operations.append(Operation(kind, _path(path), start, tuple(content)))
        return Segment(about["segment"], about["writer"], about["claim"], tuple(operations))
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(detail=f"{name} in the store is no segment of a log: {error!r}.") from error


def _path(path: Any) -> str:
    """Return the path of a file below the folder. Raises ValueError for one that leads out of it."""
    if not isinstance(path, str) or not path or "\0" in path or {"", ".", ".."} & set(path.split("/")):
        raise ValueError(f"{path!r} is no path of a file in the folder")
    return path


def _piece(row: Any) -> Piece:
    """Raises ValueError for an object that no writer made: a name that leads elsewhere would be read, and deleted."""
    name, size, digest, used = row
    if not isinstance(name, str) or not _OBJECT.fullmatch(name) or not 0 <= used <= size:
        raise ValueError(f"{name!r} with {used!r} of {size!r} bytes is no object of the log")
    return Piece(name, size, digest, used)


def row_of(extent: Extent) -> Any:
    return [extent.name, extent.size, extent.digest, extent.used] if isinstance(extent, Piece) else len(extent)


def sealed(body: bytes) -> bytes:
    return digest_of(body).encode() + b"\n" + body


def opened(name: str, raw: bytes) -> tuple[dict[str, Any], bytes]:
    digest, _, body = raw.partition(b"\n")
    line, _, rest = body.partition(b"\n")
    try:
        about = json.loads(line) if digest_of(body).encode() == digest else None
    except (ValueError, RecursionError):
        about = None
    if not isinstance(about, dict) or about.get("schema") != SCHEMA:
        raise DataError(
            detail=f"{name} in the store is damaged, or of another format than {SCHEMA!r}: it begins with {raw[:40]!r}. "
            "Restore it from a copy."
        )
    return about, rest


def digest_of(content: bytes | memoryview) -> str:
    return blake2b(content, digest_size=16).hexdigest()


# ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def content_or_none(store: ObjectStore, name: str) -> bytes | None:
    """Return an object's content, or None if there is none."""
    try:
        return store.get(name)
    except FileNotFoundError:
        return None


def has_log(store: ObjectStore) -> bool:
    """Return whether a writer has ever begun here: its claim is never deleted."""
    return content_or_none(store, log_name(1)) is not None


def newest_base(store: ObjectStore) -> Files:
    """Return the files as of the newest base; of a log without one, no files. Raises DataError, OSError."""
    number = max(0, _number(NEWEST, content_or_none(store, NEWEST)) or 0)
    while True:
        while (later := base_after(store, number)) is not None:
            number = later
        if number == 0:
            return Files()
        if (raw := content_or_none(store, base_name(number))) is not None:
            return _base(base_name(number), raw)
        if base_after(store, number) is None:
            raise DataError(detail=f"{base_name(number)} is missing in {store.url}. Restore it from a copy.")


def base_after(store: ObjectStore, number: int) -> int | None:
    """Return the base that follows this one, None if it is the newest. Raises DataError, OSError."""
    later = _number(next_name(number), content_or_none(store, next_name(number)))
    if later is not None and later <= number:
        raise DataError(detail=f"{next_name(number)} in {store.url} leads back to {later}. Restore it from a copy.")
    return later


def _number(name: str, raw: bytes | None) -> int | None:
    if raw is None:
        return None
    try:
        return int(raw[:32])
    except ValueError as error:
        raise DataError(
            detail=f"{name} in the store has {raw[:32]!r}, not a number. Restore it from a copy."
        ) from error


def segments_after(store: ObjectStore, number: int, readers: Executor) -> Iterator[Segment]:
    """Yield the segments after ``number`` up to the log's end, as far as that can be seen. Raises DataError for a gap.

    A listing is used only against the end: a later segment in it shows that the one that is missing is lost.
    """
    window = 1
    while True:
        names = [log_name(n) for n in range(number + 1, number + 1 + window)]
        read = list(readers.map(lambda name: content_or_none(store, name), names))
        for name, raw in zip(names, read, strict=True):
            if raw is None:
                if _goes_on(store, name) and content_or_none(store, name) is None:
                    raise DataError(
                        detail=f"{name} in {store.url} is missing, but later segments are there. Restore it from a copy."
                    )
                return
            yield decode(name, raw)
            number += 1
        window = min(2 * window, READ_AHEAD_MAX)


def _goes_on(store: ObjectStore, name: str) -> bool:
    """Return whether a segment after this one is listed. Names of segments sort as their numbers do."""
    return any(later > name for later in store.sizes("log/"))


def read_files(store: ObjectStore, readers: Executor) -> Files:
    """Return the files as of the log's end, without a claim: a writer may go on. Raises DataError for a damaged log."""
    for _ in range(ATTEMPTS_MAX):
        files = newest_base(store)
        base = files.segment
        try:
            _follow(files, store, readers)
        except DataError:
            if base_after(store, base) is None:
                raise
            continue
        if base_after(store, base) is None:
            return files
    raise InfrastructureError(detail=f"The log in {store.url} is compacted faster than it can be read. Try again.")


def take_over(store: ObjectStore, writer: str, readers: Executor) -> Files:
    """Become the log's only writer, and return the files as its predecessors left them. Raises OSError, DataError."""
    for _ in range(ATTEMPTS_MAX):
        files = newest_base(store)
        base, is_claimed = files.segment, False
        try:
            while not is_claimed:
                _follow(files, store, readers)
                is_claimed = _claim(store, files.segment + 1, writer)
        except DataError:
            if base_after(store, base) is None:
                raise
            continue
        if base_after(store, base) is not None:
            continue  # a deleted segment was taken for the log's end: what was created there belongs to no log
        files.segment += 1
        files.claims.append(files.segment)
        return files
    raise InfrastructureError(detail=f"The log in {store.url} is compacted faster than it can be read. Try again.")


def _follow(files: Files, store: ObjectStore, readers: Executor) -> None:
    for segment in segments_after(store, files.segment, readers):
        if segment.number != files.segment + 1:
            raise DataError(detail=f"{log_name(files.segment + 1)} in the store is segment {segment.number}.")
        if segment.is_claim:
            files.claims.append(segment.number)
        for operation in segment.operations:
            files.apply(operation)
        files.segment = segment.number


def _claim(store: ObjectStore, number: int, writer: str) -> bool:
    """Create the segment with which this writer begins. Return False if another was faster."""
    claim = encode(Segment(number, writer, is_claim=True))
    try:
        store.create(log_name(number), claim)
    except FileExistsError:
        return content_or_none(store, log_name(number)) == claim  # the answer to an earlier attempt was lost
    return True


def _base(name: str, raw: bytes) -> Files:
    about, _ = opened(name, raw)
    try:
        files = {_path(path): tuple(map(_piece, rows)) for path, rows in about["files"].items()}
        return Files(about["segment"], about["claims"], files)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(detail=f"{name} in the store is no base of a log: {error!r}.") from error


def piece_of(store: ObjectStore, piece: Piece) -> bytes:
    """Return the used bytes of an object. Raises DataError if it is missing or damaged."""
    try:
        content = store.get(piece.name)
    except FileNotFoundError as error:
        raise DataError(
            detail=f"{piece.name} is missing in {store.url}, but the log needs it. Restore it from a copy."
        ) from error
    if len(content) != piece.size or digest_of(content) != piece.digest:
        raise DataError(
            detail=f"{piece.name} in {store.url} is damaged: {len(content):,} bytes with the digest {digest_of(content)}, "
            f"not {piece.size:,} with {piece.digest}. Restore it from a copy."
        )
    return content[: piece.used]


def restore(files: Files, store: ObjectStore, disk: Disk, folder: Path, readers: Executor) -> int:
    """Give the folder's files the content that the log has, and return the bytes that had to be read from the store.

    What the disk has of it already is compared, and kept. Raises OSError, DataError.
    """
    read = 0
    for path, extents in sorted(files.files.items()):
        target = folder / path
        size, size_here = disk.files(target.parent).get(target.name), 0
        missing = list(extents)
        while missing and size is not None and _is_there(disk, target, size_here, missing[0]):
            size_here += length_of(missing.pop(0))
        if size is None:
            disk.append(target, [b""])
        elif size > size_here:
            disk.truncate(target, size_here)
        contents = _in_order(missing, store, readers)
        for content in contents:
            disk.append(target, [content])
        read += size_of(extent for extent in missing if isinstance(extent, Piece))
        disk.sync(target)
    return read


def content_of(files: Files, path: str, store: ObjectStore, readers: Executor) -> bytes:
    """Return a file's content as the log has it. Raises KeyError if there is no such file, OSError, DataError."""
    return b"".join(_in_order(files.files[path], store, readers))


def _in_order(extents: Sequence[Extent], store: ObjectStore, readers: Executor) -> Iterator[bytes]:
    """Yield the contents, with a few of them on their way at a time."""
    waiting: list[Future[bytes]] = []
    rest = iter(extents)
    while True:
        for extent in islice(rest, REQUESTS_MAX - len(waiting)):
            waiting.append(readers.submit(_bytes_of, store, extent))
        if not waiting:
            return
        yield waiting.pop(0).result()


def _bytes_of(store: ObjectStore, extent: Extent) -> bytes:
    return piece_of(store, extent) if isinstance(extent, Piece) else extent


def _is_there(disk: Disk, path: Path, start: int, extent: Extent) -> bool:
    content = disk.read(path, start, length_of(extent))
    if isinstance(extent, Piece):
        return extent.used == extent.size == len(content) and digest_of(content) == extent.digest
    return content == extent


# ── care ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Condition:
    """Describe a log: its last segment and newest base, the bytes of its files, and what a recovery would fail at."""

    segment: int
    base: int
    file_count: int
    file_bytes: int
    problems: tuple[str, ...]


def examine(store: ObjectStore, readers: Executor, progress: Callable[[int, int], None]) -> Condition:
    """Read all that a recovery would need, and compare digests. ``progress`` gets the objects read, and how many there are.

    Writes nothing, and fences nobody. Raises OSError.
    """
    try:
        files = read_files(store, readers)
    except DataError as error:
        return Condition(0, 0, 0, 0, (str(error),))
    pieces = [extent for extents in files.files.values() for extent in extents if isinstance(extent, Piece)]
    problems = []
    for number, problem in enumerate(readers.map(lambda piece: _problem_of(store, piece), pieces), start=1):
        problems += [problem] if problem else []
        progress(number, len(pieces))
    if problems and base_after(store, files.base) is not None:
        return examine(store, readers, progress)  # a base came meanwhile, and what was missing is needed no more
    if files.segment == 0:
        problems.append(f"{log_name(1)}, which begins every log, is missing in {store.url}. Restore it from a copy.")
    return Condition(files.segment, files.base, len(files.sizes), sum(files.sizes.values()), tuple(problems))


def _problem_of(store: ObjectStore, piece: Piece) -> str:
    try:
        piece_of(store, piece)
    except DataError as error:
        return str(error)
    return ""


def superfluous(store: ObjectStore, readers: Executor) -> dict[str, int]:
    """Return names and sizes of the objects that no recovery needs, while a writer may go on. Raises OSError, DataError.

    Objects are listed before the log is read: each listed object's writer has its claim in the log by then. Objects of a
    writer that is fenced are needed no more once the newest base is its successor's, for the fenced one can add none then.
    Nothing of a deleted job is needed.
    """
    listed = store.sizes("")
    if DELETED in listed:
        return listed
    files = read_files(store, readers)
    newest_claim = max(files.claims, default=0)
    raw = content_or_none(store, log_name(newest_claim))
    writer = decode(log_name(newest_claim), raw).writer if raw is not None else ""
    needed, claims = files.objects(), set(files.claims)

    def is_superfluous(name: str) -> bool:
        kind, _, rest = name.partition("/")
        if kind == "objects":
            is_over = not rest.startswith(f"{writer}-") and files.base >= newest_claim
            return bool(writer) and is_over and name not in needed
        if kind in ("log", "base") and rest.isdecimal():
            number = int(rest)
            return number <= files.base and number not in claims if kind == "log" else number < files.base
        return False

    return {name: size for name, size in listed.items() if is_superfluous(name)}
