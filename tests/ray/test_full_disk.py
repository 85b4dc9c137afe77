"""No room under Ray's folder, where no process begins any more: what runs trains on, it is told, and it passes."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.installation.doctor import State
from orchestrator.core import events as e
from orchestrator.tape.storage import read_tape
from tests import forked
from tests.api.installation import Installation, environment
from tests.attack.test_full_disk import found_of_disks, full, small_disk
from tests.ray.jobs import Job, assert_sound, gone, pid_of, synthetic

pytestmark = pytest.mark.ray
STAYS, KILLED = GROUPS = ("one", "two")
ENDLESS = 100_000
DISK_MEGABYTES = 64
"""The head's storage is 26 of them from the beginning."""


class Place(Installation):
    """A home whose cluster has its folder on a small disk."""

    def __init__(self, folder: Path, disk: Path) -> None:
        super().__init__(folder)
        self.disk = disk
        self.groups = folder / "groups.yaml"
        self.groups.write_text(
            "node_groups:\n" + "".join(f"  - {{name: {name}, region: {name}, cpus: 1}}\n" for name in GROUPS)
        )

    def run(self, *arguments: str) -> None:
        """With its temporary files on that disk."""
        there = environment() | {"TMPDIR": str(self.disk)}
        done = forked.atoll(*arguments, "--home", str(self.home.path), environment=there)
        assert done.returncode == 0, done.stdout + done.stderr

    def start(self) -> None:
        self.run("up", "--runs", str(self.runs), "--groups", str(self.groups))

    def submit(self, http: httpx.Client, key: str, groups: tuple[str, ...] = GROUPS) -> httpx.Response:
        islands = [{"node_group": name, "cpus": 0.4} for name in groups]
        return http.post("/v1/jobs", json=synthetic(ENDLESS, islands=islands), headers={"Idempotency-Key": key})

    def is_told(self, text: str) -> bool:
        """Which disk it is, and what to do."""
        return all(part in text for part in (f"disk under {self.disk}/atoll-", "is full", "make room on it"))

    def job(self, name: str) -> Job:
        """By its run folder."""
        return Job(None, name, self.runs / name)  # type: ignore[arg-type]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    disk = Path(tempfile.mkdtemp(prefix="d-"))  # sockets' paths are short
    try:
        with small_disk(disk, DISK_MEGABYTES):
            there = Place(tmp_path, disk)
            try:
                there.start()
                yield there
            finally:
                there.run("down")
    finally:
        disk.rmdir()


def contributors(job: Job, since: float = 0.0) -> set[str]:
    path = job.run_dir / "tape.jsonl"
    records = read_tape(path).records if path.exists() else ()
    merged = [record.event for record in records if isinstance(record.event, e.ContributionArrived)]
    return {event.contribution.island for event in merged if event.at > since}


@pytest.mark.soak("a cluster of its own on a small disk")
def test_without_room_under_rays_folder_islands_train_on_and_who_died_is_back_once_there_is_room(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with place.http() as http:
        job = place.job(place.submit(http, "first").json()["job"])
        url = f"/v1/jobs/{job.id}"

        def island(name: str) -> dict[str, Any]:
            return next(row for row in http.get(f"{url}/islands").json()["islands"] if row["island"] == name)

        job.wait_until(lambda: contributors(job) == set(GROUPS), "work of both")
        stays = island(STAYS)["pid"]
        with full(place.disk):
            os.kill(island(KILLED)["pid"], signal.SIGKILL)
            job.wait_until(lambda: place.is_told(island(KILLED)["reason"]), "the reason")
            at = http.get(url).json()["after_s"]
            job.wait_until(lambda: contributors(job, at) == {STAYS}, "work of who stays")
            refused = place.submit(http, "second", (STAYS,))
            assert refused.status_code == 503
            assert place.is_told(refused.json()["detail"]), "what to do about it"

            synchroniser = job.wait_until(lambda: pid_of("SynchroniserActor", place.home.path), "a synchroniser")
            os.kill(synchroniser, signal.SIGKILL)
            job.wait_until(lambda: place.is_told(http.get(url).json().get("remedy", "")), "silence")
            job.wait_until(lambda: place.is_told(place.atoll("status", job.id, code=None)), "the same of it")
            (row,) = (row for row in http.get("/v1/jobs").json()["jobs"] if row["job"] == job.id)
            assert row["state"] == "running"
            finding = found_of_disks(place.home, place.runs, monkeypatch)
            assert finding.state is State.WRONG
            assert finding.detail.startswith(f"0.0 GiB free in {place.disk}/atoll-")
            assert "TMPDIR" in finding.remedy
            assert not gone(stays)
        job.wait_until(job.restarts, "the next life")
        back = job.restarts()[0].at
        job.wait_until(lambda: contributors(job, back) == set(GROUPS), "work of both again")
        assert island(STAYS)["pid"] == stays
        assert island(STAYS)["restarts"] == 0
        assert place.submit(http, "second", (STAYS,)).json()["state"] == "running"
        for row in http.get("/v1/jobs?state=running").json()["jobs"]:
            http.post(f"/v1/jobs/{row['job']}/cancel").raise_for_status()
    job.wait_for_end()
    assert_sound(job)
