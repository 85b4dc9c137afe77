"""A running job gives away its parameters: a picture in which every fragment is at a version that the tape names."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

import pytest
from safetensors import safe_open

from orchestrator.core import events
from orchestrator.host.records import FragmentUpdate, read_updates
from orchestrator.parameters import fragment_map, tensors, wire_format
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
    digests = merged_digests(job)
    for fragment, version in enumerate(versions):
        assert digests[fragment, version] == tensors.digest(taken(arrays, fragments[fragment]))
    whole, first = answer(job, [])
    assert {update.since for update in first} == {None}
    job.wait_until(
        lambda: all(
            f["version"] > one.version for f, one in zip(job.status()["view"]["fragments"], first, strict=True)
        ),
        "newer merges of every fragment",
    )
    newer, second = answer(job, [update.version for update in first])
    assert len(newer) < len(whole) / 2
    held = [tensors_of(update, {}) for update in first]
    digests = merged_digests(job)
    for fragment, (base, update) in enumerate(zip(held, second, strict=True)):
        assert tensors.digest(tensors_of(update, base)) == update.digest == digests[fragment, update.version]


def merged_digests(job: Job) -> dict[tuple[int, int], str]:
    """The digests of all merges, by fragment and version, as the tape has them."""
    records = read_tape(job.run_dir / "tape.jsonl").records
    merges = [record.event for record in records if isinstance(record.event, events.MergeCompleted)]
    return {(merge.fragment, merge.version): merge.digest for merge in merges}


def answer(job: Job, held: Sequence[int]) -> tuple[bytes, list[FragmentUpdate]]:
    """What a follower that holds these versions gets."""
    path = job.run_dir / job.port.save_parameters(job.id, held)
    content = path.read_bytes()
    path.unlink()
    name, ended, fragments = read_updates(io.BytesIO(content))
    assert (name, ended) == (job.id, False)
    return content, list(fragments)


def tensors_of(update: FragmentUpdate, base: tensors.Tensors) -> tensors.Tensors:
    """The parameters after the update of ``base``, or its values."""
    if update.since is None:
        return wire_format.decode(update.payloads[0])
    for payload in update.payloads:
        base = wire_format.parse(payload).added_to(base)
    return base
