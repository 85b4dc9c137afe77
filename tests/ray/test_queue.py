"""The queue on a real cluster: a job waits while another holds the node group, and trains as soon as that has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from api.jobs.service import Service
from api.storage.store import Store
from orchestrator.core import commands
from orchestrator.runtime.control_port import RayControlPort
from tests.ray.jobs import synthetic
from tests.waiting import wait_until


@pytest.mark.ray
@pytest.mark.soak("two jobs for what tests/api/test_queue.py has")
def test_a_job_waits_for_the_room_that_another_holds_and_then_trains(port: RayControlPort, tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'store.sqlite'}")
    service = Service(port, store, tmp_path / "runs")  # type: ignore[arg-type]
    service.queue.begin()
    try:
        first = service.submit(document(steps=100_000), "me", None).job
        second = service.submit(document(steps=40), "me", None)
        assert (second.state, second.queue_position) == ("queued", 1)
        assert second.reason == "it asks for 3 cpus on asia, where running jobs leave 1 of 4"
        assert port.node_groups()[0]["cpus_free"] >= 1.0, "nothing of it is placed"
        until(service, first, "training")
        service.submit_command(first, commands.Cancel(), "me")
        until(service, second.job, "completed")
        assert service.job(first).state == "cancelled"
    finally:
        service.queue.close()
        store.close()


def document(steps: int) -> dict[str, Any]:
    return synthetic(steps, islands=[{"node_group": "asia", "cpus": 3}])


def until(service: Service, job: str, state: str) -> None:
    """The job, or its only island, is in this state."""
    wait_until(lambda: state in ((job_now := service.job(job)).state, job_now.islands[0].state), f"{job} {state}")
