"""PostgreSQL is killed, stopped and back under a running service: told within seconds, nothing lost, nothing done twice."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.client import Client
from api.storage.store import CommandRow, JobRow, Store
from orchestrator.errors import InfrastructureError
from tests.api.installation import CONTROL, Installation
from tests.documents import ROOT, blocks
from tests.newcomer import Newcomer
from tests.postgresql import PostgreSQL, a_server
from tests.waiting import PATIENCE_S, wait_until

READS = ("/v1/whoami", "/v1/jobs", "/v1/jobs/latest", "/v1/audit", "/readyz", "/metrics")


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgreSQL]:
    with a_server() as server:
        yield server


@pytest.fixture(scope="module")
def database(postgres: PostgreSQL) -> str:
    return postgres.new_database()


@pytest.fixture(scope="module")
def service(database: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """A service on PostgreSQL."""
    installation = Installation(tmp_path_factory.mktemp("service"))
    installation.atoll("up", "--runs", str(installation.runs), "--control", CONTROL, "--database", database)
    yield installation
    installation.atoll("down")


@pytest.fixture(scope="module")
def job(service: Installation) -> str:
    """One that runs on and on."""
    with service.client() as client:
        two = [{"node_group": name, "cpus": 0.01} for name in ("europe", "asia")]
        return client.submit(service.spec(islands=two)).job


def patient(service: Installation) -> httpx.Client:
    """A machine that is busy with other things is no failure."""
    http = service.http()
    http.timeout = 60
    return http


def answers_to(http: httpx.Client, job: str) -> dict[str, httpx.Response]:
    """What becomes of one request of each kind. A connection that breaks, or that is silent for long, fails the test."""
    answers = {path: http.get(path) for path in READS}
    answers["submit"] = http.post("/v1/jobs", json=Installation(Path()).spec(), headers={"Idempotency-Key": "s"})
    answers["kill"] = http.post(f"/v1/jobs/{job}/islands/asia/kill", headers={"Idempotency-Key": "k"})
    answers["token"] = http.post("/v1/tokens", json={"name": f"n{time.monotonic_ns()}", "role": "viewer"})
    answers["nobody"] = http.get("/v1/jobs", headers={"Authorization": "Bearer atoll_nobodys"})
    return answers


def assert_all_refused(http: httpx.Client, job: str) -> None:
    assert http.get("/healthz").status_code == 200, "the process is well, and not to be restarted"
    for name, answer in answers_to(http, job).items():
        assert answer.status_code == 503, name
        problem = answer.json()
        assert problem["type"] == "urn:atoll:problem:store", name
        assert "database" in problem["detail"], f"{name}: {problem}"
        assert problem["remedy"], name
        assert "SELECT" not in answer.text + problem["detail"]


def assert_all_well(http: httpx.Client, job: str) -> None:
    wait_until(lambda: http.get("/readyz").status_code == 200)
    expected = dict.fromkeys(READS, 200) | {"submit": 201, "kill": 202, "token": 201, "nobody": 401}

    def all_well() -> bool:
        """A job that a busy machine lets answer late is no failure of the store."""
        return {name: answer.status_code for name, answer in answers_to(http, job).items()} == expected

    wait_until(all_well, "an answer to everything")


@pytest.mark.parametrize("how", ["kill", "shut_down"])
def test_while_postgresql_is_dead_all_is_503_with_the_reason_and_when_it_is_back_all_is_well(
    postgres: PostgreSQL, service: Installation, job: str, how: str
) -> None:
    with patient(service) as http:
        assert_all_well(http, job)
        getattr(postgres, how)()
        try:
            wait_until(lambda: http.get("/v1/whoami").status_code == 503)  # a token is remembered for a second
            assert_all_refused(http, job)
        finally:
            postgres.start()
        assert_all_well(http, job)


def test_while_postgresql_is_silent_nobody_waits_for_ever_and_many_wait_no_longer_than_one(
    postgres: PostgreSQL, service: Installation, job: str
) -> None:
    with patient(service) as http, patient(service) as other, ThreadPoolExecutor(60) as pool:
        assert_all_well(http, job)
        with postgres.silent():
            wait_until(lambda: http.get("/v1/whoami").status_code == 503)
            asked = [pool.submit(lambda: other.get("/v1/whoami").status_code) for _ in range(120)]
            assert {one.result(PATIENCE_S) for one in asked} == {503}
            assert_all_refused(http, job)
        assert_all_well(http, job)


def test_a_table_that_somebody_locks_is_told_and_waited_for_by_one(
    postgres: PostgreSQL, service: Installation, job: str, database: str
) -> None:
    from sqlalchemy import create_engine, text

    from api.storage.store import url_of

    engine = create_engine(url_of(database))
    with patient(service) as http:
        assert_all_well(http, job)
        with engine.connect() as connection:
            connection.execute(text("LOCK TABLE jobs IN ACCESS EXCLUSIVE MODE"))
            answer = wait_until(lambda: found if (found := http.get("/v1/jobs")).status_code == 503 else None)
            assert "statement timeout" in answer.json()["detail"]
            assert http.get("/readyz").status_code == 503
            connection.rollback()
        assert_all_well(http, job)
    engine.dispose()


def test_what_was_asked_in_the_instant_of_its_death_is_there_once_or_not_at_all(
    postgres: PostgreSQL, service: Installation, job: str
) -> None:
    """Submissions and kills go on and on under keys while the server dies; each that was refused is repeated at the end."""
    with patient(service) as http:
        assert_all_well(http, job)
        before = {row["job"] for row in http.get("/v1/jobs", params={"limit": 500}).json()["jobs"]}
        keys = [f"key-{time.monotonic_ns()}-{number}" for number in range(6)]

        def ask(key: str) -> tuple[int, int]:
            headers = {"Idempotency-Key": key}
            kill = http.post(f"/v1/jobs/{job}/islands/europe/kill", headers=headers | {"Idempotency-Key": f"c{key}"})
            return http.post("/v1/jobs", json=service.spec(steps=20), headers=headers).status_code, kill.status_code

        with ThreadPoolExecutor(6) as pool:
            asked = [pool.submit(ask, key) for key in keys]
            wait_until(lambda: any(one.done() for one in asked))
            postgres.kill()
            first = [one.result(PATIENCE_S) for one in asked]
        postgres.start()
        assert {status for both in first for status in both} <= {201, 202, 503}
        wait_until(lambda: http.get("/readyz").status_code == 200)
        assert [ask(key) for key in keys] == [(201, 202)] * len(keys)
        after = {row["job"] for row in http.get("/v1/jobs", params={"limit": 500}).json()["jobs"]}
        assert len(after - before) == len(keys), "each key made one job"
        wait_until(lambda: all_settled(http, after - before))
        commands = http.get(f"/v1/jobs/{job}/commands").json()["commands"]
        kills = [command for command in commands if command["island"] == "europe"]
        assert len(kills) == len(keys), "each key made one command"
        assert wait_until(lambda: all(c["state"] != "undelivered" for c in kills_of(http, job)))


def kills_of(http: httpx.Client, job: str) -> list[dict[str, Any]]:
    commands: list[dict[str, Any]] = http.get(f"/v1/jobs/{job}/commands").json()["commands"]
    return commands


def all_settled(http: httpx.Client, jobs: set[str]) -> bool:
    """None is left half started."""
    states = {row["state"] for row in http.get("/v1/jobs", params={"limit": 500}).json()["jobs"] if row["job"] in jobs}
    return states <= {"running", "queued", "completed"}


def test_a_job_that_was_being_started_when_the_store_failed_is_started_when_it_is_back(
    postgres: PostgreSQL, service: Installation, job: str
) -> None:
    with patient(service) as http:
        assert_all_well(http, job)
        slow = service.home.path / "clockwork" / "starts-are-slow"
        slow.touch()
        with ThreadPoolExecutor(1) as pool:
            key = {"Idempotency-Key": f"slow-{time.monotonic_ns()}"}
            asked = pool.submit(http.post, "/v1/jobs", json=service.spec(name="slow", steps=20), headers=key)
            wait_until(lambda: (service.home.path / "clockwork" / "starting").exists())
            postgres.kill()
            slow.unlink()
            assert asked.result(PATIENCE_S).status_code == 503
        postgres.start()
        wait_until(lambda: http.get("/readyz").status_code == 200)
        found = wait_until(lambda: http.get("/v1/jobs", params={"name": "slow"}).json()["jobs"])
        wait_until(lambda: stored_state(service, found[0]["job"]) in ("running", "completed"))
        assert len(http.get("/v1/jobs", params={"name": "slow"}).json()["jobs"]) == 1


def stored_state(service: Installation, job: str) -> str:
    return str(json.loads(service.atoll("status", job, "--json"))["state"])


def test_the_log_tells_an_outage_in_lines_and_not_in_tracebacks(
    postgres: PostgreSQL, service: Installation, job: str
) -> None:
    with patient(service) as http:
        assert_all_well(http, job)
        before = service.home.log.stat().st_size
        postgres.kill()
        wait_until(lambda: "the thread tending: waiting: " in said_since(service, before))
        postgres.start()
        wait_until(lambda: "the thread tending: works again" in said_since(service, before))
        assert "Traceback" not in said_since(service, before)


def said_since(service: Installation, size: int) -> str:
    return service.home.log.read_bytes()[size:].decode()


def test_a_store_on_postgresql_that_was_silent_for_a_while_needs_no_new_connection_by_hand(
    postgres: PostgreSQL,
) -> None:
    store = Store(postgres.new_database())
    row = JobRow(job="a-1", name="a", spec={}, run_dir="/r", caller="c", submitted_at=1.0, state="running")
    store.add_job(row)
    with postgres.silent():
        with pytest.raises(InfrastructureError, match="repeat the request"):
            store.jobs()
        with pytest.raises(InfrastructureError, match="The change may or may not be stored"):
            store.update_job("a-1", reason="r")

    def answers() -> bool:
        with suppress(InfrastructureError):
            store.update_job("a-1", reason="well")
            return bool(store.jobs())
        return False

    wait_until(answers)
    assert [job.reason for job in store.jobs()] == ["well"]
    command = CommandRow(command="k", job="nobodys", request={}, caller="c", requested_at=1.0)
    with pytest.raises(Exception, match="foreign key"):
        store.add_command(command)
    assert store.jobs(), "what was given to it was at fault, and it answers"
    store.close()


def trains(client: Client, job: str) -> bool:
    """Whether all its islands train. A job that a busy machine lets answer late is asked again."""
    with suppress(InfrastructureError):
        return client.job(job).islands_training == 4
    return False


@pytest.mark.soak("five starts and ends of a service")
@pytest.mark.parametrize("is_lost", [False, True], ids=["the same database", "a new server's empty one"])
def test_jobs_and_tokens_are_back_from_a_dump_as_the_page_says(
    postgres: PostgreSQL, tmp_path: Path, is_lost: bool
) -> None:
    page = (ROOT / "docs" / "guide" / "backup.md").read_text()
    up = f"atoll up --control {CONTROL}"
    person = Newcomer(tmp_path)
    installation = Installation(tmp_path)
    installation.home = person.home

    def typed(heading: str) -> None:
        section = page.split(f"### {heading}\n")[1].split("\n## ")[0]
        commands = [command for block in blocks(section) for command in block.commands]
        assert any(command.startswith("pg_") for command in commands)
        for command in commands:
            if is_lost and command.startswith("pg_restore"):
                person.type(f"export ATOLL_DATABASE={postgres.new_database()}")
            person.type(up if command.strip() == "atoll up" else command)

    try:
        person.fork_commands()
        person.type(f"export ATOLL_DATABASE={postgres.new_database()}")
        person.type(up)
        with installation.client() as client, installation.http() as http:
            kept = client.submit(installation.spec()).job
            wait_until(lambda: trains(client, kept))
            token = http.post("/v1/tokens", json={"name": "reader", "role": "viewer"}).json()["token"]
        typed("With PostgreSQL")
        with installation.client() as client:
            assert client.submit(installation.spec()).job != kept
        typed("Restore with PostgreSQL")
        with installation.client() as client, installation.http(token) as reader:
            assert [job.job for job in client.jobs()] == [kept], "the newer one is lost"
            wait_until(lambda: trains(client, kept))
            assert reader.get("/v1/whoami").json()["name"] == "reader"
    finally:
        person.leave()
