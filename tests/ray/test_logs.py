"""Logs of real processes: a user's own traceback, and the last lines of an island that SIGKILL ended, are found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.runtime.clusterfile import ClusterFile
from orchestrator.system.logbook import island_logbook, logbooks, service_logbook
from tests.ray.jobs import Job, synthetic

pytestmark = pytest.mark.ray
Start = Callable[[dict[str, Any]], Job]


def test_the_traceback_of_a_users_model_is_in_the_log_of_its_island(start: Start, home: Path) -> None:
    document = synthetic(steps=100, groups=("asia",), recovery={"restarts_max": 0})
    job = start(document | {"trainer": "learners.jax_trainer:create", "model": {"factory": "tests.own_models:faulty"}})
    job.wait_for_state("asia", "failed")
    said = island_logbook(job.run_dir, "asia", 1).path.read_text()
    assert f"my factory is called in {job.id}:asia:1" in said
    assert "ERROR learners.island: the model cannot be built\nTraceback (most recent call last):" in said
    assert 'tests/own_models.py", line' in said
    assert "ValueError: my own mistake" in said
    assert "asia.1 is process" in service_logbook(job.run_dir, "controller").path.read_text()

    assert job.wait_for_end()["view"]["outcome"] == "failed"
    assert "the job ends as failed" in service_logbook(job.run_dir, "synchroniser").path.read_text()
    cluster = ClusterFile.find(home)
    assert cluster is not None
    secret = (cluster.state / "token").read_text().strip()
    assert not [book for book in logbooks(job.run_dir) if secret in book.path.read_text()]
