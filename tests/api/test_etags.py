"""Entity tags of answers: nothing is sent twice, and nobody changes what another has just changed, unseen."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from api.client import Client
from api.jobs import status_cache
from api.jobs.status_cache import (
    FRESH_S,
    LIST_FRESH_S,
    LIST_STALE_MAX_S,
    RENEWALS_MAX,
    STALE_MAX_S,
    StatusCache,
)
from api.storage.store import JobRow
from orchestrator.errors import InfrastructureError
from tests.api.installation import Installation
from tests.waiting import PATIENCE_S, wait_until


def test_an_answer_that_did_not_change_is_not_sent_again(http: httpx.Client, service: Installation) -> None:
    job = http.post("/v1/jobs", json=service.spec(steps=10)).json()["job"]
    wait_until(lambda: http.get(f"/v1/jobs/{job}").json()["state"] == "completed")
    for path in (f"/v1/jobs/{job}", "/v1/jobs?state=completed", "/v1/node-groups"):
        first = http.get(path)
        tag = first.headers["ETag"]
        assert tag.startswith('"'), "strong"
        again = http.get(path, headers={"If-None-Match": f'"other", {tag}'})
        assert (again.status_code, again.content, again.headers["ETag"]) == (304, b"", tag)
        assert http.get(path, headers={"If-None-Match": '"other"'}).content == first.content


def test_a_job_is_changed_only_as_it_was_seen(http: httpx.Client, client: Client, service: Installation) -> None:
    job = http.post("/v1/jobs", json=service.spec()).json()["job"]
    wait_until(lambda: http.get(f"/v1/jobs/{job}").json()["global_version"])
    seen = {"If-Match": http.get(f"/v1/jobs/{job}").headers["ETag"]}
    version = http.get(f"/v1/jobs/{job}").json()["global_version"]
    wait_until(lambda: http.get(f"/v1/jobs/{job}").json()["global_version"] > version)
    scaled = http.post(f"/v1/jobs/{job}/scale", json={"node_group": "asia", "count": 1}, headers=seen)
    assert scaled.status_code == 202, "that it trains on is no conflict"
    for what, body in (("scale", {"node_group": "asia", "count": 0}), ("cancel", None)):
        late = http.post(f"/v1/jobs/{job}/{what}", json=body, headers=seen)
        assert (late.status_code, late.json()["type"]) == (412, "urn:atoll:problem:precondition-failed")
    assert [command.kind for command in client.commands(job)] == ["scale"]
    now = http.get(f"/v1/jobs/{job}").headers["ETag"]
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(http.post, f"/v1/jobs/{job}/cancel", headers={"If-Match": now}) for _ in range(8)]
    statuses = [future.result().status_code for future in asked]
    assert statuses.count(202) == 1
    assert set(statuses) <= {202, 409, 412}, "409 for who came when it had ended"
    assert [command.kind for command in client.commands(job)] == ["scale", "cancel"]
    wait_until(lambda: http.get(f"/v1/jobs/{job}").json()["state"] == "cancelled")
    assert http.delete(f"/v1/jobs/{job}", headers=seen).status_code == 412
    fresh = {"If-Match": http.get(f"/v1/jobs/{job}").headers["ETag"]}
    assert http.delete(f"/v1/jobs/{job}", headers=fresh).status_code == 204


def test_a_repeated_request_is_answered_though_its_own_first_time_changed_the_version(
    http: httpx.Client, service: Installation
) -> None:
    job = http.post("/v1/jobs", json=service.spec()).json()["job"]
    headers = {"If-Match": http.get(f"/v1/jobs/{job}").headers["ETag"], "Idempotency-Key": f"cancel {job}"}
    answers = [http.post(f"/v1/jobs/{job}/cancel", headers=headers) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [202, 202]
    assert answers[0].json()["command"] == answers[1].json()["command"]


def test_a_node_group_is_cordoned_only_as_it_was_seen(http: httpx.Client) -> None:
    seen = {"If-Match": http.get("/v1/node-groups").headers["ETag"]}
    assert http.post("/v1/node-groups/asia/cordon", headers=seen).status_code == 202
    assert http.post("/v1/node-groups/asia/uncordon", headers=seen).status_code == 412
    assert http.get("/v1/node-groups").json()["node_groups"][3]["cordoned"] is True
    assert http.post("/v1/node-groups/asia/uncordon", headers={"If-Match": "*"}).status_code == 202
    assert http.post("/v1/node-groups/asia/uncordon", headers={"If-Match": "nonsense"}).status_code == 412


class Asked:
    """A job that counts how often it is asked, and may be silent."""

    def __init__(self) -> None:
        self.count = 0
        self.silent = False
        self.gate = threading.Event()

    def __call__(self, _row: JobRow) -> Any:
        self.count += 1
        self.gate.wait(PATIENCE_S)
        if self.silent:
            raise InfrastructureError(detail="no answer", remedy="")
        return {"at": float(self.count)}


def cache_of(asked: Asked, generation: Callable[[], int] = lambda: 0) -> StatusCache:
    return StatusCache(asked, lambda jobs: dict.fromkeys(jobs, generation()), lambda *_: None)


def test_many_who_look_at_once_ask_a_job_once_also_when_it_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(status_cache, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(status_cache, "ASKED_S", PATIENCE_S)
    asked, row = Asked(), JobRow(job="a-1", state="running")
    statuses = cache_of(asked)
    for asked.silent in (False, True):
        asked.count = 0
        asked.gate.clear()
        with ThreadPoolExecutor(20) as pool:
            futures = [pool.submit(statuses.recent, row, PATIENCE_S) for _ in range(20)]
            asked.gate.set()
        errors = [future.exception() for future in futures]
        assert asked.count == 1
        assert all(isinstance(error, InfrastructureError) is asked.silent for error in errors)
        now += STALE_MAX_S * 1.1


def test_nobody_but_one_waits_for_a_job_that_is_slow_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(status_cache, "time", SimpleNamespace(monotonic=lambda: now))
    asked, row = Asked(), JobRow(job="a-1", state="running")
    asked.gate.set()
    statuses = cache_of(asked)
    first = statuses.recent(row)
    now = FRESH_S * 1.2
    asked.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        patient = pool.submit(statuses.recent, row)
        wait_until(lambda: asked.count == 2)
        assert statuses.recent(row) is first
        asked.gate.set()
        assert patient.result() is statuses.recent(row)


def test_nobody_sees_an_older_state_than_another_has_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = count()
    monkeypatch.setattr(status_cache, "time", SimpleNamespace(monotonic=lambda: next(ticks) / 1e6))
    asked, row = Asked(), JobRow(job="a-1", state="running")
    asked.gate.set()
    statuses = cache_of(asked)
    first, fresh = statuses.recent(row), statuses.fresh(row)
    assert first.record != fresh.record
    assert statuses.recent(row) is fresh


def test_a_list_asks_a_job_once_a_second_and_waits_for_it_only_after_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    now, generation = 0.0, 0
    monkeypatch.setattr(status_cache, "time", SimpleNamespace(monotonic=lambda: now))
    asked, row = Asked(), JobRow(job="a-1", state="running")
    asked.gate.set()
    statuses = cache_of(asked, lambda: generation)
    first = statuses.recent(row)
    now = LIST_FRESH_S * 0.9
    assert (statuses.listed([row]), asked.count) == ({"a-1": first}, 1)
    asked.gate.clear()
    now = LIST_FRESH_S * 1.1
    assert statuses.listed([row]) == {"a-1": first}, "the next answer is under way, and no list waits for it"
    wait_until(lambda: asked.count == 2)
    generation = 1
    assert not statuses.listed([row]), "a command has changed the job since"
    generation, now = 0, LIST_STALE_MAX_S * 1.1
    assert not statuses.listed([row])
    asked.gate.set()


def test_a_list_of_many_jobs_renews_them_a_few_at_a_time_and_counts_their_commands_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, counted, under_way, most, gate = 0.0, 0, set(), 0, threading.Event()
    monkeypatch.setattr(status_cache, "time", SimpleNamespace(monotonic=lambda: now))
    built: list[str] = []

    def ask(row: JobRow) -> Any:
        nonlocal most
        under_way.add(row.job)
        most = max(most, len(under_way))
        gate.wait(PATIENCE_S)
        under_way.discard(row.job)
        return {"at": now}

    def generations(jobs: Collection[str]) -> dict[str, int]:
        nonlocal counted
        counted += 1
        return dict.fromkeys(jobs, 0)

    statuses = StatusCache(ask, generations, lambda row, _: built.append(row.job))
    rows = [JobRow(job=f"a-{number}", state="running") for number in range(20)]
    gate.set()
    before = {row.job: statuses.recent(row) for row in rows}
    gate.clear()
    now, counted, most = LIST_FRESH_S * 1.1, 0, 0
    for _ in range(3):
        assert statuses.listed(rows) == before
    assert counted <= 3 + RENEWALS_MAX, "one query for a list, and one for each renewal that began"
    gate.set()
    wait_until(lambda: len(built) == 20)
    assert 1 <= most <= RENEWALS_MAX
    assert sorted(built) == sorted(before), "each was renewed once"
    assert all(statuses.listed(rows)[job] is not snapshot for job, snapshot in before.items())
