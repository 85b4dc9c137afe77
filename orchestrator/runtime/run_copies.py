"""Copies of the head's runs, for a service whose machine does not share their disk.

    head's machine: RUNS/JOB  ── what is new, every second ──▶  service's machine: RUNS/JOB, which the service reads
                              ◀── specification and its like, before the job starts; the removal of deleted jobs ──

A job writes its folder on the head and knows nothing of a service elsewhere. The service reads a folder of the same path on
its own machine, as it does on the head's. All bytes go over calls to the head's node agent. Journal and snapshots, which
only a job reads, stay there.

The copy of a final status comes last, when everything else is complete. Until then the job counts as one that does not
answer, never as one that is gone (``settle``).
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from orchestrator.actors import ActorHandle
from orchestrator.errors import InfrastructureError, in_words
from orchestrator.runtime.node_agent import NodeAgent
from orchestrator.system import home_files
from orchestrator.system.run_copies import (
    RunFileFacts,
    facts_of,
    files_of,
    files_of_each,
    place_of,
    put_files,
    put_runs,
    read_part,
    remove_file,
    remove_runs,
)
from orchestrator.system.run_folder import (
    CHECKPOINTS,
    FLEET,
    LOGS,
    ORIGIN,
    SEALED,
    SPECIFICATION,
    STATUS,
    TAPE,
    TOKENIZER,
)

log = logging.getLogger(__name__)

EVERY_S = 1.0
ANSWER_TIMEOUT_S = 60.0
"""The agent's process may have to be started first, on a busy machine."""
PART_BYTES = 4 << 20
MARK = ".place-of-service"
PUT = (SPECIFICATION, ORIGIN, TOKENIZER)
"""What the service writes into a run's folder before the job starts."""
KEPT_ALIKE = (f"{CHECKPOINTS}/", f"{LOGS}/", f"{SEALED}/")
"""Copies below these folders are removed when the file on the head is."""

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


class Incomplete(Exception):
    """A file on the head has changed while it was copied."""


Ask = Callable[..., Any]
"""``HeadMachine``, or something like it."""


class HeadMachine:
    """Calls functions on the head's machine, by the agent of its node, which ``agent`` returns."""

    def __init__(self, agent: Callable[[], ActorHandle[NodeAgent]]) -> None:
        self._find = agent
        self._agent: ActorHandle[NodeAgent] | None = None

    def __call__(
        self, function: Callable[Arguments, Answer], *arguments: Arguments.args, **named: Arguments.kwargs
    ) -> Answer:
        """Call the function on the head's machine. Raises InfrastructureError without an answer, and OSError as it does."""
        import ray

        try:
            agent = self._agent = self._agent or self._find()
            if not hasattr(agent.ray_handle, NodeAgent.run.__name__):
                raise InfrastructureError(
                    detail="The head has an earlier build of atoll, which gives no service on another machine its runs.",
                    remedy="Upgrade the head, or run `atoll serve` on its machine.",
                )
            method: Any = agent.ray_handle.run  # no type carries the parameters of both
            answer: Answer = ray.get(method.remote(function, *arguments, **named), timeout=ANSWER_TIMEOUT_S)
            return answer
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, OSError):
                raise error.cause from error
            raise InfrastructureError(detail=f"The head's node agent failed: {in_words(error)}") from error
        except (ray.exceptions.RayError, TimeoutError) as error:
            self._agent = None
            raise InfrastructureError(
                detail=f"The head's node agent does not answer: {in_words(error).rstrip('.')}.",
                remedy="Runs are copied again once it does; jobs train on meanwhile.",
            ) from error


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
        self._inodes: dict[Path, int] = {}
        """The file on the head of which each copy was made, to tell one that has grown from another of its name."""
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
            self._copy_file(run_dir, facts)
            self._inodes.pop(run_dir / name, None)
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
        """Copy what differs, in this order. Raises Incomplete, OSError or InfrastructureError."""
        run_dir = self._runs / job
        if not run_dir.is_dir() or not any(facts.name == SPECIFICATION for facts in files):
            return  # it was deleted meanwhile, or the head has lost its disk: what is here is all that is left
        for facts in files:
            if facts.name not in PUT:
                self._copy_file(run_dir, facts)
        there = {facts.name for facts in files}
        for folder in KEPT_ALIKE:
            for path in sorted((run_dir / folder).rglob("*"), reverse=True):
                if path.is_file() and str(path.relative_to(run_dir)) not in there:
                    path.unlink(missing_ok=True)
                elif path.is_dir():
                    with suppress(OSError):
                        path.rmdir()  # unless something is in it
        if STATUS in there:
            self._complete.add(job)

    def _copy_file(self, run_dir: Path, facts: RunFileFacts) -> None:
        target = run_dir / facts.name
        size, modified_ns = _size_and_time(target)
        if (size, modified_ns) == (facts.size, facts.modified_ns):
            return
        grows = facts.name == TAPE or facts.name.endswith(".log")
        continues = grows and self._inodes.get(target) == facts.inode and 0 <= size <= facts.size
        at = size if continues else 0
        draft = target if continues else target.with_name(f".{target.name}.copy")
        draft.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("ab" if continues else "wb") as file:
            while at < facts.size:
                wanted = min(PART_BYTES, facts.size - at)
                part = self._ask(read_part, run_dir, facts.name, facts.inode, at, wanted)
                if not part:
                    raise Incomplete(f"{target} changes on the head")
                file.write(part)
                at += len(part)
        os.utime(draft, ns=(facts.modified_ns, facts.modified_ns))
        if draft != target:
            os.replace(draft, target)
        self._inodes[target] = facts.inode

    def _forget(self, job: str) -> None:
        """Copy nothing more of this job, which was deleted, and remove what was copied meanwhile."""
        with self._lock:
            self._complete.add(job)
            self._inodes = {path: inode for path, inode in self._inodes.items() if job not in path.parts}
            shutil.rmtree(self._runs / job, ignore_errors=True)


def _size_and_time(path: Path) -> tuple[int, int]:
    try:
        seen = path.lstat()
    except OSError:
        return -1, -1
    return seen.st_size, seen.st_mtime_ns
