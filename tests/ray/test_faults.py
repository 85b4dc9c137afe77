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

from orchestrator.core import commands, events
from orchestrator.runtime import cluster
from orchestrator.runtime.control_port import RayControlPort
from orchestrator.runtime.settings import controllers_name, synchroniser_name
from orchestrator.specification.config import parse_job
from orchestrator.specification.training_sections import TrainerSection
from orchestrator.system import logbook
from tests.ray.jobs import ENDLESS, Job, gone, pids_of, synthetic
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.ray
Start = Callable[[dict[str, Any]], Job]


def jobs_with_a_controller() -> list[str]:
    import ray

    from orchestrator.runtime.controllers import Controllers

    shared = cluster.actor_named(controllers_name())
    return ray.get(shared.call(Controllers.jobs), timeout=PATIENCE_S) if shared is not None else []


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
    cluster.end_actor(cluster.actor_named(controllers_name()))
    job.command(commands.Cancel())
    assert job.wait_for_end()["view"]["outcome"] == "cancelled"
    job.wait_until(lambda: gone(pid), "the island's end")
    job.wait_until(lambda: cluster.actor_named(synchroniser_name(job.id)) is None, "the synchroniser's end")


def merges_since(job: Job, incarnation: int) -> bool:
    """Return whether work of this incarnation, or of a later one, was merged."""
    seen = job.island("asia")
    placed_at = job.at_of(events.IslandPlaced, "asia", seen["incarnation"])
    return seen["incarnation"] >= incarnation and placed_at is not None and (seen["last_merge_at"] or 0.0) > placed_at


@pytest.mark.soak("two jobs for the death of what they share")
def test_jobs_share_the_process_of_their_controllers_and_each_survives_its_death(start: Start, home: Path) -> None:
    jobs = [start(synthetic(steps=ENDLESS, groups=("asia",))) for _ in range(2)]
    before = [job.wait_for_merge("asia", 1) for job in jobs]
    (shared,) = pids_of("Controllers", home)
    for pid in (shared, *(island["pid"] for island in before)):
        os.kill(pid, signal.SIGKILL)
    for job in jobs:
        job.wait_until(lambda: merges_since(job, 2), "a merge of a later incarnation")  # noqa: B023
        text = logbook.service_logbook(job.run_dir, "controller").path.read_text()
        assert text.count(f"the controller of {job.id} begins") == 2
        assert not [other.id for other in jobs if other is not job and other.id in text]
    (shared,) = pids_of("Controllers", home)
    jobs[0].command(commands.Cancel())
    jobs[0].wait_for_end()
    jobs[0].wait_until(lambda: jobs_with_a_controller() == [jobs[1].id], "the end of one controller")
    island = jobs[1].island("asia")
    os.kill(island["pid"], signal.SIGKILL)
    jobs[1].wait_until(lambda: merges_since(jobs[1], island["incarnation"] + 1), "a merge of a later incarnation")


def test_islands_end_when_their_synchroniser_is_gone(start: Start) -> None:
    job = start(synthetic(steps=ENDLESS, groups=("asia",)))
    pid = job.wait_for_state("asia", "training")["pid"]
    cluster.end_actor(cluster.actor_named(synchroniser_name(job.id)))
    job.wait_until(lambda: gone(pid), "the island's end")
    job.wait_until(lambda: job.id not in jobs_with_a_controller(), "the controller's end")
    (job.run_dir / "status.json").touch()  # for the fixture: there is nothing left to cancel


def test_a_bug_ends_the_job_as_failed_and_everything_with_it(port: RayControlPort, tmp_path: Path) -> None:
    document = synthetic(steps=10, groups=("us-east",))
    document["islands"][0] |= {"accelerator": "gpu", "accelerators": 1024}  # no island starts and meets the bug first
    spec = parse_job(document)
    port.start_job(
        "broken", spec.model_copy(update={"trainer": TrainerSection(factory="learners.synthetic:missing")}), tmp_path
    )
    job = Job(port, "broken", tmp_path)
    job.wait_until((tmp_path / "status.json").exists, "the end")
    job.wait_until(lambda: cluster.actor_named(synchroniser_name("broken")) is None, "the synchroniser's end")
    job.wait_until(lambda: "broken" not in jobs_with_a_controller(), "the controller's end")
    assert (tmp_path / "crash.txt").exists()
    view = job.status()["view"]
    assert (view["phase"], view["outcome"]) == ("finished", "failed")
    assert "trainer 'learners.synthetic:missing' cannot be imported" in view["reason"]
