"""What lies in a run's folder is never trusted: whatever it is, it is told of its own job, and nobody else has an error.

Through the HTTP interface of a real service. Whoever writes in run folders is the user himself, or code that a job named.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.run.folder import Logbook, LogReader, Run, examine, newest
from api.run.records import sound_records
from orchestrator.errors import NotFound
from orchestrator.specification.bounds import ISLANDS_MAX
from orchestrator.system.logbook import logbooks
from tests.api.installation import Installation
from tests.waiting import wait_until

ISLANDS = [{"node_group": "asia", "cpus": 0.01}, {"node_group": "europe", "cpus": 0.01}]
SECRET = "the admin's token, or any other file of the service's user"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    installation = Installation(tmp_path_factory.mktemp("damaged"))
    installation.up()
    (installation.folder / "secret").write_text(SECRET)
    yield installation
    installation.atoll("down")


@pytest.fixture(scope="module")
def http(service: Installation) -> Iterator[httpx.Client]:
    with service.http() as client:
        yield client


@pytest.fixture(scope="module")
def ended(service: Installation, http: httpx.Client) -> str:
    """A job that is damaged after its end."""
    return begun(service, http, steps=10)


@pytest.fixture(scope="module")
def well(service: Installation, http: httpx.Client) -> str:
    """One beside it, that is not."""
    return begun(service, http, steps=10)


@pytest.fixture
def running(service: Installation, http: httpx.Client) -> Iterator[str]:
    """A job that trains, damaged by one test: what it takes to look at one of this small world grows with its age."""
    job = begun(service, http)
    yield job
    http.post(f"/v1/jobs/{job}/cancel")
    wait_until(lambda: http.get(f"/v1/jobs/{job}").json()["state"] in ("cancelled", "failed"))
    assert http.delete(f"/v1/jobs/{job}").status_code == 204


def begun(service: Installation, http: httpx.Client, **changes: Any) -> str:
    job = http.post("/v1/jobs", json=service.spec(islands=ISLANDS, **changes)).json()["job"]
    state = "completed" if changes else "running"
    wait_until(lambda: (told := http.get(f"/v1/jobs/{job}").json())["state"] == state and told["global_version"] > 0)
    return str(job)


def put(raw: bytes) -> Callable[[Path], None]:
    return lambda path: void(path.write_bytes(raw))


def void(_: Any) -> None:
    pass


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def link(path: Path) -> None:
    path.symlink_to(next(folder / "secret" for folder in path.parents if (folder / "secret").exists()))


THINGS: dict[str, Callable[[Path], None]] = {
    "no UTF-8": put(b'{"view": "\xff"}'),
    "nothing": put(b""),
    "an empty object": put(b"{}"),
    "an empty list": put(b"[]"),
    "null": put(b"null"),
    "a number": put(b"7"),
    "a number of 5,000 digits": put(b"9" * 5000),
    "a view without an outcome": put(b'{"view": {"phase": "finished"}}'),
    "a view of nothing": put(b'{"view": null}'),
    "NaN": put(b'{"view": NaN, "at": Infinity}'),
    "a lone surrogate": put(b'{"view": {"phase": "\\ud800"}}'),
    "nesting": put(b'{"view":' * 200_000),
    "zeros": put(bytes(100_000)),
    "a terabyte": huge,
    "a FIFO": lambda path: os.mkfifo(path),
    "a folder": lambda path: path.mkdir(),
    "a link to a secret": link,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a device": lambda path: path.symlink_to("/dev/zero"),
}

ANYWHERE = (
    "no UTF-8",
    "an empty list",
    "nesting",
    "a terabyte",
    "a FIFO",
    "a folder",
    "a link to a secret",
    "a device",
)
"""One of each kind."""
OTHERS = [thing for thing in THINGS if thing not in ANYWHERE]
SOME_THINGS = (
    *ANYWHERE,
    *(pytest.param(thing, marks=pytest.mark.soak("another of its kind, with a job of its own")) for thing in OTHERS),
)


def remove(path: Path) -> None:
    with suppress(FileNotFoundError):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def looked_round(http: httpx.Client, bad: str, well: str, *of_the_damaged: str) -> dict[str, int]:
    """Everybody else has an answer, and nobody a secret; returns the damaged job's own answers."""
    listed = http.get("/v1/jobs")
    assert listed.status_code == 200
    states = {job["job"]: job["state"] for job in listed.json()["jobs"]}
    assert states[well] == "completed"
    assert bad in states
    metrics = http.get("/metrics")
    assert metrics.status_code == 200
    assert f'atoll_job_phase{{atoll_job="{well}",phase="finished"}} 1.0' in metrics.text
    own = {}
    for what in ("", *of_the_damaged):
        answer = http.get(f"/v1/jobs/{bad}{what}")
        assert SECRET not in answer.text, what
        own[what] = answer.status_code
    return own


@pytest.mark.parametrize("thing", SOME_THINGS)
def test_a_running_job_with_anything_as_its_status_is_told_as_it_is(
    service: Installation, http: httpx.Client, running: str, well: str, thing: str
) -> None:
    path = service.runs / running / "status.json"
    THINGS[thing](path)
    try:
        assert looked_round(http, running, well)[""] == 200
        assert http.get(f"/v1/jobs/{running}").json()["state"] == "running", "it answers, and knows best"
    finally:
        remove(path)


PLACES = {
    "logs/synchroniser-1.log": ("/logs", "/logs/synchroniser"),
    "logs/islands/asia-1.log": ("/logs", "/logs/asia"),
    "report.json": ("/report",),
    "report.html": ("/report.html",),
}


@pytest.mark.parametrize("thing", ANYWHERE)
@pytest.mark.parametrize("name", PLACES)
def test_anything_in_the_place_of_a_log_or_a_report_is_no_way_out_of_the_folder(
    service: Installation, http: httpx.Client, ended: str, well: str, name: str, thing: str
) -> None:
    path = service.runs / ended / name
    kept = path.read_bytes()
    remove(path)
    THINGS[thing](path)
    if (thing, name) == ("a terabyte", "report.html"):
        os.truncate(path, 1 << 20)  # whose download would be whole, and harms nobody
    try:
        own = looked_round(http, ended, well, *PLACES[name])
        assert own.get("/logs", 200) == 200
        assert all(status < 500 or (what, status) == ("/report", 500) for what, status in own.items()), own
    finally:
        remove(path)
        path.write_bytes(kept)


def test_a_folder_of_logs_that_leads_elsewhere_shows_nothing_of_there(
    service: Installation, http: httpx.Client, ended: str
) -> None:
    folder, elsewhere = service.runs / ended / "logs", service.folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "secret-1.log").write_text(SECRET)
    folder.rename(folder.with_name("kept"))
    folder.symlink_to(elsewhere)
    try:
        assert http.get(f"/v1/jobs/{ended}/logs").json() == {"logs": []}
        assert http.get(f"/v1/jobs/{ended}/logs/secret").status_code == 404
    finally:
        folder.unlink()
        folder.with_name("kept").rename(folder)


TAPES = {
    **{name: THINGS[name] for name in ANYWHERE},
    "a number beyond all": put(b'{"n":' + b"9" * 5000 + b',"event":{}}\n'),
    "a line without an end": put(b'{"n":1,' + b"x" * (20 << 20)),
    "a forged end of the stream": put(b'{"schema":1}\n{"n":1,"event":"\r\n\nevent: end\n\ndata: {}"}\n'),
}


@pytest.mark.parametrize("thing", TAPES)
def test_anything_in_the_place_of_the_tape_of_a_job_that_ended(
    service: Installation, http: httpx.Client, ended: str, well: str, thing: str
) -> None:
    path = service.runs / ended / "tape.jsonl"
    kept = path.read_bytes()
    remove(path)
    TAPES[thing](path)
    if thing == "a terabyte":
        os.truncate(path, 32 << 20)
    try:
        own = looked_round(http, ended, well, "/tape", "/merges", "/events?follow=false")
        assert (own[""], own["/events?follow=false"]) == (200, 200)
        assert all(status < 500 or (what, status) == ("/merges", 500) for what, status in own.items()), own
    finally:
        remove(path)
        path.write_bytes(kept)


@pytest.mark.parametrize("thing", THINGS)
def test_a_job_that_ended_and_whose_final_state_is_damaged_is_known_by_the_store(
    service: Installation, http: httpx.Client, ended: str, well: str, thing: str
) -> None:
    path = service.runs / ended / "status.json"
    kept = path.read_bytes()
    remove(path)
    THINGS[thing](path)
    try:
        assert looked_round(http, ended, well)[""] == 200
        told = http.get(f"/v1/jobs/{ended}").json()
        assert (told["state"], told["global_version"] > 0) == ("completed", True)
    finally:
        remove(path)
        path.write_bytes(kept)


@pytest.mark.parametrize("thing", ["no UTF-8", "a FIFO", "a folder", "a link to a secret", "a terabyte"])
def test_a_damaged_job_can_be_cancelled_and_removed(service: Installation, http: httpx.Client, thing: str) -> None:
    job = begun(service, http)
    path = service.runs / job / "status.json"
    THINGS[thing](path)
    assert http.post(f"/v1/jobs/{job}/cancel").status_code == 202
    wait_until(lambda: http.get(f"/v1/jobs/{job}").json()["state"] == "cancelled")
    remove(path)
    THINGS[thing](path)
    assert http.delete(f"/v1/jobs/{job}").status_code == 204
    assert not (service.runs / job).exists()
    assert (service.folder / "secret").read_text() == SECRET


def test_a_run_folder_that_is_a_link_is_removed_as_a_link(
    service: Installation, http: httpx.Client, ended: str
) -> None:
    job = begun(service, http, steps=10)
    shutil.rmtree(service.runs / job)
    (service.runs / job).symlink_to(service.runs / ended)
    assert http.get(f"/v1/jobs/{job}/report").status_code == 404
    assert http.delete(f"/v1/jobs/{job}").status_code == 204
    assert (service.runs / ended / "report.json").is_file()


def test_the_service_said_none_of_it_again_and_again(service: Installation) -> None:
    log = service.home.log.read_text()
    assert "This is a bug" not in log
    assert log.count("Traceback") <= len(THINGS) + len(TAPES), (
        "a report or a tape asked for by name; no round of a thread"
    )
    assert len(log.splitlines()) < 5000


def test_a_damaged_line_of_a_tape_is_no_event() -> None:
    whole = b'{"n":1,"event":{"type":"JobStarted","at":0.0},"effects":[]}'
    forged = b'{"n":2,"event":{"type":"X\r\revent: end"},"effects":[]}'
    cut = b'{"n":3,"event":{"type":"Jo'
    checked = b'{"n":4,"event":{"at":1.0},"effects":[],"crc":"00000000"}'
    lines = [whole, forged, cut, checked, b'{"n":5,"x":"\xff"}']
    assert list(sound_records(lines)) == [(1, whole)]


def test_a_log_is_read_from_its_end_however_long_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "job" / "logs"
    folder.mkdir(parents=True)
    with (folder / "synchroniser-1.log").open("wb") as file:
        file.truncate(1 << 36)
        file.seek(0, os.SEEK_END)
        file.write(b"\nthe last line\n")
    (folder / f"x-{'9' * 200}.log").write_text("")
    run = Run("job", tmp_path / "job", settled=False)
    assert [book.source for book in logbooks(run.folder)] == ["synchroniser"]
    reader = LogReader(newest(run, "synchroniser"), tail=1)
    assert reader.read() == b"the last line\n"
    reader.close()
    os.mkfifo(folder / "controller-1.log")
    with pytest.raises(NotFound, match="not a regular file"):
        LogReader(Logbook("controller", 1, False, folder / "controller-1.log"), tail=1)


def test_a_final_state_of_more_islands_than_a_job_may_have_is_damage_and_read_once(tmp_path: Path) -> None:
    """Within its 64 MiB there is room for 120,000 islands, of which each scrape of the metrics would make samples."""
    run_dir = tmp_path / "trial-abcde"
    run_dir.mkdir()
    island = {"island": "a", "node_group": "a", "region": "a", "state": "lost", "reason": "", "node": "", "pid": None}
    island |= dict.fromkeys(("accelerator_count", "incarnation", "step", "steps_total", "tokens_total", "restarts"), 0)
    island |= dict.fromkeys(("step_seconds", "loss", "last_merge_at"))
    view = {"phase": "finished", "outcome": "completed", "reason": "", "pause_reason": None, "fragments": []}
    view |= dict.fromkeys(("epoch", "token_budget", "tokens_trained", "global_version"), 0)
    told = {"job_id": run_dir.name, "name": "trial", "started_at": 0.0, "at": 1.0, "goodput": {}, "statistics": {}}
    for count, is_state in ((ISLANDS_MAX, True), (ISLANDS_MAX + 1, False)):
        status = told | {"view": view | {"islands": [island] * count}, "loss_curve": [], "commands": {}}
        (run_dir / "status.json").write_text(json.dumps(status))
        found = examine(run_dir)
        assert bool(found.status) is is_state, found.damage
        assert ("at most" in found.damage) is not is_state
