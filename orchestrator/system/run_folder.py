"""The folder of a run, RUN_DIR: the name of each file in it, what it holds, when it is written, and how durably.

These names are defined only here; docs/reference/run-dir.md is generated from ``FILES``.

An island on a machine with a disk of its own writes its logs under the same path there. Such a folder is *claimed* for the
installation, so that it can be removed with the job, and never a folder that a service keeps.

A synchroniser on such a machine writes the whole folder there, which is then a *source*: the head's is copied from it.
The *history* of a job is the epoch in which its tape begins. A job that continues from what its islands hold begins another
history, so the files of an earlier one are recognised wherever they turn up.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import NamedTuple

from orchestrator.errors import ConfigurationError

SPECIFICATION = "spec.yaml"
ORIGIN = "origin.json"
TOKENIZER = "tokenizer"
RESUMED = "resumed.json"
TAPE = "tape.jsonl"
SEALED = "tape.sealed"
SNAPSHOT = "snapshot"
JOURNAL = "journal"
SHARDS = "shards"
BOOT = "boot"
SALVAGING = "salvaging"
HANDOVER = "handover.json"
CLOCK = "clock.json"
LOGS = "logs"
ISLAND_LOGS = "islands"
PLACE = "place.mark"
"""A random text by which another machine recognises the folder in which it is as its own."""
CHECKPOINTS = "checkpoints"
PARAMETERS = "merged.safetensors"
DUMP = "parameters-"
"""What the name of a file with the parameters of a running job begins with. Its reader removes it."""
ADVICE = "advice.json"
REPORT = "report.json"
REPORT_PAGE = "report.html"
CRASH = "crash.txt"
STATUS = "status.json"

SOURCE = ".source"
"""In a run's folder on another machine than the head's: the history that the head's folder is copied from here."""
COPY = ".copy"
"""In a run's folder on the head: the history that it has copies of, and the checkpoints of earlier ones. No job continues
from copies."""
EARLIER = "earlier"
FIRST_LINE_BYTES_MAX = 16 << 20
FLEET = ".fleet"
"""In RUNS: a random name of the installation. In a run's folder on another machine: whose it is, so that it is removed."""

REMOVALS_MAX, REMOVAL_RETRY_S = 20, 0.1

_SYSTEM = "with the operating system"
_KERNEL = "with the operating system, so SIGKILL loses nothing"
_IN_CHECKPOINT = "synced before the manifest"


@dataclass(frozen=True, slots=True)
class Retention:
    """The limits of ended jobs; None for no limit."""

    days: float | None = None
    failed_days: float | None = None
    bytes: int | None = None

    def refuse_senseless(self) -> None:
        """Raise ConfigurationError for a limit that is no number, or not above 0."""
        for name, value in (("days", self.days), ("failed-days", self.failed_days), ("bytes", self.bytes)):
            if value is not None and not (isfinite(value) and value > 0):
                raise ConfigurationError(
                    detail=f"--retention-{name} is {value:g}, but must be a finite number above 0. Leave it out to keep all "
                    "ended jobs."
                )

    @property
    def removes(self) -> bool:
        return (self.days, self.failed_days, self.bytes) != (None, None, None)


@dataclass(frozen=True, slots=True)
class RunFile:
    """A file of a run. ``path`` is relative to RUN_DIR; parts in capitals vary."""

    path: str
    holds: str
    written: str
    durable: str


FILES = (
    RunFile(SPECIFICATION, "the specification that the service accepted", "by the service, before the job", _SYSTEM),
    RunFile(
        ORIGIN,
        "the small files of the initial checkpoint (`model.initial_weights`), for exports",
        "by the service, before the job",
        _SYSTEM,
    ),
    RunFile(
        TOKENIZER,
        "a copy of the file of `data.tokenizer`, for exports",
        "by the service, before the job",
        _SYSTEM,
    ),
    RunFile(
        RESUMED,
        "the checkpoint that the job resumes from, if it does",
        "before the first event",
        "synced, with a digest",
    ),
    RunFile(
        SALVAGING,
        "nothing: the job's files were lost, and it is continued from what its islands hold",
        "before the new tape, and removed once that has Θ",
        "synced",
    ),
    RunFile(
        TAPE,
        "every event, and what was decided on it",
        "one line for each event, before its effects are carried out",
        "synced before anything depends on it",
    ),
    RunFile(
        f"{SEALED}/NUMBER.zst",
        "older segments of a long tape, compressed",
        "after a snapshot, once the tape has 4 MiB",
        "synced before the tape is cut",
    ),
    RunFile(
        SNAPSHOT,
        "the state of core and accounts at one record of the tape",
        "every `durability.snapshot_every_records` records, or 4 MiB of tape",
        "not required: the tape holds all of it",
    ),
    RunFile(
        f"{JOURNAL}/fragment-FRAGMENT-NUMBER.journal",
        "Θ and momentum of a fragment, by version",
        "one entry for each merge, before it is published",
        "`sync`: at once; `async`: after some merges",
    ),
    RunFile(
        f"{SHARDS}/SHARD/{JOURNAL}/fragment-FRAGMENT-NUMBER.journal",
        "the same, of the fragments of one of several shards, on the shard's machine",
        "one entry for each merge, before it is published",
        "at once",
    ),
    RunFile(f"{SHARDS}/SHARD.node", "the name of the node of a shard", "when the shard starts first", "at once"),
    RunFile(
        f"{SHARDS}/SHARD/lock", "nothing: the shard's process has it locked", "when the shard starts", "not required"
    ),
    RunFile(ADVICE, "the newest looks of the job's autopilot", "by the service, after each look", _SYSTEM),
    RunFile(BOOT, "the boot id of the machine when the job began", "when the job begins", "synced"),
    RunFile(
        CLOCK,
        "when the job was created, on a clock that cannot be set",
        "at each start of the synchroniser",
        _SYSTEM,
    ),
    RunFile(
        f"{LOGS}/PROCESS-NUMBER.log",
        "what synchroniser, controller, evaluator and shards printed",
        "as they print",
        _KERNEL,
    ),
    RunFile(
        f"{LOGS}/{ISLAND_LOGS}/ISLAND-INCARNATION.log",
        "what each incarnation of an island printed, the newest ten; of one on another machine, the last 64 KiB or more",
        "as it prints; copies every two seconds",
        _KERNEL,
    ),
    RunFile(
        f"{LOGS}/{ISLAND_LOGS}/ISLAND-INCARNATION.log.older",
        "the older part of a log of more than 4 MiB; likewise for other logs",
        "by renaming the log",
        _KERNEL,
    ),
    RunFile(
        f"{LOGS}/{PLACE}",
        "a text by which machines that share the folder are recognised",
        "by the controller, when it begins",
        _KERNEL,
    ),
    RunFile(
        f"{CHECKPOINTS}/NUMBER/fragment-FRAGMENT.parameters",
        "Θ of a fragment; `.momentum` and `.residue` likewise",
        "by the synchroniser, at one point of the tape",
        _IN_CHECKPOINT,
    ),
    RunFile(
        f"{CHECKPOINTS}/NUMBER/ISLAND/part.json", "metadata of an island's arrays", "by the island", _IN_CHECKPOINT
    ),
    RunFile(
        f"{CHECKPOINTS}/NUMBER/ISLAND/arrays….safetensors",
        "the island's parameters and optimizer state",
        "by each of its processes",
        _IN_CHECKPOINT,
    ),
    RunFile(
        f"{CHECKPOINTS}/NUMBER/….blocks",
        "digests of the blocks of a file that hosts read in parts",
        "with that file",
        _IN_CHECKPOINT,
    ),
    RunFile(
        f"{CHECKPOINTS}/NUMBER/manifest.json",
        "the list of all files; without it there is no checkpoint",
        "last of a checkpoint",
        "synced",
    ),
    RunFile(
        f"{EARLIER}/EPOCH/{TAPE}",
        "the tape that began in this epoch, if the job was continued from what its islands held; likewise other files",
        "when the next tape begins",
        _SYSTEM,
    ),
    RunFile(
        f"{EARLIER}/EPOCH/{SEALED}/NUMBER.zst", "older segments of that tape", "when the next tape begins", _SYSTEM
    ),
    RunFile(
        f"{EARLIER}/EPOCH/{LOGS}/PROCESS-NUMBER.log",
        "what the synchroniser printed until then",
        "when the next tape begins",
        _SYSTEM,
    ),
    RunFile(
        SOURCE,
        "on the machine of a synchroniser that does not share the head's folder: the epoch in which the tape begins",
        "when the head begins to copy the folder",
        _SYSTEM,
    ),
    RunFile(
        COPY,
        "on the head: the epoch in which the tape begins that is copied from the synchroniser's machine",
        "before the first copy",
        _SYSTEM,
    ),
    RunFile(
        HANDOVER,
        "the release that is to go on, while `atoll upgrade` replaces the synchroniser",
        "before the old synchroniser ends, until the next one goes on",
        "synced",
    ),
    RunFile(PARAMETERS, "Θ at the end, float32", "at the job's end", "synced before `status.json`"),
    RunFile(REPORT, "the report for programs", "at the job's end", "synced before `status.json`"),
    RunFile(REPORT_PAGE, "the report for people", "at the job's end", "synced before `status.json`"),
    RunFile(
        FLEET,
        "on a machine of an island that does not share the folder: whose it is, so that `atoll delete` removes it",
        "when the island starts",
        _SYSTEM,
    ),
    RunFile("chaos-PLAN.html", "the verdict of a chaos plan", "if `atoll chaos run` is asked for it", _SYSTEM),
    RunFile(CRASH, "the traceback, if the synchroniser failed for good", "before `status.json`", "synced with it"),
    RunFile(STATUS, "the final state", "last of all", "synced: once it exists, everything does"),
)
"""In the order in which they are created."""


def fleet_of(runs: Path) -> str:
    """Return the name of the installation whose service keeps this folder of runs. Raises OSError."""
    path = runs / FLEET
    with suppress(FileExistsError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(16))
    return path.read_text()


def claim(run_dir: Path, fleet: str) -> None:
    """Note that this folder has only files of an island, or is a source, and goes with the job. Raises OSError."""
    run_dir.mkdir(parents=True, exist_ok=True)
    if not _is_served(run_dir):
        (run_dir / FLEET).write_text(fleet)


def claimed(runs: Path, fleet: str) -> list[str]:
    """Return the names of the run folders that were claimed for this installation."""
    with suppress(OSError):
        return sorted(path.name for path in runs.iterdir() if _is_claimed(path, fleet))
    return []


def remove_claimed(runs: Path, names: Iterable[str], fleet: str) -> None:
    """Remove these run folders, as far as they were claimed for this installation. Raises OSError."""
    for name in names:
        if name == os.path.basename(name) and _is_claimed(runs / name, fleet):
            remove_tree(runs / name)


def remove_tree(folder: Path) -> None:
    """Remove the folder, although the last processes of its job may still write or remove files in it. Raises OSError."""
    for attempt in range(REMOVALS_MAX):
        try:
            shutil.rmtree(folder)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY) or attempt + 1 == REMOVALS_MAX:
                raise
        if not folder.exists():
            return
        time.sleep(REMOVAL_RETRY_S)


def file_sizes(paths: Iterable[str]) -> list[int | str]:
    """Return the size of each file as this machine sees it, or why it cannot be read."""
    return [_size(path) for path in paths]


def _size(path: str) -> int | str:
    try:
        with open(path, "rb") as file:
            return os.fstat(file.fileno()).st_size
    except OSError as error:
        return error.strerror or str(error)


def _is_claimed(run_dir: Path, fleet: str) -> bool:
    try:
        text = (run_dir / FLEET).read_text()
    except (OSError, ValueError):
        return False
    return bool(fleet) and text == fleet and not _is_served(run_dir) and not run_dir.is_symlink()


def _is_served(run_dir: Path) -> bool:
    """Return whether a service keeps the folder, or an installation without one."""
    has_job = any((run_dir / name).exists() for name in (TAPE, STATUS))
    return (run_dir / SPECIFICATION).exists() or (has_job and not (run_dir / SOURCE).exists())


def first_line_of(run_dir: Path) -> bytes:
    """Return the first line of the tape; empty if it has none."""
    with suppress(OSError), (run_dir / TAPE).open("rb") as file:
        line = file.readline(FIRST_LINE_BYTES_MAX)
        return line if line.endswith(b"\n") else b""
    return b""


def history_in(first_line: bytes) -> int:
    """Return the epoch in which the tape with this first line begins; 0 if it is not the first line of a tape."""
    with suppress(ValueError, TypeError, AttributeError):
        return int(json.loads(first_line).get("epoch", 1))
    return 0


def history_of(run_dir: Path) -> int:
    """Return the history of which the folder has the tape, or copies; 0 if it has neither."""
    return history_in(first_line_of(run_dir)) or (noted.history if (noted := copies_in(run_dir)) else 0)


def own_history_of(run_dir: Path) -> int:
    """Return the history of which the folder has the files, and not only copies; 0 if it has none."""
    return 0 if copies_in(run_dir) is not None else history_of(run_dir)


class Copied(NamedTuple):
    """The origin of a folder's copies: a history, and the id of the node. ``checkpoints`` are those of earlier nodes."""

    history: int = 0
    node: str = ""
    checkpoints: tuple[str, ...] = ()


def copies_in(run_dir: Path) -> Copied | None:
    """Return what the folder has copies of; None if it has none."""
    try:
        noted = json.loads((run_dir / COPY).read_text())
        return Copied(int(noted["history"]), str(noted["node"]), tuple(map(str, noted["checkpoints"])))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError):  # a damaged note says that there are copies, and no more
        return Copied()


def note_copied(run_dir: Path, history: int, node: str) -> None:
    """Note that copies of this history follow. The checkpoints that are here are of earlier nodes. Raises OSError."""
    folder = run_dir / CHECKPOINTS
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    draft = run_dir / f"{COPY}.draft"
    draft.write_text(json.dumps(Copied(history, node, tuple(names))._asdict()))
    draft.replace(run_dir / COPY)


def mark_source(run_dir: Path, history: int, fleet: str) -> None:
    """Note that the head's folder is copied from this one, which goes with the job. Raises OSError."""
    (run_dir / SOURCE).write_text(str(history))
    claim(run_dir, fleet)


def source_history(run_dir: Path) -> int | None:
    """Return the history of which this folder is a source; None if nothing is copied from it."""
    with suppress(OSError, ValueError):
        return int((run_dir / SOURCE).read_text())
    return None


def set_aside(run_dir: Path, *, with_logs: bool = False) -> None:
    """Move what an earlier history left into RUN_DIR/earlier/EPOCH. Checkpoints stay. Raises OSError.

    The synchroniser's logs go ``with_logs``, unless a synchroniser on this machine writes to them.
    """
    history = history_of(run_dir)
    aside = run_dir / EARLIER / str(history)
    logs = [f"{LOGS}/{path.name}" for path in sorted((run_dir / LOGS).glob("synchroniser-*"))] if with_logs else []
    for name in (TAPE, SEALED, STATUS, REPORT, REPORT_PAGE, PARAMETERS, CRASH, *logs):
        if history and os.path.lexists(run_dir / name):
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            _remove(aside / name)
            os.replace(run_dir / name, aside / name)
    for name in (TAPE, SEALED, SNAPSHOT, JOURNAL, COPY):
        _remove(run_dir / name)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        remove_tree(path)
    else:
        path.unlink(missing_ok=True)
