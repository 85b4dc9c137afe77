"""One embedded Ray cluster for all tests of this folder."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import parse_job
from orchestrator.core import commands
from orchestrator.roots import AllowedRoots
from orchestrator.runtime import cluster, embedded
from orchestrator.runtime.control_port import RayControlPort, connect
from orchestrator.runtime.groups import DEFAULT_GROUPS
from tests.ray.jobs import Job
from tests.waiting import wait_until


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("home")
    embedded.up(folder, DEFAULT_GROUPS)
    yield folder
    embedded.down(folder)


@pytest.fixture(scope="session")
def port(home: Path) -> Iterator[RayControlPort]:
    connected = connect(home)
    yield connected
    connected.close()


@pytest.fixture
def start(port: RayControlPort, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Starts jobs; those still running at the test's end are cancelled, so that the next test finds the fleet free.

    One that does not end even so fails its own test only: its actors are ended by force.
    """
    started: list[Job] = []

    def start_one(document: dict[str, Any], trainer: str | None = None, **cordoned: str) -> Job:
        job_id = f"job-{uuid.uuid4().hex[:8]}"
        spec = parse_job(document)
        spec = spec.model_copy(update={"trainer": trainer}) if trainer else spec
        port.start_job(job_id, spec, tmp_path / job_id, cordoned, AllowedRoots.only(tmp_path))
        started.append(Job(port, job_id, tmp_path / job_id))
        return started[-1]

    yield start_one
    try:
        for job in started:
            if not (job.run_dir / "status.json").exists():
                job.command(commands.Cancel())
            job.wait_until((job.run_dir / "status.json").exists, "the end")
    finally:
        for job in started:
            cluster.end_actors_of(job.id)
        wait_until(
            lambda: all(group["cpus_free"] == group["cpus"] for group in port.node_groups()), "the end of all islands"
        )
