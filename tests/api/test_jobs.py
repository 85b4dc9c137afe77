"""Jobs as a list: pages, filters, and what is left of one that was removed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.client import Client
from api.jobs.service import Service
from api.storage.store import Store
from orchestrator.core import commands
from orchestrator.errors import Conflict, NotFound
from tests.api.clockwork import Clockwork
from tests.api.installation import Installation
from tests.waiting import wait_until


def ended_job(service: Installation, client: Client, **changes: object) -> str:
    job = client.submit(service.spec(steps=2, **changes)).job
    wait_until(lambda: client.job(job).report_ready)
    return job


def test_pages_of_jobs_follow_one_another_newest_first(service: Installation, http: httpx.Client) -> None:
    for _ in range(5):
        http.post("/v1/jobs", json=service.spec(steps=2, name="paged")).raise_for_status()
    whole = http.get("/v1/jobs", params={"name": "paged", "limit": 1000}).json()
    assert whole["next_cursor"] is None
    submitted = [job["submitted_at"] for job in whole["jobs"]]
    assert submitted == sorted(submitted, reverse=True)
    page = http.get("/v1/jobs", params={"name": "paged", "limit": 2}).json()
    pages = [page]
    while page["next_cursor"]:
        page = http.get("/v1/jobs", params={"name": "paged", "limit": 2, "cursor": page["next_cursor"]}).json()
        pages.append(page)
    assert [len(page["jobs"]) for page in pages] == [2, 2, 1]
    assert [job["job"] for page in pages for job in page["jobs"]] == [job["job"] for job in whole["jobs"]]
    refused = http.get("/v1/jobs", params={"cursor": "nope"})
    assert (refused.status_code, "Begin without" in refused.json()["remedy"]) == (404, True)


def test_jobs_are_filtered_by_the_state_they_are_in_now(service: Installation, client: Client) -> None:
    ended = ended_job(service, client, name="filtered")
    running = client.submit(service.spec(name="filtered")).job
    cancelled = client.submit(service.spec(name="filtered")).job
    client.cancel(cancelled)
    wait_until(lambda: client.job(cancelled).state.final)
    for state, job in (("completed", ended), ("running", running), ("cancelled", cancelled)):
        assert [found.job for found in client.jobs(state=state, name="filtered")] == [job]
    assert client.jobs(state="failed", name="filtered") == []
    listed = json.loads(service.atoll("jobs", "--state", "running", "--name", "filtered", "--json"))
    assert [job["job"] for job in listed] == [running]
    assert "no job matches" in service.atoll("jobs", "--name", "nobody")


def test_nothing_is_left_of_a_removed_job(service: Installation, client: Client) -> None:
    kept = ended_job(service, client)
    job = client.submit(service.spec()).job
    client.kill(job, "asia")
    client.cancel(job)
    wait_until(lambda: client.job(job).report_ready)
    folder = Path(client.job(job).run_dir)
    assert (service.runs / "latest").resolve() == folder
    assert f"removed {job}" in service.atoll("delete", job, "--yes")
    assert not folder.exists()
    assert not (service.runs / "latest").is_symlink()
    for question in (client.job, client.commands, client.delete, client.report):
        with pytest.raises(NotFound):
            question(job)
    assert job not in [found.job for found in client.jobs()]
    assert client.job("latest").job == kept
    assert Path(client.job(kept).run_dir, "tape.jsonl").is_file()


def test_merged_parameters_that_a_job_left_are_downloaded(
    service: Installation, client: Client, http: httpx.Client
) -> None:
    ended = ended_job(service, client)
    assert http.get(f"/v1/jobs/{ended}/parameters").status_code == 404
    Path(client.job(ended).run_dir, "merged.safetensors").write_bytes(b"weights")
    answer = http.get(f"/v1/jobs/{ended}/parameters")
    assert (answer.content, answer.headers["content-type"]) == (b"weights", "application/octet-stream")
    assert f"{ended}.safetensors" in answer.headers["content-disposition"]


def test_a_living_job_is_not_removed_and_latest_names_none(service: Installation, client: Client) -> None:
    job = client.submit(service.spec()).job
    with pytest.raises(Conflict, match="atoll cancel"):
        client.delete(job)
    assert client.job(job).state == "running"
    with pytest.raises(Conflict, match="own id"):
        client.delete("latest")


def test_removing_asks_first(service: Installation, client: Client) -> None:
    job = ended_job(service, client)
    service.atoll("delete", job, code=1)
    assert client.job(job).job == job


class GoneBeforeItAnswers(Clockwork):
    """Its jobs take a cancel, and are over before they can say so."""

    def submit(self, job_id: str, *about: Any) -> None:
        super().submit(job_id, *about)
        wait_until(lambda: self.status(job_id)["view"]["phase"] == "finished")
        raise NotFound(detail=f"Nothing of job {job_id} runs here.")


def test_a_cancel_taken_by_a_job_that_is_gone_before_it_answers_is_accepted(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'store.sqlite'}")
    jobs = Service(GoneBeforeItAnswers(tmp_path / "clockwork"), store, tmp_path / "runs")
    job = jobs.submit(Installation(tmp_path).spec(), "tester", None).job
    wait_until(lambda: jobs.job(job).islands_training)
    assert jobs.submit_command(job, commands.Cancel(), "tester").state == "accepted"
    assert jobs.job(job).state == "cancelled"
    store.close()
