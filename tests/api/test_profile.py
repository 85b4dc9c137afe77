"""`atoll profile` and its routes, against a service whose islands complete a trace at the second look."""

from __future__ import annotations

import json
from pathlib import Path

import httpx

from tests.api.clockwork import TRACE
from tests.api.installation import Installation
from tests.waiting import wait_until


def training_job(service: Installation) -> str:
    job = service.atoll("submit", service.spec_file()).split()[1].rstrip(":")
    wait_until(lambda: json.loads(service.atoll("status", job, "--json"))["islands_training"] == 4)
    return job


def test_a_trace_becomes_a_folder_and_a_second_never_overwrites_it(service: Installation, tmp_path: Path) -> None:
    job, target = training_job(service), tmp_path / "new" / "trace"
    said = service.atoll("profile", job, "asia", "--steps", "3", "--out", str(target))
    assert f"wrote {target} with 3 steps, 1.5 s of asia, which stood still for 0.25 s" in said
    assert "plugins/profile/run/host.trace.json.gz" in said
    assert (target / "plugins/profile/run/host.xplane.pb").read_bytes() == b"planes" * 100
    assert "already exists" in service.atoll("profile", job, "asia", "--out", str(target), code=2)
    assert "--steps '0' is not a whole number from 1 to 100" in service.atoll(
        "profile", job, "asia", "--steps", "0", code=2
    )
    assert [path.name for path in target.parent.iterdir()] == ["trace"]
    problem = service.home.path / "clockwork" / "profile-problem"
    problem.write_text("The profiler failed: no room.")
    said = service.atoll("profile", job, "asia", "--out", str(tmp_path / "other"), code=1)
    assert "no trace of island asia: The profiler failed: no room." in said
    problem.unlink()
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_what_cannot_be_traced_is_said_in_a_sentence(service: Installation, tmp_path: Path) -> None:
    job = training_job(service)
    assert f"Job {job} has no island 'mars'" in service.atoll("profile", job, "mars", code=2)
    service.atoll("kill", job, "asia", "--stay-down")
    wait_until(lambda: "stopped" in service.atoll("islands", job))
    assert "is stopped, not training, so it takes no steps" in service.atoll("profile", job, "asia", code=1)
    service.atoll("cancel", job)
    wait_until(lambda: json.loads(service.atoll("status", job, "--json"))["state"] == "cancelled")
    assert "already cancelled" in service.atoll("profile", job, "europe", code=1)


def test_the_routes_are_idempotent_by_name(service: Installation, http: httpx.Client) -> None:
    path = f"/v1/jobs/{training_job(service)}/islands/asia/profiles/mine"
    assert http.get(path).status_code == 404
    first = http.post(path, json={"steps": 2})
    assert (first.status_code, first.json()["steps_taken"], first.json()["byte_count"]) == (202, 0, None)
    assert http.post(path, json={"steps": 2}).json()["byte_count"] == len(TRACE)
    assert http.get(f"{path}/trace").content == TRACE
    for body in ({"steps": 101}, {"steps": 2.5}, {"steps": True}, {"step": 2}):
        assert http.post(path, json=body).status_code == 422, body
    assert http.post(path.replace("mine", "a b"), json={}).status_code == 422
