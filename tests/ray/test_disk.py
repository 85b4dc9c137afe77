"""A disk that takes nothing more while a job runs: seen, waited out, and no island's business."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator.tape.replay import replay
from orchestrator.tape.storage import read_tape
from tests.ray.jobs import GAP_MAX_S, Job, pid_of, synthetic

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]
Start = Callable[[dict[str, Any]], Job]

ISLANDS = ("us-east", "asia")
REFUSED_S = 2.0


def test_islands_train_on_while_the_disk_takes_nothing_and_merge_once_it_does(start: Start, home: Path) -> None:
    job = start(synthetic(steps=10_000_000, groups=ISLANDS))
    for island in ISLANDS:
        job.wait_for_merge(island, 1)
    assert job.status()["disk_trouble"] is None
    before, process = job.status(), psutil.Process(pid_of("SynchroniserActor", home))
    unlimited = process.rlimit(resource.RLIMIT_FSIZE)
    process.rlimit(
        resource.RLIMIT_FSIZE, (1, unlimited[1])
    )  # no file may grow: every write is refused, as on a full disk
    try:
        trouble = job.wait_until(lambda: job.status()["disk_trouble"], "trouble with the disk")
        assert "File too large" in trouble
        paused_at = job.status()["view"]["global_version"]
        time.sleep(REFUSED_S)
        assert job.status()["view"]["global_version"] == paused_at
        assert job.status()["view"]["pause_reason"] == job.last["disk_trouble"]
    finally:
        process.rlimit(resource.RLIMIT_FSIZE, unlimited)
    job.wait_until(lambda: job.status()["disk_trouble"] is None, "the end of the trouble")
    resumed_at = job.status()["at"]
    for island in ISLANDS:
        job.wait_until(lambda i=island: (job.island(i)["last_merge_at"] or 0.0) > resumed_at, f"a merge of {island}")
        assert job.gap_max_s(island, before["at"]) <= GAP_MAX_S
    assert psutil.pid_exists(process.pid)
    job.command("cancel")
    job.wait_for_end()
    assert replay(read_tape(job.run_dir / "tape.jsonl")).exact
