"""A running job gives away its parameters: a picture in which every fragment is at a version that the tape names."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from safetensors import safe_open

from orchestrator.core import events
from orchestrator.parameters import fragment_map, tensors
from orchestrator.parameters.pieces import taken
from orchestrator.tape.storage import read_tape
from tests.ray.jobs import Job, synthetic

pytestmark = pytest.mark.ray


def test_what_a_running_job_gives_away_is_what_it_merged(start: Callable[..., Job]) -> None:
    job = start(synthetic(steps=100_000, groups=("us-east", "asia")))
    job.wait_until(
        lambda: min(f["version"] for f in job.status()["view"]["fragments"]) >= 2, "merges of every fragment"
    )
    with safe_open(job.run_dir / job.port.save_parameters(job.id), "numpy") as file:
        versions = [int(version) for version in file.metadata()["versions"].split(",")]
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    fragments = fragment_map.build(tensors.shapes(arrays), len(versions))
    records = read_tape(job.run_dir / "tape.jsonl").records
    merges = [record.event for record in records if isinstance(record.event, events.MergeCompleted)]
    digests = {(merge.fragment, merge.version): merge.digest for merge in merges}
    for fragment, version in enumerate(versions):
        assert digests[fragment, version] == tensors.digest(taken(arrays, fragments[fragment]))
