"""Jobs as a list: pages, filters, and what is left of one that was removed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.client import Client
from api.commands.common import console
from api.jobs.service import Service
from api.jobs.translate import job_of, plans_of
from api.storage.store import JobRow, Store
from api.terminal.watch import render, wire_words
from orchestrator.core import commands
from orchestrator.errors import Conflict, NotFound
from orchestrator.specification.config import parse_job
from orchestrator.status import CheckpointFacts, JobStatus, StatusDocument
from tests.api.clockwork import Clockwork, connect
from tests.api.installation import Installation
from tests.harness.carried import add_lines
from tests.harness.simulated_job import SimulatedJob
from tests.waiting import wait_until


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[tuple[JobRow, StatusDocument]]:
    """A job as the store and its control port hold it."""
    control, store = connect(tmp_path), Store(f"sqlite:///{tmp_path / 'service.sqlite'}")
    job = Service(control, store, tmp_path / "runs").submit(Installation(tmp_path).spec(), "me", None).job
    row = store.job(job)
    assert row is not None
    yield row, control.status(job)
    store.close()


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
    assert (refused.status_code, "Start without" in refused.json()["remedy"]) == (404, True)


def test_jobs_are_filtered_by_the_state_they_are_in_now(service: Installation, client: Client) -> None:
    ended = ended_job(service, client, name="filtered")
    running = client.submit(service.spec(name="filtered")).job
    cancelled = client.submit(service.spec(name="filtered")).job
    client.cancel(cancelled)
    wait_until(lambda: client.job(cancelled).state.final)
    for state, job in (("completed", ended), ("running", running), ("cancelled", cancelled)):
        assert [found.job for found in client.jobs(state=state, name="filtered")] == [job]
    assert client.jobs(state="failed", name="filtered") == []
    listed = json.loads(service.atoll("jobs", "--state", "running", "--name", "filtered", "--json"))["jobs"]
    assert [job["job"] for job in listed] == [running]
    assert "no job matches" in service.atoll("jobs", "--name", "nobody")


def test_a_job_and_its_picture_say_codecs_and_what_lines_carried(
    stored: tuple[JobRow, StatusDocument],
) -> None:
    row, record = stored
    row.spec = {**row.spec, "synchroniser": {**row.spec["synchroniser"], "wire": {"up": "int8", "down": "int4"}}}
    before = job_of(row, JobStatus.model_validate(record), [], 0, report=False)
    assert {island.line for island in before.islands} == {None}
    assert wire_words(before) == "wire: int8 up, int4 down"
    add_lines(record)
    record["lines"]["islands"]["asia"] |= {"up_bytes": 2_500_000, "queued_fragments": 3}
    job = job_of(row, JobStatus.model_validate(record), [], 0, report=False)
    assert job.schedule == {"fragments": 4, "interval_steps": 8, "overlap_steps": 4}
    asia = next(island.line for island in job.islands if island.island == "asia")
    assert asia is not None
    assert (asia.up_bytes, asia.queued_fragments) == (2_500_000, 3)
    assert {fragment.residue_norm for fragment in job.fragments} == {0.5}
    words = wire_words(job)
    assert words.startswith("wire: int8 up, int4 down; ")
    assert words.endswith(f"; {3 + 3} fragments queued for islands")
    with (screen := console()).capture() as drawn:
        screen.print(render(job))
    assert "wire: int8 up, int4 down" in drawn.get()


def test_a_job_says_what_is_wrong_when_it_merged_and_how_long_it_will_take(
    stored: tuple[JobRow, StatusDocument],
) -> None:
    row, _ = stored
    record = SimulatedJob(parse_job(row.spec), [], 5.0).status(row.job, 1000.0, 5.0)
    status = JobStatus.model_validate(record)
    job = job_of(row, status, [], 0, report=False)
    paces = [island.tokens_per_second for island in job.islands if island.state == "training"]
    assert paces
    assert job.eta_s == pytest.approx((job.token_budget - job.tokens_trained) / sum(pace or 0.0 for pace in paces))
    assert job.merged_at == status.started_at + max(island.last_merge_at or 0 for island in status.view.islands)
    assert job.troubles == []
    islands = [island.model_copy() for island in status.view.islands]
    islands[0] = islands[0].model_copy(update={"state": "lost"})
    islands[1] = islands[1].model_copy(update={"state": "lost", "flag": "it is not finite"})
    helper = {"name": "evaluator", "condition": "dead", "reason": "it is started again", "restarts": 1}
    broken = JobStatus.model_validate(record | {"helpers": [helper]}).with_view(
        islands=islands, pause_reason="a firewall", checkpoint=CheckpointFacts(trouble="no room")
    )
    job = job_of(row, broken, [], 0, report=False)
    first, second = (island.island for island in islands[:2])
    assert job.troubles == [
        "no fragment can merge: a firewall",
        f"{first} and 1 more are lost",
        f"the work of {second} is not used",
        "checkpoints fail: no room",
        "evaluator: it is started again",
    ]
    assert job.eta_s is None
    ended = job_of(row, broken.with_view(phase="finished", outcome="failed"), [], 0, report=False)
    assert (ended.troubles, ended.eta_s) == ([], None)


@pytest.mark.parametrize("spec", [{}, {"synchroniser": None}, {"synchroniser": {"wire": "int4", "fragments": "8"}}, []])
def test_of_a_specification_that_cannot_be_read_nothing_is_said(
    stored: tuple[JobRow, StatusDocument], spec: Any
) -> None:
    row, _ = stored
    row.spec = spec
    job = job_of(row, None, [], 0, report=False)
    assert (job.wire, job.schedule) == ({}, {})


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
    with pytest.raises(Conflict, match="Give the job's id"):
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
        raise NotFound(detail=f"No process of job {job_id} runs here.")


def test_a_cancel_taken_by_a_job_that_is_gone_before_it_answers_is_accepted(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'store.sqlite'}")
    jobs = Service(GoneBeforeItAnswers(tmp_path / "clockwork"), store, tmp_path / "runs")
    job = jobs.submit(Installation(tmp_path).spec(), "tester", None).job
    wait_until(lambda: jobs.job(job).islands_training)
    assert jobs.submit_command(job, commands.Cancel(), "tester").state == "accepted"
    assert jobs.job(job).state == "cancelled"
    store.close()


def test_an_islands_hosts_and_mesh_are_those_of_its_entry(stored: tuple[JobRow, StatusDocument]) -> None:
    row, _ = stored
    mesh = {"fsdp": 2, "tensor": 2}
    wide = {"node_group": "us-east", "count_max": 2, "hosts": 2, "accelerator": "gpu", "accelerators": 2, "mesh": mesh}
    row.spec = {**row.spec, "islands": [wide, {"node_group": "asia"}]}
    islands, budget, extents, _ = plans_of(row)
    job = job_of(row, None, islands, budget, extents, report=False)
    assert {one.island: (one.hosts, one.mesh) for one in job.islands} == {"us-east-0": (2, mesh), "asia": (1, {})}
    assert extents["us-east-1"] == extents["us-east-0"], "a spare's as well"


def test_a_specification_that_is_probably_a_mistake_is_taken_with_a_warning_that_the_job_keeps(
    service: Installation, client: Client
) -> None:
    once = {"steps": 20, "synchroniser": {"fragments": 4, "interval_steps": 16}}
    submitted = client.submit(service.spec(**once))
    (warning,) = submitted.warnings
    assert warning.path == "synchroniser.interval_steps"
    assert client.job(submitted.job).warnings == [warning]
    said = service.atoll("submit", service.spec_file(**once))
    assert f"warning: {warning.path}: {warning.message} {warning.remedy}" in said
    assert f"warning: {warning.path}" in " ".join(service.atoll("status", "latest").split())
    assert client.submit(service.spec(steps=200)).warnings == []


# ── prices ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_job_without_prices_says_how_to_get_them(service: Installation) -> None:
    with service.client() as client:
        job = client.submit(service.spec(steps=20))
    said = service.atoll("cost", job.job, code=2)
    assert "none of its node groups had a price" in said
    assert "--prices FILE" in said


def test_prices_in_two_currencies_are_refused(service: Installation) -> None:
    islands = [
        {"node_group": "us-east", "cpus": 0.01, "price": {"chip_hour": 1.0}},
        {"node_group": "us-west", "cpus": 0.01, "price": {"chip_hour": 1.0, "currency": "EUR"}},
    ]
    said = service.atoll("submit", service.spec_file(islands=islands), code=2)
    assert "islands.1.price.currency" in said
    assert "is EUR, but another entry is priced in USD" in said


def test_a_limit_on_the_cost_needs_the_price_of_every_node_group(service: Installation) -> None:
    islands = [{"node_group": "us-east", "cpus": 0.01, "price": {"chip_hour": 1.0}}, {"node_group": "us-west"}]
    said = service.atoll("submit", service.spec_file(islands=islands, budget={"steps": 9, "cost": 5}), code=2)
    assert "budget.cost: is 5, but the node group 'us-west' has no price." in said
    assert "or give islands.1.price" in said
