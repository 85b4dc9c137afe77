"""Who takes part in a job, and which node groups get new islands: asked over HTTP, and by hand."""

from __future__ import annotations

import json

import httpx

from api.jobs.service import Service
from api.storage.store import CordonRow, Store
from tests.api.clockwork import connect
from tests.api.installation import Installation
from tests.waiting import wait_until


def state_of(http: httpx.Client, job: str, island: str) -> str:
    return http.get(f"/v1/jobs/{job}/islands/{island}").json()["state"]


def decided(http: httpx.Client, answer: httpx.Response) -> dict[str, str]:
    """The command once the job has decided on it."""
    assert answer.status_code == 202, answer.text
    where = answer.headers["Location"]
    return wait_until(lambda: (command := http.get(where).json())["state"] != "pending" and command)


def test_an_island_is_drained_and_added_again(http: httpx.Client, service: Installation) -> None:
    job = http.post("/v1/jobs", json=service.spec()).json()["job"]
    wait_until(lambda: state_of(http, job, "asia") == "training")
    command = decided(http, http.post(f"/v1/jobs/{job}/islands/asia/drain"))
    assert (command["kind"], command["state"]) == ("drain", "accepted")
    wait_until(lambda: state_of(http, job, "asia") == "drained")
    again = decided(http, http.post(f"/v1/jobs/{job}/islands/asia/drain"))
    assert again["state"] == "refused"
    assert "not training" in again["detail"]
    assert "steps no more" in service.atoll("drain", job, "europe")
    decided(http, http.post(f"/v1/jobs/{job}/islands/asia/readd"))
    wait_until(lambda: state_of(http, job, "asia") == "training")
    decided(http, http.post(f"/v1/jobs/{job}/cancel"))


def test_a_job_is_scaled_up_to_its_count_max_and_down_again(http: httpx.Client, service: Installation) -> None:
    islands = [{"node_group": "us-east", "count_max": 3}, {"node_group": "asia"}]
    job = http.post("/v1/jobs", json=service.spec(islands=islands)).json()["job"]
    wait_until(lambda: state_of(http, job, "asia") == "training")
    assert state_of(http, job, "us-east-1") == "stopped"
    seen = http.get(f"/v1/jobs/{job}").json()
    assert [island["island"] for island in seen["islands"] if island["spare"]] == ["us-east-1", "us-east-2"]
    assert seen["island_count"] == 2
    assert service.atoll("islands", job).count(" spare ") == 2
    up = decided(http, http.post(f"/v1/jobs/{job}/scale", json={"node_group": "us-east", "count": 2}))
    assert (up["kind"], up["state"], up["detail"]) == ("scale", "accepted", "us-east-1 is placed")
    wait_until(lambda: state_of(http, job, "us-east-1") == "training")
    assert "us-east-1 leaves" in service.atoll("scale", job, "us-east", "1")
    wait_until(lambda: state_of(http, job, "us-east-1") == "drained")
    assert http.get(f"/v1/jobs/{job}").json()["island_count"] == 3, "an island that has trained is no spare again"
    assert "0 to 3 islands" in service.atoll("scale", job, "us-east", "4", code=1)
    assert http.post(f"/v1/jobs/{job}/scale", json={"node_group": "us-east", "count": -1}).status_code == 422
    decided(http, http.post(f"/v1/jobs/{job}/cancel"))


def test_a_cordoned_node_group_takes_nothing_new_in_any_job(http: httpx.Client, service: Installation) -> None:
    job = http.post("/v1/jobs", json=service.spec()).json()["job"]
    wait_until(lambda: state_of(http, job, "europe") == "training")
    answer = http.post("/v1/node-groups/europe/cordon")
    assert answer.status_code == 202
    assert (answer.json()["node_group"]["cordoned"], answer.json()["node_group"]["cordoned_by"]) == (True, "local")
    told = answer.json()["commands"]
    assert [(command["job"], command["kind"], command["caller"]) for command in told] == [(job, "cordon", "local")]
    assert http.post("/v1/node-groups/europe/cordon").json()["commands"] == [], "asked twice"
    assert "cordoned by local" in service.atoll("node-groups")
    decided(http, http.post(f"/v1/jobs/{job}/islands/europe/kill"))
    wait_until(lambda: state_of(http, job, "europe") == "cordoned")
    assert http.get(f"/v1/jobs/{job}/islands/europe").json()["reason"] == "node group europe is cordoned"

    late = http.post("/v1/jobs", json=service.spec()).json()["job"]
    wait_until(lambda: state_of(http, late, "asia") == "training")
    assert state_of(http, late, "europe") == "cordoned"

    assert "europe accepts islands" in service.atoll("uncordon", "europe")
    for name in (job, late):
        wait_until(lambda name=name: state_of(http, name, "europe") == "training")
        decided(http, http.post(f"/v1/jobs/{name}/cancel"))
    groups = http.get("/v1/node-groups").json()["node_groups"]
    assert not any(group["cordoned"] for group in groups)


def test_only_a_node_group_of_the_fleet_is_cordoned(http: httpx.Client) -> None:
    answer = http.post("/v1/node-groups/atlantis/cordon")
    assert answer.status_code == 404
    assert "asia, europe" in answer.json()["remedy"]


def test_what_a_killed_service_had_stored_but_not_told_is_told_by_the_next(cold: Installation) -> None:
    control, store = connect(cold.home.path), Store(f"sqlite:///{cold.folder}/atoll.db")
    job = Service(control, store, cold.runs).submit(cold.spec(), "me", None).job
    store.cordon(CordonRow(node_group="asia", caller="somebody", cordoned_at=0.0))
    Service(control, store, cold.runs).resume()
    wait_until(lambda: control.status(job)["view"]["cordoned"] == ["asia"])
    assert [(row.request["kind"], row.caller) for row in store.commands(job)] == [("cordon", "somebody")]
    store.close()


def test_the_status_has_a_line_of_the_autopilots_newest_look(http: httpx.Client, service: Installation) -> None:
    job = http.post("/v1/jobs", json=service.spec()).json()["job"]
    wait_until(lambda: state_of(http, job, "asia") == "training")
    assert "autopilot" not in service.atoll("status", job)
    look = {"looked_at_time": 5.0, "record": 9, "at": 1.0, "settings": {}, "fit_error_ratio": None, "looked_at": 8}
    looks = [look | {"outcome": "nothing gains more than 1 %", "advice": None}, look | {"outcome": "", "advice": None}]
    (service.runs / job / "advice.json").write_text(json.dumps({"looks": looks}))
    assert "autopilot: nothing gains more than 1 %" in service.atoll("status", job)
    told = http.get("/metrics").text
    assert f'atoll_autopilot_gain_ratio{{atoll_job="{job}"}} 0.0' in told
    assert f'atoll_autopilot_look_timestamp_seconds{{atoll_job="{job}"}} 5.0' in told
    decided(http, http.post(f"/v1/jobs/{job}/cancel"))
