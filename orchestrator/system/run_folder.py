"""The folder of a run, RUN_DIR: the name of each file in it, what it holds, when it is written, and how durably.

These names are defined only here; docs/reference/run-dir.md is generated from ``FILES``.

An island on a machine with a disk of its own writes its logs under the same path there. Such a folder is *claimed* for the
installation, so that it can be removed with the job, and never a folder that a service keeps.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

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
CLOCK = "clock.json"
LOGS = "logs"
ISLAND_LOGS = "islands"
PLACE = "place.mark"
"""A random text by which another machine recognises the folder in which it is as its own."""
CHECKPOINTS = "checkpoints"
PARAMETERS = "merged.safetensors"
DUMP = "parameters-"
"""What the name of a file with the parameters of a running job begins with. Its reader removes it."""
REPORT = "report.json"
REPORT_PAGE = "report.html"
CRASH = "crash.txt"
STATUS = "status.json"

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
                    detail=f"--retention-{name} is {value:g}, but must be above 0. Leave it out to keep all ended jobs."
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
    """Note that this folder has only files of an island, which go with the job. Raises OSError."""
    run_dir.mkdir(parents=True, exist_ok=True)
    if not any((run_dir / name).exists() for name in (SPECIFICATION, TAPE, STATUS)):
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
    is_served = any((run_dir / name).exists() for name in (SPECIFICATION, TAPE, STATUS))
    return bool(fleet) and text == fleet and not is_served and not run_dir.is_symlink()
