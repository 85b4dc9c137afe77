"""The head's machine dies, with everything on it: islands train on, and the job goes on once there is a head again."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from orchestrator.runtime import processes
from orchestrator.runtime.clusterfile import ClusterFile
from orchestrator.runtime.settings import CONTROL_GROUP
from tests.ray.jobs import STEPS_ON, assert_sound
from tests.wan.archipelago import Archipelago, WideJob
from tests.wan.conftest import ASIA, EAST

pytestmark = pytest.mark.ray
Submit = Callable[..., WideJob]
STEPS = 1000
"""Far more than it takes until everyone is heard again, so that the job does not end by what was trained unheard."""


def test_islands_train_on_without_a_head_and_the_job_completes_once_it_is_back(
    archipelago: Archipelago, submit: Submit
) -> None:
    job = submit(STEPS)
    for island in (EAST, ASIA):
        job.wait_for_merge(island, 1)
    pids = {island: job.island(island)["pid"] for island in (EAST, ASIA)}
    cluster = ClusterFile.find(archipelago.home.path)
    assert cluster is not None

    killed_at = time.monotonic()
    assert len(processes.kill_all(cluster.id, CONTROL_GROUP)) > 2
    for pid in pids.values():
        job.wait_until(lambda pid=pid: job.diary(pid).count(killed_at) >= STEPS_ON, "steps without a head")
    assert not cluster.answers()
    archipelago.up()
    job.wait_until(job.restarts, "the next synchroniser")
    job.wait_until(lambda: job.contributors_since(job.restarts()[0].at) == {EAST, ASIA}, "everyone again")
    print(f"everyone again {time.monotonic() - killed_at:.1f} s after the head's death")
    status = job.wait_for_end()
    assert status["view"]["outcome"] == "completed"
    assert [island["incarnation"] for island in status["view"]["islands"]] == [1, 1]
    assert_sound(job)
