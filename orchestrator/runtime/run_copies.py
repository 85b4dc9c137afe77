"""Copies of runs, from the machine on which a synchroniser writes to the head's, and from there to the service's.

    synchroniser's machine ──▶ head's machine: RUNS/JOB ── what is new, every second ──▶ service's machine: RUNS/JOB
                                                   ◀── specification and its like; the removal of deleted jobs ──

The service reads a folder of the same path on its own machine, as it does on the head's. A job knows nothing of a service
elsewhere (``RunCopies``). If its synchroniser is on another machine than the head, the job's controller, which is on the
head, copies the folder (``head_copies``), and the job does not end before that is complete. All bytes go over calls to node
agents. Journals and snapshots, which only a job reads, stay where they are.

The copy of a final status comes last, when everything else is complete. Until then the job counts as one that does not
answer, never as one that is gone (``settle``).

The functions before ``Machine`` run on the other machine. Links are not followed. A name is relative to RUN_DIR.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import shutil
import stat
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from orchestrator.actors import ActorHandle
from orchestrator.checkpoints.manifest import MANIFEST
from orchestrator.errors import InfrastructureError, in_words
from orchestrator.runtime.node_agent import NodeAgent
from orchestrator.runtime.settings import CONTROL_GROUP
from orchestrator.system import home_files
from orchestrator.system.run_folder import (
    CHECKPOINTS,
    DUMP,
    FLEET,
    JOURNAL,
    LOGS,
    ORIGIN,
    PLACE,
    SEALED,
    SHARDS,
    SNAPSHOT,
    SOURCE,
    SPECIFICATION,
    STATUS,
    TAPE,
    TOKENIZER,
    copies_in,
    first_line_of,
    fleet_of,
    history_in,
    note_copied,
    remove_tree,
    source_history,
)

log = logging.getLogger(__name__)
EVERY_S = 1.0
ANSWER_TIMEOUT_S = 60.0
"""The agent's process may have to be started first, on a busy machine."""
PART_BYTES = 4 << 20
DRAFT, HALF_COPIED = ".draft", ".copy"
"""What the names of files end with that are still being written, or copied."""
MARK = ".place-of-service"
PUT = (SPECIFICATION, ORIGIN, TOKENIZER)
"""What the service writes into a run's folder before the job starts."""
KEPT_ALIKE = (f"{CHECKPOINTS}/", f"{LOGS}/", f"{SEALED}/")
"""Copies below these folders are removed when the file on the head is. Logs that were not copied are those of islands on the
service's machine, and stay."""
OVERLAP_BYTES = 64 << 10
"""A copy that has grown is compared over so many bytes: the end of the file may have been cut off before it grew."""

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


# ── on the other machine ───────────────────────────────────────────────────────────────────────────────────────────────


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


def source_of(run_dir: Path) -> tuple[bytes, list[RunFileFacts]]:
    """Return the first line of the tape there, and ``files_of``."""
    return first_line_of(run_dir), files_of(run_dir)


def sees(run_dir: Path, name: str, own: str) -> bool:
    """Return whether this file is in the folder here, and leave another. Raises OSError."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / own).touch()
    return (run_dir / name).exists()


def put_files(run_dir: Path, files: Mapping[str, bytes], fleet: str) -> None:
    """Write these files into the run's folder, and note which installation it belongs to. Raises OSError."""
    run_dir.mkdir(parents=True, exist_ok=True)
    for name, content in {**files, FLEET: fleet.encode()}.items():
        draft = run_dir / f".{os.path.basename(name)}{DRAFT}"
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
            if entry.name.startswith(".") or entry.name == PLACE or entry.name.endswith(DRAFT):
                continue
            if not prefix and (entry.name in (JOURNAL, SHARDS, SNAPSHOT) or entry.name.startswith(DUMP)):
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


# ── on the machine that has the copies ─────────────────────────────────────────────────────────────────────────────────


class Incomplete(Exception):
    """A file has changed while it was copied."""


Ask = Callable[..., Any]
"""``Machine``, or something like it."""


class Machine:
    """Calls functions on another machine, by the agent of its node, which ``agent`` returns."""

    def __init__(self, agent: Callable[[], ActorHandle[NodeAgent]], name: str = "the head") -> None:
        self._find, self._name = agent, name
        self._agent: ActorHandle[NodeAgent] | None = None

    def __call__(
        self, function: Callable[Arguments, Answer], *arguments: Arguments.args, **named: Arguments.kwargs
    ) -> Answer:
        """Call the function there. Raises InfrastructureError without an answer, and OSError as it does."""
        import ray

        try:
            agent = self._agent = self._agent or self._find()
            if not hasattr(agent.ray_handle, NodeAgent.run.__name__):
                raise InfrastructureError(
                    detail=f"The node agent of {self._name} has an earlier build of atoll, which gives no runs to other "
                    "machines.",
                    remedy="Upgrade that machine, or run `atoll serve` on the head's.",
                )
            method: Any = agent.ray_handle.run  # no type carries the parameters of both
            answer: Answer = ray.get(method.remote(function, *arguments, **named), timeout=ANSWER_TIMEOUT_S)
            return answer
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, OSError):
                raise error.cause from error
            raise InfrastructureError(detail=f"The node agent of {self._name} failed: {in_words(error)}") from error
        except (ray.exceptions.RayError, TimeoutError) as error:
            self._agent = None
            raise InfrastructureError(
                detail=f"The node agent of {self._name} does not answer: {in_words(error).rstrip('.')}.",
                remedy="Runs are copied again once it does; jobs train on meanwhile.",
            ) from error


def whole_file(ask: Ask, run_dir: Path, facts: RunFileFacts) -> bytes:
    """Return the content of a file there. Raises Incomplete, OSError or InfrastructureError."""
    parts, at = list[bytes](), 0
    while at < facts.size:
        parts.append(part_of(ask, run_dir, facts, at))
        at += len(parts[-1])
    return b"".join(parts)


def part_of(ask: Ask, run_dir: Path, facts: RunFileFacts, start: int) -> bytes:
    """Return the next bytes of the file from ``start`` on. Raises Incomplete if it is another file by now."""
    wanted = min(PART_BYTES, facts.size - start)
    part: bytes = ask(read_part, run_dir, facts.name, facts.inode, start, wanted)
    if not part:
        raise Incomplete(f"{run_dir / facts.name} changes on the other machine")
    return part


class RunCopy:
    """The copy of one run's folder, of the same path on the machine of ``ask``. Not thread-safe."""

    def __init__(self, run_dir: Path, ask: Ask) -> None:
        self._run_dir, self._ask = run_dir, ask
        self._inodes: dict[str, int] = {}
        """The file there of which each copy was made, to tell one that has grown from another of its name."""

    def update(self, files: Sequence[RunFileFacts], earlier: Collection[str] = ()) -> None:
        """Copy what differs, in this order, and remove copies of what has gone there. ``earlier`` are checkpoints of an
        earlier machine. Raises Incomplete, OSError or InfrastructureError.
        """
        run_dir = self._run_dir
        for facts in files:
            if facts.name not in PUT and _is_below(facts.name):
                self.update_file(facts)
        there = {facts.name for facts in files}
        for folder in KEPT_ALIKE:
            for path in sorted((run_dir / folder).rglob("*"), reverse=True):
                name = str(path.relative_to(run_dir))
                if name.startswith(tuple(f"{CHECKPOINTS}/{each}/" for each in earlier)):
                    continue
                if path.is_file() and name not in there:
                    if name in self._inodes or not folder.startswith(LOGS):
                        path.unlink(missing_ok=True)
                elif path.is_dir():
                    with suppress(OSError):
                        path.rmdir()  # unless something is in it

    def update_file(self, facts: RunFileFacts) -> None:
        """Copy this file if it differs. Raises as ``update``."""
        target = self._run_dir / facts.name
        size, modified_ns = _size_and_time(target)
        if (size, modified_ns) == (facts.size, facts.modified_ns):
            return
        grows = facts.name == TAPE or facts.name.endswith(".log")
        continues = grows and self._inodes.get(facts.name) == facts.inode and 0 <= size <= facts.size
        at, part = 0, b""
        if continues and size:
            start = max(0, size - OVERLAP_BYTES)
            part, overlap = part_of(self._ask, self._run_dir, facts, start), _end_of(target, start)
            continues = part.startswith(overlap)
            at, part = (size, part[len(overlap) :]) if continues else (0, b"")
        draft = target if continues else target.with_name(f".{target.name}{HALF_COPIED}")
        draft.parent.mkdir(parents=True, exist_ok=True)
        try:
            with draft.open("ab" if continues else "wb") as file:
                while True:
                    file.write(part)
                    at += len(part)
                    if at >= facts.size:
                        break
                    part = part_of(self._ask, self._run_dir, facts, at)
            os.utime(draft, ns=(facts.modified_ns, facts.modified_ns))
            if draft != target:
                os.replace(draft, target)
        except BaseException:
            if draft != target:
                draft.unlink(missing_ok=True)  # half of it is of no use, and takes the room that others wait for
            raise
        self._inodes[facts.name] = facts.inode

    def forget(self, name: str) -> None:
        """Leave this file to its reader."""
        self._inodes.pop(name, None)


def shared(runs: Path, ask: Ask) -> RunCopies | None:
    """Return None if the head's machine sees this folder of runs as this machine does, else the copies of its runs.

    Raises InfrastructureError if the head does not answer.
    """
    copies = RunCopies(runs, ask)
    text = secrets.token_hex(16)
    try:
        runs.mkdir(parents=True, exist_ok=True)
        (runs / MARK).write_text(text)
        content, copies.fleet = ask(place_of, runs, MARK)
        if content == text:
            return None
        home_files.replace(runs / FLEET, copies.fleet)  # islands' machines know the installation by the head's name
    except OSError as error:
        raise InfrastructureError(
            detail=f"The folder of runs {runs} cannot be used: {in_words(error)}.",
            remedy="Make it writable for the user that runs the service, or choose another with --runs.",
        ) from error
    finally:
        with suppress(OSError):
            (runs / MARK).unlink()
    return copies


class RunCopies:
    """Thread-safe. ``begin`` starts a thread that copies every ``EVERY_S``."""

    def __init__(self, runs: Path, ask: Ask) -> None:
        self._runs, self._ask = runs, ask
        self.fleet = ""
        self._lock = threading.RLock()
        self._run_copies: dict[str, RunCopy] = {}
        self._complete: set[str] = set()
        """Jobs whose final status has been copied."""
        self._closed = threading.Event()
        self._trouble = ""

    def begin(self) -> None:
        log.info(
            "The head's machine has its own %s. The service keeps copies of what its jobs write there.", self._runs
        )
        threading.Thread(target=self._run, name="run-copies", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def put(self, run_dir: Path) -> None:
        """Give the head what the service has written for a job that is about to start. Raises InfrastructureError."""
        files = {name: (run_dir / name).read_bytes() for name in PUT if (run_dir / name).is_file()}
        self._ask(put_files, run_dir, files, self.fleet)

    def settle(self, job: str) -> None:
        """Copy what the job has left, now that it does not run. Raises InfrastructureError if that is not possible."""
        with self._lock:
            try:
                if job not in self._complete and (self._runs / job).is_dir():
                    self._copy(job, self._ask(files_of, self._runs / job))
            except (Incomplete, OSError) as error:
                raise InfrastructureError(
                    detail=f"What job {job} has left on the head is not copied yet: {in_words(error)}.",
                    remedy="It is tried again every second.",
                ) from error

    def take(self, job: str, name: str) -> None:
        """Move this file of the job from the head here. Raises InfrastructureError, or OSError."""
        run_dir = self._runs / job
        with self._lock:
            facts = self._ask(facts_of, run_dir, name)
            if facts is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(run_dir / name))
            self._copy_of(job).update_file(facts)
            self._copy_of(job).forget(name)
        self._ask(remove_file, run_dir, name)

    def sweep(self, is_known: Callable[[str], bool]) -> None:
        """Remove the run folders of unknown jobs from the head. Raises InfrastructureError."""
        unknown = [name for name in self._ask(put_runs, self._runs, self.fleet) if not is_known(name)]
        if unknown:
            log.info("removing from the head what deleted jobs left: %s", ", ".join(unknown))
            self._ask(remove_runs, self._runs, unknown, self.fleet)
            for job in unknown:
                self._forget(job)

    def _run(self) -> None:
        while not self._closed.wait(EVERY_S):
            try:
                self._look()
                trouble = ""
            except (InfrastructureError, Incomplete, OSError) as error:
                trouble = in_words(error)
            except Exception as error:  # the next look may do better
                trouble = in_words(error)
                log.exception("runs are not copied from the head")
            if trouble and trouble != self._trouble:
                log.warning("runs are not copied from the head: %s", trouble)
            self._trouble = trouble

    def _look(self) -> None:
        jobs = [path.parent.name for path in self._runs.glob(f"*/{SPECIFICATION}") if not path.parent.is_symlink()]
        jobs = [job for job in jobs if job not in self._complete]
        if not jobs:
            return
        first: Exception | None = None
        for job, files in zip(jobs, self._ask(files_of_each, [self._runs / job for job in jobs]), strict=True):
            try:
                with self._lock:
                    self._copy(job, files)
            except (Incomplete, OSError) as error:  # other jobs are not affected
                first = first or error
        if first is not None and not isinstance(first, Incomplete):
            raise first

    def _copy(self, job: str, files: Sequence[RunFileFacts]) -> None:
        """Copy what differs. Raises Incomplete, OSError or InfrastructureError."""
        run_dir = self._runs / job
        if not run_dir.is_dir() or not any(facts.name == SPECIFICATION for facts in files):
            return  # it was deleted meanwhile, or the head has lost its disk: what is here is all that is left
        if (own := source_history(run_dir)) is not None and not self._is_passed(job, own):
            return  # the job's synchroniser is on this machine, and the head has copies of what is here
        if copies_in(run_dir) is None:
            note_copied(run_dir, 0, CONTROL_GROUP)  # a synchroniser on this machine continues from no copies
        self._copy_of(job).update(files)
        if any(facts.name == STATUS for facts in files):
            self._complete.add(job)

    def _is_passed(self, job: str, history: int) -> bool:
        """Return whether the job has moved on to another machine since its synchroniser was here, with a later history."""
        first_line: bytes = self._ask(first_line_of, self._runs / job)
        if history_in(first_line) <= history:
            return False
        (self._runs / job / SOURCE).unlink(missing_ok=True)
        return True

    def _copy_of(self, job: str) -> RunCopy:
        return self._run_copies.setdefault(job, RunCopy(self._runs / job, self._ask))

    def _forget(self, job: str) -> None:
        """Copy nothing more of this job, which was deleted, and remove what was copied meanwhile."""
        with self._lock:
            self._complete.add(job)
            self._run_copies.pop(job, None)
            shutil.rmtree(self._runs / job, ignore_errors=True)


def _is_below(name: str) -> bool:
    """Return whether a name from the head is one that ``files_of`` returns: below the run's folder, and not hidden."""
    parts = name.split("/")
    return all(part and not part.startswith(".") for part in parts)


def _end_of(path: Path, start: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read()


def _size_and_time(path: Path) -> tuple[int, int]:
    try:
        seen = path.lstat()
    except OSError:
        return -1, -1
    return seen.st_size, seen.st_mtime_ns
