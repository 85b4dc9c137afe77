"""A run's folder, ``RUNS/JOB``: the files that the service writes before a job starts, and those that it reads.

The service writes ``spec.yaml``, the link ``latest`` and copies for exports. The job itself writes the tape, the report and
``status.json``, its final status (``orchestrator.status``).

A job's processes run code that the job named, so nothing in its folder is trusted to be what its name says: a symbolic link
could lead to any file of the service's user, a FIFO would block the reader for ever, and an endless file would fill the
memory. Only regular files of the folder are opened. Anything else is refused with the reason.

Every list of jobs reads ``status.json``, so a damaged one must not affect other jobs. A damaged file is examined once, not
at every read. What becomes of a job whose final status is damaged is decided elsewhere (``api.jobs.service``).
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, NamedTuple

from pydantic import TypeAdapter, ValidationError

from api.schemas import Log
from orchestrator.errors import DataError, InfrastructureError, NotFound
from orchestrator.status import JobStatus
from orchestrator.system.logbook import Logbook, logbooks
from orchestrator.system.run_folder import (
    CHECKPOINTS,
    ISLAND_LOGS,
    JOURNAL,
    LOGS,
    PARAMETERS,
    REPORT,
    REPORT_PAGE,
    SEALED,
    SNAPSHOT,
    SPECIFICATION,
    STATUS,
    TAPE,
)

BYTES_MAX = 64 << 20
"""A job of 10,000 islands and as many recoveries leaves half of it."""
KEPT_MAX = 256
LOG_CHUNK_BYTES = 256 * 1024
LOG_TAIL_BYTES_MAX = 8 << 20
"""How many bytes of each half of a log are read at most: more than logbooks let them grow."""
_OBJECT: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any])
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Run:
    """A job's folder, by the job's own id (never ``latest``). ``settled``: the store knows how the job ended."""

    job: str
    folder: Path
    settled: bool

    @property
    def tape(self) -> Path:
        return self.folder / TAPE

    def ended(self) -> bool:
        """Return whether the job has ended, by store and disk, so that nothing more is written here."""
        return self.settled or read_status(self.folder) is not None


BYTES_KINDS: Mapping[str, str] = {
    TAPE: "tape",
    SEALED: "tape",
    SNAPSHOT: "tape",
    JOURNAL: "journal",
    LOGS: "logs",
    CHECKPOINTS: "checkpoints",
    PARAMETERS: "parameters",
}
OTHER_KIND = "other"
"""What the files of a run are for, by the first part of their names; all that are not listed are of this kind."""


def run_bytes(run_dir: Path) -> dict[str, int]:
    """Return the size of a run's files by kind, 0 where there are none. Links are not followed."""
    sizes = dict.fromkeys((*BYTES_KINDS.values(), OTHER_KIND), 0)
    folders = [(run_dir, "")]
    while folders:
        folder, kind = folders.pop()
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                of_entry = kind or BYTES_KINDS.get(entry.name, OTHER_KIND)
                with suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        folders.append((Path(entry.path), of_entry))
                    else:
                        sizes[of_entry] += entry.stat(follow_symlinks=False).st_size
    return sizes


def free_bytes(folder: Path) -> int | None:
    """Return how much an unprivileged process may still write there; None if the folder is missing."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def prepare_run_dir(run_dir: Path, spec: Mapping[str, Any]) -> None:
    """Create the run's folder with its specification, and let ``latest`` beside it point to it."""
    import yaml  # the command line imports this module, and reads no YAML in most commands

    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / SPECIFICATION).write_text(yaml.safe_dump(dict(spec), sort_keys=False))
        fresh = run_dir.parent / f".latest.{run_dir.name}"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(run_dir.name)
        os.replace(fresh, run_dir.parent / "latest")
    except OSError as error:
        detail = f"The run's folder {run_dir} cannot be written: {error.strerror}."
        raise InfrastructureError(
            detail=detail, remedy="Free some space, or give the service another --runs folder."
        ) from error


def put(run_dir: Path, name: str, content: bytes) -> None:
    """Write a file into the run's folder atomically, replacing any of that name. Raises InfrastructureError."""
    draft = run_dir / f".{name}.draft"
    try:
        draft.unlink(missing_ok=True)
        with draft.open("xb") as file:
            file.write(content)
        draft.replace(run_dir / name)
    except OSError as error:
        detail = f"{run_dir / name} cannot be written: {error.strerror}."
        raise InfrastructureError(
            detail=detail, remedy="Free some space, or give the service another --runs folder."
        ) from error


def read_status(run_dir: Path) -> JobStatus | None:
    """Return the final state that the ended job left, or None if there is none or it is damaged."""
    return examine(run_dir).status


def damage_of_status(run_dir: Path) -> str:
    """Return what is damaged in an ended job's final state, with the remedy; empty if nothing is."""
    damage = examine(run_dir).damage
    return f"Its final state is damaged: {damage} Restore the file from a backup, or remove the job." if damage else ""


def has_report(run_dir: Path) -> bool:
    """Return whether the ended job left its report, as data and as a page."""
    return all(is_there(run_dir, name) for name in (REPORT, REPORT_PAGE))


class StatusFile(NamedTuple):
    """A final status, or what is wrong with the file. Neither is set where there is no final status."""

    status: JobStatus | None = None
    damage: str = ""


class _KnownDamages:
    """The damage of the files that were examined last, by each file's inode, size and times."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._damages: OrderedDict[tuple[str, int, int, int, int], str] = OrderedDict()

    def damage(self, mark: tuple[str, int, int, int, int]) -> str | None:
        with self._lock:
            return self._damages.get(mark)

    def keep(self, mark: tuple[str, int, int, int, int], damage: str) -> None:
        with self._lock:
            self._damages[mark] = damage
            if len(self._damages) > KEPT_MAX:
                self._damages.popitem(last=False)


_KNOWN_DAMAGES = _KnownDamages()


def examine(run_dir: Path) -> StatusFile:
    """Return the final status that the job left in ``run_dir``, or the file's damage."""
    path = run_dir / STATUS
    try:
        there = os.lstat(path)
    except (OSError, ValueError):
        return StatusFile()
    mark = (str(path), there.st_ino, there.st_size, there.st_mtime_ns, there.st_ctime_ns)
    if (damage := _KNOWN_DAMAGES.damage(mark)) is not None:
        return StatusFile(damage=damage)
    try:
        status = JobStatus.model_validate_json(read_below(run_dir, STATUS, BYTES_MAX), strict=True)
        if status.job_id != run_dir.name:
            raise DataError(detail=f"{path} is the status of another job, {status.job_id!r:.80}.")
    except FileNotFoundError:
        return StatusFile()
    except ValidationError as error:
        damage = _problem_with(path, error)
    except (DataError, RecursionError, MemoryError) as error:
        damage = str(error) or f"{path} cannot be read: {type(error).__name__}."
    else:
        return StatusFile(status=status) if status.view.phase == "finished" else StatusFile()
    _KNOWN_DAMAGES.keep(mark, damage)
    return StatusFile(damage=damage)


def _problem_with(path: Path, error: ValidationError) -> str:
    first, count = error.errors(include_url=False)[0], error.error_count()
    more = f" There are {count - 1} more such errors." if count > 1 else ""
    place = ".".join(str(part) for part in first["loc"])[:120]
    where = f", at {place}" if place else ""
    return f"{path} is no final status{where}: {first['msg'][:120]}.{more}"


class NotRegular(OSError):
    """There is something other than a regular file at this path."""


def open_below(folder: Path, name: str) -> BinaryIO:
    """Open the regular file ``name`` below ``folder``, following no symbolic link.

    Raises FileNotFoundError, or OSError for anything else. Never blocks.
    """
    *between, last = Path(name).parts
    path = folder / name
    try:
        place = os.open(folder, _FOLDER)
        try:
            for part in between:
                inner = os.open(part, _FOLDER, dir_fd=place)
                os.close(place)
                place = inner
            if not stat.S_ISREG(os.stat(last, dir_fd=place, follow_symlinks=False).st_mode):
                raise NotRegular(errno.EINVAL, "it is not a regular file", str(path))
            descriptor = os.open(last, _FILE, dir_fd=place)
        finally:
            os.close(place)
    except ValueError as error:  # a NUL in the name
        raise NotRegular(errno.EINVAL, str(error), str(path)) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # it was replaced in between
        os.close(descriptor)
        raise NotRegular(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def is_there(folder: Path, name: str) -> bool:
    """Return whether there is such a file, and it can be opened."""
    with suppress(OSError), open_below(folder, name):
        return True
    return False


def read_below(folder: Path, name: str, bytes_max: int) -> bytes:
    """Return the whole file. Raises FileNotFoundError if it is missing, DataError if it is unreadable or too long."""
    path = folder / name
    try:
        with open_below(folder, name) as file:
            content = file.read(bytes_max + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DataError(detail=f"{path} cannot be read: {error.strerror}.") from error
    if len(content) > bytes_max:
        raise DataError(detail=f"{path} exceeds the limit of {bytes_max >> 20} MiB.")
    return content


def parsed(content: bytes, path: Path) -> dict[str, Any]:
    """Return the JSON object in the content. Raises DataError for anything else."""
    try:
        return _OBJECT.validate_json(content, strict=True)
    except ValueError as error:
        raise DataError(detail=f"{path} is not a JSON object: {_first_reason(error)}.") from error


def _first_reason(error: ValueError) -> str:
    reasons: list[dict[str, Any]] = getattr(error, "errors", list)()
    return str(reasons[0]["msg"]).rstrip(".") if reasons else type(error).__name__


# ── logs ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def logs_of(run: Run) -> list[Log]:
    """Return all logs of the job, islands first."""
    listed = []
    for book in logbooks(run.folder):
        with suppress(OSError):  # it was just removed or rotated, or is not a log at all
            with opened(book, book.path) as file:
                about = os.fstat(file.fileno())
            older = 0
            with suppress(OSError), opened(book, book.older) as file:
                older = os.fstat(file.fileno()).st_size
            size = about.st_size + older
            listed.append(Log(source=book.source, incarnation=book.number, bytes=size, written_at=about.st_mtime))
    return listed


def newest(run: Run, source: str, incarnation: int | None = None) -> Logbook:
    """Return the logbook of this source, by default of the newest incarnation. Raises NotFound with the existing ones."""
    books = logbooks(run.folder)
    of_source = [book for book in books if book.source == source]
    # an island may have the name of a helper; the helper takes precedence
    of_source = [book for book in of_source if not book.of_island] or of_source
    matches = [book for book in of_source if incarnation in (None, book.number)]
    if matches:
        return matches[-1]
    there = ", ".join(f"{book.source} {book.number}" for book in books)
    folder = run.folder / LOGS / ISLAND_LOGS
    which = source if incarnation is None else f"{source}, incarnation {incarnation},"
    raise NotFound(
        detail=f"Job {run.job} has no log of {which} here.",
        remedy=f"{f'There are {there}. ' if there else ''}An island writes its log to {folder} on its own machine when it "
        f"starts, and the job copies the last part here. `atoll islands {run.job} -o wide` names the machine.",
    )


class LogReader:
    """Reads the last ``tail`` lines of a logbook, and then what is added, also across a rotation."""

    def __init__(self, book: Logbook, tail: int) -> None:
        self.book = book
        self._tail: int | None = tail
        try:
            self._file: BinaryIO = opened(book, book.path)
        except FileNotFoundError:
            raise
        except OSError as error:
            detail = f"The log {book.path} cannot be read: {error.strerror}."
            raise NotFound(
                detail=detail, remedy="There is something else in place of the log: check that path."
            ) from error

    def read(self) -> bytes:
        """Return the bytes that were added since the last read."""
        if self._tail is not None:
            self._file.seek(max(0, os.fstat(self._file.fileno()).st_size - LOG_TAIL_BYTES_MAX))
            lines = (self._older() + self._file.read(2 * LOG_TAIL_BYTES_MAX)).split(b"\n")
            first_kept = max(0, len(lines) - self._tail - (lines[-1] == b""))
            self._tail = None
            return b"\n".join(lines[first_kept:])
        if more := self._file.read(LOG_CHUNK_BYTES):
            return more
        if self._is_the_one_at(self.book.path):
            return b""
        # It was rotated: read what was written to it until then before the new one.
        if more := self._file.read(LOG_CHUNK_BYTES):
            return more
        with suppress(OSError):
            fresh = opened(self.book, self.book.path)
            self._file.close()
            self._file = fresh
        return self._file.read(LOG_CHUNK_BYTES)

    def close(self) -> None:
        self._file.close()

    def _older(self) -> bytes:
        if self._is_the_one_at(self.book.older):
            return b""  # it was rotated between the two reads
        with suppress(OSError), opened(self.book, self.book.older) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_TAIL_BYTES_MAX))
            return file.read(LOG_TAIL_BYTES_MAX)
        return b""

    def _is_the_one_at(self, path: Path) -> bool:
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), path.lstat())
        except OSError:
            return False


def opened(book: Logbook, path: Path) -> BinaryIO:
    """Open one half of a logbook safely, from its run's folder. Raises OSError."""
    folder = path.parents[2 if book.of_island else 1]
    return open_below(folder, str(path.relative_to(folder)))
