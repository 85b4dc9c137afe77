"""Two homes on one machine, both under load, on one folder of runs: nothing that befalls one is felt by the other."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator.runtime.settings import CLUSTER_MARKER
from tests.api.installation import Installation
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
NEWS = 8
"""Two versions of every fragment: it trains."""
GROUPS = "node_groups:\n  - {name: here, region: somewhere, cpus: 2}\n"


class Place(Installation):
    """A home with a small cluster of its own; its runs lie where those of the others do."""

    def __init__(self, folder: Path, runs: Path) -> None:
        super().__init__(folder)
        self.runs = runs

    def start(self) -> None:
        groups = self.folder / "groups.yaml"
        groups.write_text(GROUPS)
        command = self.command("up", "--runs", str(self.runs), "--groups", str(groups))
        assert os.spawnv(os.P_WAIT, sys.executable, command) == 0

    def job(self) -> dict[str, Any]:
        with self.http() as http:
            found: dict[str, Any] = http.get("/v1/jobs/latest").json()
            return found

    def mark(self) -> str:
        """What the processes of its cluster carry."""
        return str(json.loads((self.home.path / "cluster.json").read_text())["id"])


@pytest.fixture
def places(tmp_path: Path) -> Iterator[tuple[Place, Place]]:
    runs = tmp_path / "runs"
    both = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        both.append(Place(tmp_path / name, runs))
    yield (both[0], both[1])
    for place in both:
        place.atoll("down")


def processes_with(mark: str) -> set[int]:
    found = set()
    for process in psutil.process_iter():
        try:
            if process.environ().get(CLUSTER_MARKER) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.add(process.pid)
        except psutil.Error:
            continue
    return found


def version(place: Place) -> int:
    return int(place.job()["global_version"])


def test_what_befalls_one_home_is_not_felt_by_the_other(places: tuple[Place, Place]) -> None:
    one, other = places
    for place in places:
        place.start()
        with place.http() as http:
            islands = [{"node_group": "here", "count": 2, "cpus": 0.5}]
            assert http.post("/v1/jobs", json=place.spec(steps=100_000, islands=islands)).status_code == 201
    for place in places:
        wait_until(lambda place=place: version(place) > NEWS)
    first, second = (place.home.address() for place in places)
    assert first is not None
    assert second is not None
    assert first.url != second.url
    jobs = [place.job() for place in places]
    assert jobs[0]["job"] != jobs[1]["job"]
    assert len([path for path in one.runs.iterdir() if path.is_dir() and not path.is_symlink()]) == 2
    for place, foreign in ((one, other), (other, one)):
        with place.http() as http:
            assert http.get(f"/v1/jobs/{foreign.job()['job']}").status_code == 404
            assert len(http.get("/v1/jobs").json()["jobs"]) == 1
        with place.http(foreign.home.token()) as http:
            assert http.get("/v1/jobs").status_code == 401, "a token of one home opens no other"
    marks = [place.mark() for place in places]
    before = processes_with(marks[1])

    # Everything of the one dies by SIGKILL, its service too.
    for pid in processes_with(marks[0]):
        with suppress(ProcessLookupError):  # it ended with one that was killed before it
            os.kill(pid, signal.SIGKILL)
    os.kill(first.pid, signal.SIGKILL)
    at = version(other)
    wait_until(lambda: version(other) > at + NEWS)
    one.start()
    wait_until(lambda: one.job()["state"] == "running" and version(one) > jobs[0]["global_version"])

    one.atoll("down")
    assert processes_with(one_mark := marks[0]) == set(), one_mark
    at = version(other)
    wait_until(lambda: version(other) > at + NEWS)
    job = other.job()
    assert {island["incarnation"] for island in job["islands"]} == {1}, "no island of it has died"
    assert before <= processes_with(marks[1])
    tape = (other.runs / job["job"] / "tape.jsonl").read_text()
    assert '"SynchroniserRestarted"' not in tape
    assert '"IslandLost"' not in tape
