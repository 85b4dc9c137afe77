"""Machines without a common disk: checkpoints are taken and resumed, logs are read, and a deleted job leaves no file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.checkpoints.folder import Folder
from orchestrator.checkpoints.reading import listed, verified
from orchestrator.core import saving
from orchestrator.core.messages import CatchUpFailure, CaughtUp
from orchestrator.tape.storage import read_tape
from tests.harness.reports import of_kind
from tests.wan.archipelago import WideJob
from tests.wan.conftest import ASIA, EAST

pytestmark = pytest.mark.ray
Submit = Callable[..., WideJob]
STEPS = 200


def recorded(job: WideJob, kind: type) -> list[Any]:
    return of_kind((record.event for record in read_tape(job.run_dir / "tape.jsonl").records), kind)


def runs_seen_by(job: WideJob, island: str) -> Path:
    """The folder of runs as the machine of this island sees it."""
    return Path(f"/proc/{job.island(island)['pid']}/root", *job.run_dir.parent.parts[1:])


def test_checkpoints_are_taken_and_resumed_where_no_machine_sees_the_folder_of_another(submit: Submit) -> None:
    job = submit(checkpoints={"every_merges": 8, "keep": 2})
    job.wait_until(lambda: len(recorded(job, saving.CheckpointTaken)) >= 3, "three checkpoints")
    assert not recorded(job, saving.CheckpointFailed)
    for island in (EAST, ASIA):
        there = runs_seen_by(job, island) / job.id
        assert there.is_dir(), "the island logs into a folder of its own"
        assert not (there / "tape.jsonl").exists(), "which is not the head's"
        assert not (there / "checkpoints").exists()
    job.cancel()
    job.wait_for_end()
    root = Folder.own(job.run_dir / "checkpoints")
    kept = listed(root)
    for manifest in kept:
        folder = root.sub(f"{manifest.number:06d}")
        assert verified(folder) == manifest
        assert {part.island for part in manifest.parts} == {EAST, ASIA}
        assert set(folder.names()) == {"manifest.json", *(file.name for file in manifest.files)}, (
            "nothing else is there"
        )

    resume = {"checkpoint": str(job.run_dir / "checkpoints")}
    after = submit(STEPS, resume=resume, seed=job.seed, trainer="tests.wan.diary:create")
    after.wait_for_end()
    (resumed,) = recorded(after, saving.JobResumed)
    assert resumed.checkpoint == root.sub(f"{kept[-1].number:06d}").url
    assert not recorded(after, CatchUpFailure)
    steps = {part.island: part.step for part in kept[-1].parts}
    first = {report.island: report.step for report in reversed(recorded(after, CaughtUp))}
    assert first == steps, "each goes on with its own state, which its machine did not have"
