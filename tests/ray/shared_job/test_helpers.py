"""The job's other processes may die, too: each is made again, and an island that dies with one comes back."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core import events
from tests.ray.jobs import Job, gone, pids_of

pytestmark = pytest.mark.ray


def restarts(job: Job, helper: str) -> int:
    """How often helpers of such a name were made again, by the job's status."""
    return sum(one["restarts"] for one in job.status()["helpers"] if one["name"].startswith(helper))


def well(job: Job) -> bool:
    helpers: list[dict[str, Any]] = job.status()["helpers"]
    return all(one["condition"] == "running" and not one["reason"] for one in helpers)


def contributes_again(job: Job, before: int) -> bool:
    """Work of a later incarnation was merged. Which one that is depends on when the controller's death was noticed."""
    seen = job.island("asia")
    placed_at = job.at_of(events.IslandPlaced, "asia", seen["incarnation"])
    return seen["incarnation"] > before and placed_at is not None and (seen["last_merge_at"] or 0.0) > placed_at


def test_controller_evaluator_and_node_agents_are_made_again_and_an_island_that_died_with_them_comes_back(
    job: Job, home: Path
) -> None:
    """Before, a job whose controller had died placed no island any more, and said nothing."""
    victim = job.island("asia")
    job.wait_until(lambda: well(job) and len(job.last["helpers"]) > 2, "all helpers")
    before = restarts(job, "controller")
    struck = [*pids_of("Controller", home), *pids_of("Evaluator", home), *pids_of("NodeAgent", home), victim["pid"]]
    for pid in struck:
        os.kill(pid, signal.SIGKILL)
    job.wait_until(
        lambda: contributes_again(job, victim["incarnation"]), "a merge with the work of a later incarnation"
    )
    assert all(map(gone, struck))
    # a controller that was made again counts its own nodes' agents anew
    job.wait_until(lambda: restarts(job, "controller") > before and well(job), "another controller")
    # one that died as it measured is replaced by the evaluation, which begins to count anew
    job.wait_until(lambda: pids_of("Evaluator", home) and well(job), "another evaluator")
    job.wait_until(lambda: pids_of("NodeAgent", home), "an agent of a node")
    assert job.status()["view"]["epoch"] == job.last["view"]["epoch"], "the synchroniser lives"
