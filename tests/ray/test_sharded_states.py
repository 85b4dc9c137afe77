"""Islands whose parameters lie on several hosts, live: each host is sent its part, and they give each other their states."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.core import commands
from orchestrator.core.messages import CatchUpFailure, CaughtUp
from tests.harness.reports import of_kind
from tests.ray.jobs import Job, assert_sound
from tests.ray.test_hosts import nodes, pids_of, started, trained

pytestmark = [
    pytest.mark.ray,
    pytest.mark.soak("six more nodes on the cluster"),
]
__all__ = ["nodes", "started"]  # fixtures

FRAGMENT_BYTES = 4 * 9216 // 3
"""Of the tiny model, in float32; three fragments, as even as its tensors allow."""


def test_islands_of_other_meshes_and_hosts_give_each_other_their_states(
    started: Callable[..., Job], tmp_path: Path
) -> None:
    islands = [
        {"node_group": "pair", "name": "left", "hosts": 2, "mesh": {"fsdp": 4}},
        {"node_group": "pair", "name": "right", "hosts": 2, "mesh": {"fsdp": 2, "tensor": 2}},
        {"node_group": "wide", "name": "alone", "mesh": {"fsdp": 4}},
    ]
    job = started(trained(10**6, islands, tmp_path))
    for name in ("left", "right", "alone"):
        job.wait_for_merge(name, 1)
    for number, victim in enumerate(("left", "right", "alone", "left")):
        incarnation = 1 + ("left", "right", "alone", "left")[:number].count(victim)
        os.kill(pid_of(job, victim, incarnation), signal.SIGKILL)
        job.wait_for_merge(victim, incarnation + 1)
    seen = [record.event for record in job.records()]
    came = [(e.island, e.donor) for e in of_kind(seen, CaughtUp) if e.incarnation > 1]
    assert [island for island, _ in came] == ["left", "right", "alone", "left"]
    assert all(donor not in (None, island) for island, donor in came), came
    assert not of_kind(seen, CatchUpFailure), "each takes what the first peer that it asks has"
    lines = job.status()["lines"]["islands"]
    for name, share in (("left", 0.5), ("right", 0.5), ("alone", 1.0)):
        line = lines[name]
        mean = line["down_bytes"]["values"] / line["down_payloads"]["values"]
        print(f"{name}: {mean:.0f} bytes a host and publication, of fragments of {FRAGMENT_BYTES}")
        assert 0.8 * share * FRAGMENT_BYTES < mean < 1.2 * share * FRAGMENT_BYTES, line
    job.command(commands.Cancel())
    job.wait_for_end()
    assert_sound(job)


def pid_of(job: Job, island: str, incarnation: int) -> int:
    """Of its last process."""
    if island != "alone":
        return pids_of(job, island, incarnation)[-1]
    pid: int = job.island(island)["pid"]
    return pid
