"""Hundreds of jobs queued: what one more costs, what leaving costs, and a row that is damaged."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest
from sqlalchemy.orm import Session

from api.jobs import dispatcher
from api.jobs.job_list import JobList
from api.jobs.service import Service
from api.storage.store import JobRow, Store
from orchestrator.core import commands
from orchestrator.specification.config import parse_job
from tests.api.clockwork import Clockwork
from tests.api.installation import CONTROL, Installation
from tests.attack.wire import process_of
from tests.waiting import PATIENCE_S, wait_until

FEW = 10
ROUNDS = 20
NOISE_S = 0.2
"""Of CPU, over all rounds of one kind: below it nothing is compared."""
TOO_LARGE = [{"node_group": "asia", "cpus": 64.0}]
"""More than the fleet has: who asks for it holds up all others while nothing runs, and nothing is asked how it stands."""


def with_queue(installation: Installation, count: int, damaged: bool = False, held_up: bool = False) -> None:
    """So many jobs wait already when the service starts; held up: behind one that waits for nodes that are away."""
    installation.home.path.mkdir(parents=True)
    store = Store(f"sqlite:///{installation.home.path / 'service.sqlite'}")
    spec, first = (
        parse_job(installation.spec(**more)).model_dump(mode="json") for more in ({}, {"islands": TOO_LARGE})
    )
    with Session(store.engine) as session, session.begin():
        for number in range(count):
            job, bad = f"trial-{number:05}", damaged and number < 2
            about = {"caller": "local", "submitted_at": time.time(), "state": "queued"}
            document = ({"islands": "none"}, {"name": 1})[number] if bad else first if held_up and not number else spec
            session.add(JobRow(job=job, name="trial", spec=document, run_dir=str(installation.runs / job), **about))
    store.close()
    installation.atoll("up", "--runs", str(installation.runs), "--control", CONTROL, "--jobs-max", "1")


def cpu_s(installation: Installation) -> float:
    times = process_of(installation).cpu_times()
    return times.user + times.system


def cost_s(installation: Installation, http: httpx.Client) -> dict[str, float]:
    """CPU seconds of the service for a few submissions, lists, cancellations and removals."""
    wait_until(lambda: http.get("/v1/jobs", params={"limit": 1}).json()["jobs"][0]["reason"].startswith("behind"))
    idle = cpu_s(installation)
    time.sleep(4.0)
    idle_per_s = (cpu_s(installation) - idle) / 4.0
    costs, jobs = {}, []

    def measured(what: str, since: float, began: float) -> None:
        costs[what] = cpu_s(installation) - since - idle_per_s * (time.monotonic() - began)

    since, began = cpu_s(installation), time.monotonic()
    for _ in range(ROUNDS):
        answer = http.post("/v1/jobs", json=installation.spec())
        assert answer.status_code == 201
        assert answer.json()["state"] == "queued"
        jobs.append(answer.json()["job"])
    measured("submit", since, began)
    since, began = cpu_s(installation), time.monotonic()
    for _ in range(ROUNDS):
        assert len(http.get("/v1/jobs", params={"limit": 10}).json()["jobs"]) == 10
    measured("list", since, began)
    since, began = cpu_s(installation), time.monotonic()
    for job in jobs:
        assert http.post(f"/v1/jobs/{job}/cancel").status_code == 202
        assert http.delete(f"/v1/jobs/{job}").status_code == 204
    measured("leave", since, began)
    return costs


@pytest.mark.parametrize("many", [300, pytest.param(1000, marks=pytest.mark.soak("the same with more jobs"))])
def test_one_more_job_costs_the_same_whether_few_or_many_wait(tmp_path: Path, many: int) -> None:
    costs = []
    for count in (FEW, many):
        installation = Installation(tmp_path / str(count))
        (tmp_path / str(count)).mkdir()
        with_queue(installation, count, held_up=True)
        try:
            with installation.http() as http:
                costs.append(cost_s(installation, http))
                if count == many:
                    page = http.get("/v1/jobs", params={"limit": 1000}, timeout=PATIENCE_S).json()["jobs"]
                    places = [job["queue_position"] for job in page if job["state"] == "queued"]
                    assert places == sorted(places, reverse=True)
                    assert places[-1] >= 1
        finally:
            installation.atoll("down")
    short, long = costs
    print({what: f"{short[what] / ROUNDS:.4f} s, {long[what] / ROUNDS:.4f} s" for what in short})
    for what in short:
        assert long[what] < 3 * max(short[what], NOISE_S), f"{what}: {short} with {FEW} queued, {long} with {many}"


class Counting(Store):
    """Notes how often the whole queue was read."""

    rounds = 0

    def queued(self) -> list[tuple[str, int, int]]:
        self.rounds += 1
        return super().queued()


def test_who_leaves_from_behind_has_nobody_look_at_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round reads the whole queue and asks what runs how it stands: only who leaves the first place makes it worth one."""
    monkeypatch.setattr(dispatcher, "POLL_EVERY_S", 3600.0)
    installation, store = Installation(tmp_path), Counting(f"sqlite:///{tmp_path / 'store.sqlite'}")
    service = Service(Clockwork(tmp_path / "clockwork"), store, installation.runs, jobs_max=1)
    job_list = JobList(service, store, Clockwork(tmp_path / "clockwork"), installation.runs)
    _, first, *behind = (service.submit(installation.spec(), "me", None).job for _ in range(12))
    service.queue.begin()
    try:
        wait_until(lambda: store.rounds and service.queue.why(behind[-1]).startswith(f"behind {first}"))
        before = store.rounds
        for job in behind:
            service.submit_command(job, commands.Cancel(), "me")
            job_list.remove(job)
        service.submit_command(first, commands.Cancel(), "me")
        wait_until(lambda: store.rounds > before)
        assert store.rounds == before + 1
        assert store.queued() == []
    finally:
        service.queue.close()
        store.close()


@pytest.mark.parametrize("count", [4])
def test_a_queued_row_that_is_damaged_fails_alone_and_the_next_one_starts(tmp_path: Path, count: int) -> None:
    installation = Installation(tmp_path)
    with_queue(installation, count, damaged=True)
    try:
        with installation.client() as client:
            store = Store(f"sqlite:///{installation.home.path / 'service.sqlite'}")

            def states() -> list[str]:
                return [row.state for row in reversed(store.jobs())]

            wait_until(lambda: states()[:3] == ["failed", "failed", "running"])
            assert "stored specification is no longer valid" in store.jobs()[-1].reason
            assert states()[3] == "queued"
            assert client.job("trial-00002").state == "running"
            store.close()
    finally:
        installation.atoll("down")
