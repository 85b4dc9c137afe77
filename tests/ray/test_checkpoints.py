"""Checkpoints of running jobs with real processes: taken under load, whole or not there, and gone on from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from orchestrator.checkpoints.folder import Folder
from orchestrator.checkpoints.manifest import Manifest
from orchestrator.checkpoints.reading import listed, verified
from orchestrator.core import saving
from orchestrator.tape.replay import replay
from orchestrator.tape.storage import read_tape
from tests.ray.jobs import Job, synthetic

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]
Start = Callable[..., Job]


def recorded(job: Job, kind: type) -> list[Any]:
    return [record.event for record in read_tape(job.run_dir / "tape.jsonl").records if isinstance(record.event, kind)]


def taken(job: Job, count: int) -> list[Any]:
    job.wait_until(lambda: len(recorded(job, saving.CheckpointTaken)) >= count, f"{count} checkpoints")
    return recorded(job, saving.CheckpointTaken)


def checkpoints_of(job: Job) -> list[Manifest]:
    return listed(Folder(str(job.run_dir / "checkpoints")))


def test_a_job_that_trains_is_saved_every_few_merges_and_keeps_the_latest(start: Start) -> None:
    job = start(synthetic(steps=150, checkpoints={"every_merges": 6, "keep": 2}))
    taken(job, 4)
    job.command("checkpoint")
    job.wait_for_end()
    kept = checkpoints_of(job)
    assert [manifest.number for manifest in kept] == [
        event.checkpoint for event in recorded(job, saving.CheckpointTaken)
    ][-2:]
    saved = recorded(job, saving.IslandSaved)
    for manifest in kept:
        assert verified(Folder(str(job.run_dir / "checkpoints" / f"{manifest.number:06d}"))) == manifest
        of_this = {event.island: event.tokens_total for event in saved if event.checkpoint == manifest.number}
        assert manifest.tokens_trained == sum(of_this.values())  # each island once, at its own cut, nobody died
        assert {part.island: part.tokens_total for part in manifest.parts} == of_this
        for part in manifest.parts:
            ahead = [held > f.version for held, f in zip(part.versions, manifest.fragments, strict=True)]
            assert not any(ahead), "an island holds what Θ of the checkpoint does not"
        for p, merged in enumerate(manifest.merged_tokens):
            open_work = sum(part.token_counts[p] for part in manifest.parts)
            assert 0 < merged <= manifest.tokens_trained
            assert merged + open_work >= manifest.tokens_trained - 4 * 1024 * 32
    assert replay(read_tape(job.run_dir / "tape.jsonl")).divergence is None
