"""A service and its cluster, each node of it in a region of its own: the head's, east, and two regions of the group asia."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from api.client import Client
from api.installation.home import Home
from orchestrator.core.events import ContributionArrived
from orchestrator.core.vocabulary import Contribution
from orchestrator.runtime import embedded
from orchestrator.runtime.groups import NodeGroup
from orchestrator.runtime.settings import CONTROL_GROUP
from orchestrator.tape.storage import read_tape
from tests.api.installation import ROOT
from tests.ray.jobs import Job, synthetic
from tests.waiting import wait_until
from tests.wan.diary import Diary, folder_of
from tests.wan.regions import Regions

EAST, ASIA = "east", "asia"
GROUPS = (NodeGroup(name=EAST, region=EAST), NodeGroup(name=ASIA, region=ASIA, nodes=2))
REGIONS = (CONTROL_GROUP, EAST, "asia-0", "asia-1")
ENDLESS = 1_000_000


class Archipelago:
    """The whole of it, seen from outside all regions."""

    def __init__(self, folder: Path) -> None:
        self.regions = Regions(REGIONS)
        self.home, self.runs = Home(folder / "home"), folder / "runs"
        self._service: subprocess.Popen[bytes] | None = None

    def up(self) -> None:
        """What does not run of it is started: what an operator does after a failure, too."""
        embedded.up(self.home.path, GROUPS, places=self.regions.places)
        if self._service is None or self._service.poll() is not None:
            place = self.regions.places[CONTROL_GROUP]
            served = ["--home", str(self.home.path), "--runs", str(self.runs), "--host", place.address, "--insecure"]
            command = [*place.enter, sys.executable, "-m", "api.serve", *served, "--control", "tests.wan.diary:connect"]
            with self.home.log.open("ab") as log:
                self._service = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
            wait_until(self._answers)

    def down(self) -> None:
        if self._service is not None:
            self._service.kill()
            self._service.wait()
        embedded.down(self.home.path)
        self.regions.close()

    def client(self) -> Client:
        return Client.at(self.home.path)

    def region_of(self, pid: int) -> str:
        """Where this process is."""
        space = os.stat(f"/proc/{pid}/ns/net").st_ino
        return next(name for name in REGIONS if os.stat(f"/run/netns/{self.regions.space(name)}").st_ino == space)

    def _answers(self) -> bool:
        if self.home.address() is None:
            return False
        with self.client() as client:
            return bool(client.node_groups())


class WideJob(Job):
    """A job watched and commanded by REST, from outside."""

    def __init__(self, archipelago: Archipelago, job_id: str, seed: int) -> None:
        super().__init__(None, job_id, archipelago.runs / job_id)  # type: ignore[arg-type]
        self._client, self.seed = archipelago.client(), seed

    def status(self) -> dict[str, Any]:
        seen = self._client.job(self.id)
        islands = [{**island.model_dump(), "last_merge_at": island.last_merge_after_s} for island in seen.islands]
        view = {"islands": islands, "epoch": seen.epoch}
        self.last = {"view": view, "at": seen.after_s, "goodput": seen.goodput, "state": seen.state}
        return self.last

    def contributions_since(self, at: float) -> list[Contribution]:
        records = read_tape(self.run_dir / "tape.jsonl").records
        found = [record.event for record in records if isinstance(record.event, ContributionArrived)]
        return [event.contribution for event in found if event.at > at]

    def contributors_since(self, at: float) -> set[str]:
        return {contribution.island for contribution in self.contributions_since(at)}

    def diary(self, pid: int) -> Diary:
        return Diary(self.seed, pid)

    def cancel(self) -> None:
        self._client.cancel(self.id)

    def close(self) -> None:
        self._client.close()


@pytest.fixture(scope="session")
def archipelago(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Archipelago]:
    built = Archipelago(tmp_path_factory.mktemp("wan"))
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
        seed = secrets.randbelow(1 << 30)
        with archipelago.client() as client:
            told = client.submit(synthetic(steps, groups=(EAST, ASIA), seed=seed, **sections))
        jobs.append(WideJob(archipelago, told.job, seed))
        return jobs[-1]

    yield submit_one
    for name in REGIONS:
        archipelago.regions.heal(name)
    for job in jobs:
        if not (job.run_dir / "status.json").exists():
            job.cancel()
        job.wait_for_end()
        job.close()
        shutil.rmtree(folder_of(job.seed), ignore_errors=True)
