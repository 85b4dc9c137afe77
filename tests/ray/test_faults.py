"""Faults that need a job of their own: an island that nobody waits for long, a job that loses what governs it,
a trainer that does not exist.

Those that a job survives as it is are in ``shared_job``.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core import commands
from orchestrator.runtime import cluster
from orchestrator.runtime.control_port import RayControlPort
from orchestrator.runtime.settings import controller_name, synchroniser_name
from orchestrator.specification.config import parse_job
from tests.ray.jobs import ENDLESS, Job, gone, synthetic

pytestmark = pytest.mark.ray
Start = Callable[[dict[str, Any]], Job]


def test_an_island_that_stays_silent_is_replaced_and_its_process_ended(start: Start) -> None:
    job = start(synthetic(steps=ENDLESS, groups=("asia",), recovery={"suspect_timeout_s": 0.5}))
    stopped = job.wait_for_merge("asia", 1)
    os.kill(stopped["pid"], signal.SIGSTOP)
    back = job.wait_for_merge("asia", 2)
    assert back["pid"] != stopped["pid"]
    job.wait_until(lambda: gone(stopped["pid"]), "the end of its first process")


def test_a_job_without_its_controller_still_lets_everything_go(start: Start) -> None:
    job = start(synthetic(steps=ENDLESS, groups=("asia",)))
    pid = job.wait_for_state("asia", "training")["pid"]
    cluster.end_actor(cluster.actor_named(controller_name(job.id)))
    job.command(commands.Cancel())
    assert job.wait_for_end()["view"]["outcome"] == "cancelled"
    job.wait_until(lambda: gone(pid), "the island's end")
    job.wait_until(lambda: cluster.actor_named(synchroniser_name(job.id)) is None, "the synchroniser's end")


def test_islands_end_when_their_synchroniser_is_gone(start: Start) -> None:
    job = start(synthetic(steps=ENDLESS, groups=("asia",)))
    pid = job.wait_for_state("asia", "training")["pid"]
    cluster.end_actor(cluster.actor_named(synchroniser_name(job.id)))
    job.wait_until(lambda: gone(pid), "the island's end")
    job.wait_until(lambda: cluster.actor_named(controller_name(job.id)) is None, "the controller's end")
    (job.run_dir / "status.json").touch()  # for the fixture: there is nothing left to cancel


def test_a_bug_ends_the_job_as_failed_and_everything_with_it(port: RayControlPort, tmp_path: Path) -> None:
    spec = parse_job(synthetic(steps=10, groups=("us-east",)))
    port.start_job("broken", spec.model_copy(update={"trainer": "learners.synthetic:missing"}), tmp_path)
    job = Job(port, "broken", tmp_path)
    job.wait_until((tmp_path / "status.json").exists, "the end")
    job.wait_until(lambda: cluster.actor_named(synchroniser_name("broken")) is None, "the synchroniser's end")
    job.wait_until(lambda: cluster.actor_named(controller_name("broken")) is None, "the controller's end")
    assert (tmp_path / "crash.txt").exists()
    view = job.status()["view"]
    assert (view["phase"], view["outcome"]) == ("finished", "failed")
    assert "trainer 'learners.synthetic:missing' cannot be imported" in view["reason"]
