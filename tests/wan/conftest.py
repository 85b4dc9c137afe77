"""An archipelago of the head's region, east, and two regions of the group asia; jobs in it."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from orchestrator.runtime.groups import NodeGroup
from tests.ray.jobs import synthetic
from tests.wan.archipelago import Archipelago, WideJob
from tests.wan.diary import folder_of

EAST, ASIA = "east", "asia"
GROUPS = (NodeGroup(name=EAST, region=EAST), NodeGroup(name=ASIA, region=ASIA, nodes=2))
ENDLESS = 1_000_000


@pytest.fixture(scope="package")
def archipelago(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Archipelago]:
    built = Archipelago(tmp_path_factory.mktemp("wan"), GROUPS)
    try:
        built.up()
        yield built
    finally:
        built.down()


@pytest.fixture
def submit(archipelago: Archipelago) -> Iterator[Callable[..., WideJob]]:
    """Starts jobs of one island in the east and one in asia; they have ended when the test has."""
    jobs: list[WideJob] = []

    def submit_one(steps: int = ENDLESS, **sections: Any) -> WideJob:
        seed = sections.pop("seed", None) or secrets.randbelow(1 << 30)
        with archipelago.client() as client:
            told = client.submit(synthetic(steps, groups=(EAST, ASIA), seed=seed, **sections))
        jobs.append(WideJob(archipelago, told.job, seed))
        return jobs[-1]

    yield submit_one
    for name in archipelago.names:
        archipelago.regions.heal(name)
    for job in jobs:
        if job.run_dir.exists():  # it may be deleted
            if not (job.run_dir / "status.json").exists():
                job.cancel()
            job.wait_for_end()
        job.close()
        shutil.rmtree(folder_of(job.seed), ignore_errors=True)
