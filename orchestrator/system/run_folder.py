"""The folder of a run, RUN_DIR: the name of each file in it, what it holds, when it is written, and how durably.

Responsible for these names being written once: whoever writes or reads such a file has its name from here, and
docs/reference/run-dir.md is made from ``FILES``. Refuses to know what is in a file, and where runs lie.
"""

from __future__ import annotations

from dataclasses import dataclass

SPECIFICATION = "spec.yaml"
ORIGIN = "origin.json"
TOKENIZER = "tokenizer"
RESUMED = "resumed.json"
TAPE = "tape.jsonl"
SNAPSHOT = "snapshot"
JOURNAL = "journal"
BOOT = "boot"
CLOCK = "clock.json"
LOGS = "logs"
ISLAND_LOGS = "islands"
CHECKPOINTS = "checkpoints"
PARAMETERS = "merged.safetensors"
REPORT = "report.json"
REPORT_PAGE = "report.html"
CRASH = "crash.txt"
STATUS = "status.json"

_SYSTEM = "with the operating system"
_KERNEL = "with the operating system, so SIGKILL loses nothing"
_IN_CHECKPOINT = "synced before the manifest"


@dataclass(frozen=True, slots=True)
class RunFile:
    """``path`` is from RUN_DIR; what is in capitals differs from file to file."""

    path: str
    holds: str
    written: str
    durable: str


FILES = (
    RunFile(SPECIFICATION, "the specification that the service accepted", "by the service, before the job", _SYSTEM),
    RunFile(
        ORIGIN,
        "of the checkpoint that the job continues (`model.initial_weights`) what exports keep: its small files",
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
        "the checkpoint that the job goes on from, if it does",
        "before the first event",
        "synced, with a digest",
    ),
    RunFile(
        TAPE,
        "every event, and what was decided on it",
        "one line each event, before any effect is carried out",
        "synced before anything rests on it",
    ),
    RunFile(
        SNAPSHOT,
        "core and accounts at one record of the tape",
        "every `durability.snapshot_every_records` records",
        "no matter: the tape holds all of it",
    ),
    RunFile(
        f"{JOURNAL}/fragment-FRAGMENT-NUMBER.journal",
        "Θ and momentum of a fragment, by version",
        "one entry each merge, before islands hear of it",
        "`sync`: at once; `async`: after some merges",
    ),
    RunFile(BOOT, "which start of the machine the job began in", "when the job begins", "synced"),
    RunFile(
        CLOCK,
        "when the job was created, on the clock that nobody can set",
        "with each synchroniser's beginning",
        _SYSTEM,
    ),
    RunFile(
        f"{LOGS}/PROCESS-NUMBER.log", "what synchroniser, controller and evaluator printed", "as they print", _KERNEL
    ),
    RunFile(
        f"{LOGS}/{ISLAND_LOGS}/ISLAND-INCARNATION.log", "what each life of an island printed", "as it prints", _KERNEL
    ),
    RunFile(
        f"{LOGS}/{ISLAND_LOGS}/ISLAND-INCARNATION.log.older",
        "what came before, once a log was 4 MiB long; of other logs likewise",
        "in the log's place",
        _KERNEL,
    ),
    RunFile(
        f"{CHECKPOINTS}/NUMBER/fragment-FRAGMENT.parameters",
        "Θ of a fragment; `.momentum` and `.residue` likewise",
        "by the synchroniser, at a cut",
        _IN_CHECKPOINT,
    ),
    RunFile(
        f"{CHECKPOINTS}/NUMBER/ISLAND/part.json", "what an island's arrays belong to", "by the island", _IN_CHECKPOINT
    ),
    RunFile(
        f"{CHECKPOINTS}/NUMBER/ISLAND/arrays….safetensors",
        "the island's parameters and optimizer state",
        "by each of its processes",
        _IN_CHECKPOINT,
    ),
    RunFile(
        f"{CHECKPOINTS}/NUMBER/….blocks",
        "digests of the blocks of a file of which hosts read parts",
        "with that file",
        _IN_CHECKPOINT,
    ),
    RunFile(
        f"{CHECKPOINTS}/NUMBER/manifest.json",
        "all of the checkpoint; without it there is none",
        "last of a checkpoint",
        "synced",
    ),
    RunFile(PARAMETERS, "Θ at the end, float32", "at the job's end", "synced before `status.json`"),
    RunFile(REPORT, "the report for programs", "at the job's end", "synced before `status.json`"),
    RunFile(REPORT_PAGE, "the report for people", "at the job's end", "synced before `status.json`"),
    RunFile("chaos-PLAN.html", "the verdict of a chaos plan", "where `atoll chaos run` is asked for one", _SYSTEM),
    RunFile(CRASH, "the traceback, if the synchroniser failed for good", "before `status.json`", "synced with it"),
    RunFile(STATUS, "the final state", "last of all", "synced: once it is there, everything is"),
)
"""In the order in which a run comes to have them."""
