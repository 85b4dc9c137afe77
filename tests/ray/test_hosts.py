"""Islands of several hosts, live: gangs of processes on several nodes, which live, save and die as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.core import commands, events
from orchestrator.runtime import processes
from orchestrator.runtime.clusterfile import ClusterFile
from orchestrator.runtime.groups import NodeGroup
from orchestrator.runtime.ray_start import Place, RayProgram, start_node
from tests.ray.jobs import Job, assert_sound, gone, synthetic
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.ray

GROUPS = (
    NodeGroup(name="pair", region="us-east1", nodes=3),
    NodeGroup(name="slice", region="europe-west4", nodes=2, accelerators=2, accelerator="tpu", slice_hosts=2),
)


@pytest.fixture(scope="module")
def nodes(home: Path) -> Iterator[None]:
    """Nodes beside the others of the cluster, while these tests run."""
    found, names = ClusterFile.find(home), []
    assert found is not None
    with RayProgram(found, dashboard=False) as program:
        starts = []
        for group in GROUPS:
            for number in range(group.nodes):
                names.append(f"{group.name}-{number}")
                starts.append(start_node(program, names[-1], group, number, Place()))
        assert [start.wait(PATIENCE_S) for start in starts] == [0] * len(starts)
    yield
    for name in names:
        processes.kill_all(found.id, name)


@pytest.fixture
def started(nodes: None, start: Callable[..., Job]) -> Callable[..., Job]:
    return start


def document(steps: int = 100_000, **sections) -> dict:
    made = synthetic(steps, ("pair", "slice"), **sections)
    made["islands"][0] |= {"hosts": 2}
    made["islands"][1] |= {"hosts": 2, "accelerator": "tpu", "accelerators": 2}
    return made


def test_two_islands_of_two_hosts_train_and_end(started: Callable[..., Job]) -> None:
    job = started(document(200, trainer="learners.synthetic:create"))
    job.wait_for_merge("pair", 1)
    job.wait_for_merge("slice", 1)
    job.wait_for_end()
    assert_sound(job)
