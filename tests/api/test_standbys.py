"""Standbys as operators see them: beside the islands, not among them, and booked for all that."""

from __future__ import annotations

import httpx

from api.jobs.path_check import fleet_problems
from orchestrator.specification.config import parse_job
from tests.api.clockwork import GROUPS
from tests.api.installation import Installation
from tests.waiting import wait_until

ISLANDS = [{"node_group": "us-east", "standby": 1}, {"node_group": "asia"}]


def test_a_standby_is_shown_beside_the_islands_and_takes_the_place_of_one(
    http: httpx.Client, service: Installation
) -> None:
    job = http.post("/v1/jobs", json=service.spec(islands=ISLANDS)).json()["job"]
    where = f"/v1/jobs/{job}"
    wait_until(lambda: http.get(f"{where}/islands/us-east-standby").json()["state"] == "standby")
    told = http.get(where).json()
    assert told["island_count"] == 2
    assert {island["island"]: island["standby"] for island in told["islands"]} == {
        "us-east": False,
        "asia": False,
        "us-east-standby": True,
    }
    assert "us-east-standby" in service.atoll("islands", job)

    http.post(f"{where}/islands/us-east/kill")
    island = wait_until(
        lambda: (
            (i := http.get(f"{where}/islands/us-east").json())["incarnation"] == 2 and i["state"] == "training" and i
        )
    )
    assert island["reason"] == "state taken from the standby us-east-standby"
    seen = http.get("/metrics").text
    assert f'atoll_standby_takeovers_total{{atoll_job="{job}"}} 1' in seen
    assert f'atoll_standby_seconds{{atoll_job="{job}",class="ready"}}' in seen
    http.post(f"{where}/cancel")


def test_a_job_whose_standbys_find_no_room_is_refused_at_once() -> None:
    cpus = next(group["cpus"] for group in GROUPS if group["name"] == "us-east")
    document = {"budget": {"steps": 10}, "synchroniser": {"fragments": 2}}
    entry = {"node_group": "us-east", "count": int(cpus)}
    fits = parse_job({**document, "islands": [entry]})
    assert fleet_problems(fits.islands, GROUPS) == ()
    (problem,) = fleet_problems(parse_job({**document, "islands": [{**entry, "standby": 1}]}).islands, GROUPS)
    assert f"asks for {cpus + 1:g} cpus" in problem.message
