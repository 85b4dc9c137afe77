"""Three live jobs of synthetic islands, whose tapes are kept: one calm, one that loses an island, one with everything.

They run on an embedded cluster of their own. A tape names node groups and processes, and nothing of the machine.
"""

from __future__ import annotations

import gzip
import os
import signal
import socket
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.core import commands, events, saving
from orchestrator.runtime import embedded
from orchestrator.runtime.control_port import RayControlPort, connect
from orchestrator.runtime.groups import NodeGroup
from orchestrator.specification.config import parse_job
from orchestrator.system.roots import AllowedRoots
from orchestrator.tape.storage import TapeWriter, read_tape
from tests.ray.jobs import Job, assert_sound, pid_of, synthetic

GROUPS = tuple(NodeGroup(name=name, region=name, cpus=2) for name in ("us-east", "europe"))
NAMES = tuple(group.name for group in GROUPS)
ENDLESS = 100_000
MERGES = 16


def record(folder: Path) -> None:
    """The tapes lie in ``folder``, compressed."""
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch) / "home"
        embedded.up(home, GROUPS)
        try:
            port = connect(home)
            try:
                for name, (document, live) in JOBS.items():
                    job = _started(port, name, document, Path(scratch))
                    live(job, home)
                    job.wait_for_end()
                    assert_sound(job)
                    _keep(job, folder / f"{name}.jsonl.gz", scratch)
            finally:
                port.close()
        finally:
            embedded.down(home)


def _started(port: RayControlPort, name: str, document: dict[str, Any], scratch: Path) -> Job:
    port.start_job(name, parse_job(document), scratch / name, {}, AllowedRoots.only(scratch))
    return Job(port, name, scratch / name)


def _keep(job: Job, path: Path, scratch: str) -> None:
    """Write the tape anew, with a name for the machine that is no machine's."""
    tape, copy = read_tape(job.run_dir / "tape.jsonl"), job.run_dir / "copy.jsonl"
    with TapeWriter(copy, tape.header) as writer:
        for record in tape.records:
            event = record.event
            placed = isinstance(event, events.IslandPlaced)
            writer.append(replace(record, event=replace(event, node="machine") if placed else event))
    raw = copy.read_bytes()
    for word in (scratch, str(Path.cwd()), f'"{socket.gethostname()}"'):
        assert word.encode() not in raw, f"{path.name} names {word}"
    path.write_bytes(gzip.compress(raw, mtime=0))
    print(f"{path.name}: {len(tape.records)} records, {path.stat().st_size} bytes", flush=True)


# ── the jobs ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _calm(job: Job, home: Path) -> None:
    """Nothing happens until its budget is spent."""


def _loses_an_island(job: Job, home: Path) -> None:
    pid = job.wait_for_merge("europe", 1)["pid"]
    os.kill(pid, signal.SIGKILL)
    job.wait_for_merge("europe", 2)


def _with_everything(job: Job, home: Path) -> None:
    """A checkpoint, one island more, the synchroniser's death, a way back to the checkpoint, and one island less."""
    first, spare = "europe-0", "europe-1"
    job.wait_for_merge(first, 1)
    job.command(commands.Checkpoint())
    job.wait_until(lambda: _happened(job, saving.CheckpointTaken), "a checkpoint")
    job.port.submit(job.id, "up", "test", commands.Scale("europe", 2))
    job.wait_for_merge(spare, 1)
    _merges(job)
    os.kill(job.wait_until(lambda: pid_of("SynchroniserActor", home), "a synchroniser's process"), signal.SIGKILL)
    job.wait_until(lambda: len(job.restarts()) == 1, "the next life")
    job.status_once_back()
    _merges(job)
    job.port.submit(job.id, "back", "test", commands.Rollback(0))
    job.wait_until(lambda: _happened(job, saving.FragmentRestored), "the way back")
    _merges(job)
    job.port.submit(job.id, "down", "test", commands.Scale("europe", 1))
    job.wait_for_state(spare, "drained")
    job.command(commands.Cancel())


def _merges(job: Job) -> None:
    """So many more, that what was done before has had its consequences."""
    before = job.status()["view"]["global_version"]
    job.wait_until(lambda: job.status()["view"]["global_version"] >= before + MERGES, "merges")


def _happened(job: Job, kind: type) -> bool:
    return any(isinstance(record.event, kind) for record in read_tape(job.run_dir / "tape.jsonl").records)


def _everything() -> dict[str, Any]:
    document = synthetic(ENDLESS, NAMES)
    for section in document["islands"]:
        section |= {"count_max": 2, "cpus": 0.5}
    return document


JOBS: dict[str, tuple[dict[str, Any], Callable[[Job, Path], None]]] = {
    "live-calm": (synthetic(200, NAMES), _calm),
    "live-killed": (synthetic(400, NAMES), _loses_an_island),
    "live-everything": (_everything(), _with_everything),
}
