"""The REST API over real HTTP: what is answered, what is refused and how, and what is done only once."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
import yaml

from api.client import Client
from orchestrator.errors import ConfigurationError, InfrastructureError, NotFound, RequestError, ServiceUnreachable
from orchestrator.specification.training_sections import BUILT_IN_TRAINER
from orchestrator.system import release
from orchestrator.system.ports import is_loopback
from tests.api.installation import Installation
from tests.waiting import wait_until


def problem(answer: httpx.Response, status: int) -> dict:
    """The problem document of a refused request, checked to be one."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    document = answer.json()
    assert document["status"] == status
    assert document["type"].startswith("urn:atoll:problem:")
    assert document["title"]
    assert document["detail"]
    return document


def test_a_submitted_job_is_created_at_its_location(http: httpx.Client, service: Installation) -> None:
    answer = http.post("/v1/jobs", json=service.spec())
    assert answer.status_code == 201
    job = http.get(answer.headers["Location"]).json()
    assert job["job"] == answer.json()["job"]
    assert job["caller"] == "local"
    assert [island["region"] for island in job["islands"]] == ["us-east", "us-west", "europe", "asia"]
    assert http.get("/v1/jobs/latest").json()["job"] == job["job"]
    assert job["job"] in [listed["job"] for listed in http.get("/v1/jobs").json()["jobs"]]


def test_a_specification_may_be_yaml_but_not_a_bomb(http: httpx.Client, service: Installation) -> None:
    headers = {"Content-Type": "application/yaml"}
    assert http.post("/v1/jobs", content=yaml.safe_dump(service.spec()), headers=headers).status_code == 201
    bomb = "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n"
    assert "aliases" in problem(http.post("/v1/jobs", content=bomb, headers=headers), 422)["detail"]
    large = b'{"name": "' + b"x" * (1 << 20) + b'"}'
    problem(http.post("/v1/jobs", content=large, headers={"Content-Type": "application/json"}), 413)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"null", b'{"islands"', b"\xff\xfe", b"[" * 100_000, b"{1: 2}"])
def test_a_body_that_is_no_mapping_is_refused_politely(http: httpx.Client, body: bytes) -> None:
    for kind in ("application/json", "application/yaml"):
        problem(http.post("/v1/jobs", content=body, headers={"Content-Type": kind}), 422)


def test_all_problems_of_specification_and_fleet_come_in_one_document(
    http: httpx.Client, service: Installation
) -> None:
    count = len(http.get("/v1/jobs").json()["jobs"])
    islands = [{"node_group": "mars"}, {"node_group": "asia", "cpus": 64}]
    spec = service.spec(islands=islands, training={"batch_size": 0}, sync="typo", budget={"steps": 1, "tokens": 1})
    document = problem(http.post("/v1/jobs", json=spec), 422)
    paths = {item["path"] for item in document["problems"]}
    assert paths == {"training.batch_size", "sync", "budget", "islands.0.node_group", "islands.1.cpus"}
    assert all(item["remedy"] for item in document["problems"])
    assert len(http.get("/v1/jobs").json()["jobs"]) == count


def test_weights_of_another_model_are_refused_before_anything_starts(
    http: httpx.Client, service: Installation, tmp_path: Path
) -> None:
    for changes in ({"model": {"preset": "qwen3-20m"}}, {"trainer": BUILT_IN_TRAINER, "model": {}}):
        changes["model"]["initial_weights"] = str(tmp_path)
        document = problem(http.post("/v1/jobs", json=service.spec(**changes)), 422)
        assert [item["path"] for item in document["problems"]] == ["model.initial_weights"]
        assert "config.json" in document["problems"][0]["remedy"]


def test_a_job_that_does_not_fit_the_memory_of_its_nodes_is_refused_before_anything_starts(
    http: httpx.Client, service: Installation
) -> None:
    memory = service.home.path / "clockwork" / "memory.json"
    rows = [{"host": "one", "group": group, "memory_bytes": 2.0 * (1 << 30)} for group in ("", "us-east", "asia")]
    count = len(http.get("/v1/jobs").json()["jobs"])
    fits = service.spec(trainer="learners.synthetic:create", synthetic={"parameters": 1_000_000})
    too_large = service.spec(trainer="learners.synthetic:create", synthetic={"parameters": 1_000_000_000})
    memory.write_text(json.dumps(rows))
    try:
        assert http.post("/v1/jobs", json=fits).status_code == 201
        document = problem(http.post("/v1/jobs", json=too_large), 422)
    finally:
        memory.unlink()
    told = {item["path"]: item for item in document["problems"]}
    assert "has 2.0 GiB" in told["synthetic.parameters"]["message"]
    assert "fewer islands" in told["synthetic.parameters"]["remedy"]
    assert len(http.get("/v1/jobs").json()["jobs"]) == count + 1


def test_the_same_idempotency_key_makes_one_job(http: httpx.Client, service: Installation) -> None:
    headers = {"Idempotency-Key": "once"}
    first = http.post("/v1/jobs", json=service.spec(), headers=headers)
    again = http.post("/v1/jobs", json=service.spec(), headers=headers)
    assert again.status_code == first.status_code == 201
    assert again.json()["job"] == first.json()["job"]
    other = problem(http.post("/v1/jobs", json=service.spec(steps=3), headers=headers), 400)
    assert "different request" in other["detail"]
    assert http.post("/v1/jobs", json=service.spec()).json()["job"] != first.json()["job"]
    problem(http.post("/v1/jobs", json=service.spec(), headers={"Idempotency-Key": "k" * 300}), 422)


def test_a_command_is_202_with_an_outcome_and_done_once_for_each_key(http: httpx.Client, service: Installation) -> None:
    job = http.post("/v1/jobs", json=service.spec()).json()["job"]
    wait_until(lambda: http.get(f"/v1/jobs/{job}/islands/asia").json()["state"] == "training")
    headers = {"Idempotency-Key": "kill-asia"}
    first = http.post(f"/v1/jobs/{job}/islands/asia/kill", headers=headers)
    again = http.post(f"/v1/jobs/{job}/islands/asia/kill", headers=headers)
    assert first.status_code == again.status_code == 202
    assert first.json()["command"] == again.json()["command"]
    where = first.headers["Location"]
    decided = wait_until(lambda: (c := http.get(where).json())["state"] != "pending" and c)
    assert (decided["state"], decided["caller"], decided["kind"]) == ("accepted", "local", "kill")
    wait_until(lambda: http.get(f"/v1/jobs/{job}/islands/asia").json()["incarnation"] == 2)
    assert [c["command"] for c in http.get(f"/v1/jobs/{job}/commands").json()["commands"]] == [first.json()["command"]]
    problem(http.post(f"/v1/jobs/{job}/islands/europe/kill", headers=headers), 400)

    refused = http.post(f"/v1/jobs/{job}/islands/us-east/readd").headers["Location"]
    assert wait_until(lambda: (c := http.get(refused).json())["state"] != "pending" and c)["state"] == "refused"

    cancel = {"Idempotency-Key": "cancel"}
    done = http.post(f"/v1/jobs/{job}/cancel", headers=cancel).json()
    wait_until(lambda: http.get(f"/v1/jobs/{job}").json()["state"] == "cancelled")
    assert http.post(f"/v1/jobs/{job}/cancel", headers=cancel).json()["command"] == done["command"]
    assert "already cancelled" in problem(http.post(f"/v1/jobs/{job}/cancel"), 409)["detail"]


def test_a_command_the_ended_job_never_decided_is_refused(http: httpx.Client, service: Installation) -> None:
    job = http.post("/v1/jobs", json=service.spec(steps=2)).json()["job"]
    wait_until(lambda: http.get(f"/v1/jobs/{job}").json()["state"] == "completed")
    assert "nothing to kill" in problem(http.post(f"/v1/jobs/{job}/islands/asia/kill"), 409)["detail"]
    assert http.get(f"/v1/jobs/{job}/commands").json() == {"commands": []}


def test_reports_are_served_when_the_job_has_ended(http: httpx.Client, service: Installation) -> None:
    running = http.post("/v1/jobs", json=service.spec()).json()["job"]
    assert "atoll watch" in problem(http.get(f"/v1/jobs/{running}/report.json"), 409)["remedy"]
    ended = http.post("/v1/jobs", json=service.spec(steps=2)).json()["job"]
    wait_until(lambda: http.get(f"/v1/jobs/{ended}").json()["report_ready"])
    assert http.get(f"/v1/jobs/{ended}/report").json()["job_id"] == ended
    page = http.get(f"/v1/jobs/{ended}/report.html")
    assert page.headers["content-type"].startswith("text/html")
    (service.runs / ended / "report.html").unlink()
    missing = problem(http.get(f"/v1/jobs/{ended}/report.html"), 404)
    reason = http.get(f"/v1/jobs/{ended}").json()["reason"]
    assert reason
    assert missing["detail"].endswith(f"left no report.html. It ended: {reason.rstrip('.')}.")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/jobs/no-such-job", 404),
        ("GET", "/v1/jobs/no-such-job/islands", 404),
        ("POST", "/v1/jobs/no-such-job/cancel", 404),
        ("POST", "/v1/jobs/no-such-job/islands/asia/kill", 404),
        ("GET", "/v1/jobs/latest/commands/no-such-command", 404),
        ("GET", "/v1/jobs/latest/islands/no-such-island", 404),
        ("GET", "/v1/jobs/..%2f..%2fetc/report.json", 404),
        ("GET", "/nowhere", 404),
        ("DELETE", "/v1/jobs", 405),
    ],
)
def test_what_is_not_there_is_a_problem_document(
    http: httpx.Client, service: Installation, method: str, path: str, status: int
) -> None:
    http.post("/v1/jobs", json=service.spec(steps=2))
    document = problem(http.request(method, path), status)
    assert document["remedy"]


def test_unknown_options_of_a_command_are_refused(http: httpx.Client, service: Installation) -> None:
    job = http.post("/v1/jobs", json=service.spec()).json()["job"]
    document = problem(http.post(f"/v1/jobs/{job}/islands/asia/kill", json={"restrat": False}), 422)
    assert document["problems"][0]["path"] == "body.restrat"


def test_web_pages_and_foreign_names_get_nothing(http: httpx.Client) -> None:
    for headers in (
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil"},
    ):
        problem(http.get("/healthz", headers=headers), 403)
    own = str(http.base_url).rstrip("/")
    assert http.get("/healthz", headers={"Origin": own}).json()["status"] == "ok"
    assert http.get("/healthz", headers={"Host": "localhost:8470"}).status_code == 200
    assert [is_loopback(h) for h in ("127.0.0.1", "::1", "[::1]", "localhost", "10.0.0.1", "")] == [True] * 4 + [
        False
    ] * 2


def test_readiness_follows_the_cluster_and_health_does_not(http: httpx.Client, service: Installation) -> None:
    ready = http.get("/readyz").json()
    assert (ready["status"], ready["detail"], ready["build"]) == ("ok", "4 node groups", str(release.own()))
    assert len(http.get("/v1/node-groups").json()["node_groups"]) == 4
    job = http.post("/v1/jobs", json=service.spec(), headers={"Idempotency-Key": "ready"}).json()
    switch = service.home.path / "clockwork" / "cluster-is-gone"
    switch.touch()
    try:
        assert "atoll up" in problem(http.get("/readyz"), 503)["remedy"]
        problem(http.post("/v1/jobs", json=service.spec()), 503)
        again = http.post("/v1/jobs", json=service.spec(), headers={"Idempotency-Key": "ready"})
        assert again.json()["job"] == job["job"], "done before, so the cluster is not asked for anything new"
        assert http.get("/healthz").status_code == 200
    finally:
        switch.unlink()


def test_a_job_that_cannot_be_started_is_remembered_with_the_reason(http: httpx.Client, service: Installation) -> None:
    switch, key = service.home.path / "clockwork" / "no-more-jobs", {"Idempotency-Key": "again"}
    switch.touch()
    try:
        assert "synchroniser" in problem(http.post("/v1/jobs", json=service.spec(), headers=key), 503)["detail"]
    finally:
        switch.unlink()
    failed = http.get("/v1/jobs/latest").json()
    assert failed["state"] == "failed"
    assert "No synchroniser could be placed" in failed["reason"]
    retried = http.post("/v1/jobs", json=service.spec(), headers=key)
    assert retried.status_code == 201
    assert retried.json()["state"] == "running"


def test_the_client_raises_what_the_service_meant(service: Installation) -> None:
    with service.client() as client:
        with pytest.raises(NotFound, match="Job 'nope' does not exist"):
            client.job("nope")
        with pytest.raises(ConfigurationError, match="problems"):
            client.submit({})
        job = client.submit(service.spec()).job
        with pytest.raises(NotFound, match="asia"):
            client.kill(job, "atlantis")
    with Client("http://127.0.0.1:1") as nobody, pytest.raises(ServiceUnreachable, match="atoll up"):
        nobody.jobs()
    address = service.home.address()
    assert address is not None
    with Client(f"{address.url}/openapi.json?x=") as wrong, pytest.raises((InfrastructureError, RequestError)):
        wrong.jobs()


def test_the_openapi_document_describes_the_specification(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    schema = document["paths"]["/v1/jobs"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "islands" in json.dumps(schema)
    assert {"/healthz", "/readyz", "/v1/node-groups", "/v1/jobs/{job}/commands/{command}"} <= document["paths"].keys()
