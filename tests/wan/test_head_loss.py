"""The head's machine dies, with everything on it: islands train on, and the job goes on once there is a head again."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from orchestrator.runtime import processes
from orchestrator.runtime.clusterfile import ClusterFile
from orchestrator.runtime.settings import CONTROL_GROUP
from tests.ray.jobs import assert_sound
from tests.wan.archipelago import Archipelago, WideJob
from tests.wan.conftest import ASIA, EAST

pytestmark = pytest.mark.ray
Submit = Callable[..., WideJob]
AWAY_S = 4.0
GAP_MAX_S = 3.0


def test_islands_train_on_without_a_head_and_the_job_completes_once_it_is_back(
    archipelago: Archipelago, submit: Submit
) -> None:
    job = submit(steps=700)
    for island in (EAST, ASIA):
        job.wait_for_merge(island, 1)
    pids = {island: job.island(island)["pid"] for island in (EAST, ASIA)}
    cluster = ClusterFile.find(archipelago.home.path)
    assert cluster is not None

    killed_at = time.monotonic()
    assert len(processes.kill_all(cluster.id, CONTROL_GROUP)) > 2
    time.sleep(AWAY_S)
    assert not cluster.answers()
    archipelago.up()
    job.wait_until(job.restarts, "the next synchroniser")
    job.wait_until(lambda: job.contributors_since(job.restarts()[0].at) == {EAST, ASIA}, "everyone again")
    back_at = time.monotonic()
    print(f"everyone again {back_at - killed_at:.1f} s after the head's death")
    for pid in pids.values():
        assert job.diary(pid).longest_gap(killed_at, back_at) <= GAP_MAX_S
    status = job.wait_for_end()
    assert status["view"]["outcome"] == "completed"
    assert [island["incarnation"] for island in status["view"]["islands"]] == [1, 1]
    assert_sound(job)
