"""The files of runs on the head's machine, as a service on another machine lists, reads and removes them there.

Everything here runs on the head, for ``runtime.run_copies``. Links are not followed. A name is a path relative to RUN_DIR.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from orchestrator.system.run_folder import FLEET, JOURNAL, PLACE, SNAPSHOT, STATUS, TAPE, fleet_of, remove_tree

DUMP = "parameters-"
"""What the name of a file with the parameters of a running job begins with. It is read on request."""
MANIFEST = "manifest.json"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class RunFileFacts:
    """A regular file of a run."""

    name: str
    size: int
    modified_ns: int
    inode: int


def place_of(runs: Path, mark: str) -> tuple[str, str]:
    """Return the content of the file ``mark`` in RUNS here, empty if there is none, and the installation's name.

    RUNS and its name are created if they are missing. Raises OSError.
    """
    runs.mkdir(parents=True, exist_ok=True)
    content = ""
    with suppress(OSError):
        content = (runs / mark).read_text()
    return content, fleet_of(runs)


def files_of(run_dir: Path) -> list[RunFileFacts]:
    """Return the files that a service needs, in the order in which they must be copied.

    Each is useful only with those before it: a tape after the segments that it continues, a manifest after the files of its
    checkpoint, and the final status last. The final status is looked at first, because nothing is written after it.
    """
    final = facts_of(run_dir, STATUS)
    others = [facts for facts in _walk(run_dir, "") if facts.name != STATUS]
    others.sort(key=lambda facts: (facts.name == TAPE, os.path.basename(facts.name) == MANIFEST, facts.name))
    return [*others, *([final] if final else [])]


def files_of_each(run_dirs: Iterable[Path]) -> list[list[RunFileFacts]]:
    """Return ``files_of`` for each of these runs."""
    return [files_of(run_dir) for run_dir in run_dirs]


def facts_of(folder: Path, entry: str, name: str = "") -> RunFileFacts | None:
    """Return the facts of this regular file, None if there is none. ``name`` is its name below RUN_DIR, if not ``entry``."""
    with suppress(OSError):
        seen = os.lstat(folder / entry)
        if stat.S_ISREG(seen.st_mode):
            return RunFileFacts(name or entry, seen.st_size, seen.st_mtime_ns, seen.st_ino)
    return None


def read_part(run_dir: Path, name: str, inode: int, start: int, size: int) -> bytes:
    """Return at most ``size`` bytes of the file from ``start`` on; none if it is missing, or another file by now."""
    with suppress(OSError):
        descriptor = _opened(run_dir, name)
        try:
            if os.fstat(descriptor).st_ino == inode:
                return os.pread(descriptor, size, start)
        finally:
            os.close(descriptor)
    return b""


def put_files(run_dir: Path, files: Mapping[str, bytes], fleet: str) -> None:
    """Write these files into the run's folder, and note which installation it belongs to. Raises OSError."""
    run_dir.mkdir(parents=True, exist_ok=True)
    for name, content in {**files, FLEET: fleet.encode()}.items():
        draft = run_dir / f".{os.path.basename(name)}.draft"
        draft.write_bytes(content)
        draft.replace(run_dir / os.path.basename(name))


def remove_file(run_dir: Path, name: str) -> None:
    with suppress(FileNotFoundError):
        (run_dir / os.path.basename(name)).unlink()


def put_runs(runs: Path, fleet: str) -> list[str]:
    """Return the names of the run folders that ``put_files`` has made for this installation."""
    with suppress(OSError):
        return sorted(path.name for path in runs.iterdir() if _is_put(path, fleet))
    return []


def remove_runs(runs: Path, names: Iterable[str], fleet: str) -> None:
    """Remove those of these run folders that ``put_files`` has made for this installation. Raises OSError."""
    for name in names:
        if name == os.path.basename(name) and _is_put(runs / name, fleet):
            remove_tree(runs / name)


def _is_put(run_dir: Path, fleet: str) -> bool:
    with suppress(OSError, ValueError):
        return bool(fleet) and not run_dir.is_symlink() and (run_dir / FLEET).read_text() == fleet
    return False


def _walk(folder: Path, prefix: str) -> Iterator[RunFileFacts]:
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            name = f"{prefix}{entry.name}"
            if entry.name.startswith(".") or entry.name == PLACE:
                continue
            if not prefix and (entry.name in (JOURNAL, SNAPSHOT) or entry.name.startswith(DUMP)):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(Path(entry.path), f"{name}/")
            elif (facts := facts_of(folder, entry.name, name)) is not None:
                yield facts


def _opened(run_dir: Path, name: str) -> int:
    """Return a descriptor of the file below the folder. No link is followed. Raises OSError."""
    *between, last = Path(name).parts
    place = os.open(run_dir, _FOLDER)
    try:
        for part in between:
            if part in ("..", "/"):
                raise OSError(errno.EINVAL, "it is not below the folder", name)
            inner = os.open(part, _FOLDER, dir_fd=place)
            os.close(place)
            place = inner
        return os.open(last, _FILE, dir_fd=place)
    finally:
        os.close(place)
