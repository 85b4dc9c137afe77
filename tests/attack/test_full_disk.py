"""A disk without room, under the home with its log and store, or under the runs: told, nothing half done, and it passes."""

from __future__ import annotations

import os
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import numpy as np
import pytest

from api.installation import doctor
from api.installation.doctor import CheckResult, State
from api.installation.home import CONFIGS, Home
from orchestrator.host.records import write_parameters
from orchestrator.parameters.tensors import shapes
from orchestrator.runtime import cluster
from tests.api.installation import CONTROL, Installation
from tests.programs import missing, required
from tests.waiting import wait_until

DISK_BYTES = 16 << 20
ISLANDS = [{"node_group": "asia", "cpus": 0.01}]


@contextmanager
def small_disk(folder: Path, megabytes: int = 8) -> Iterator[None]:
    """The folder is a disk of its own, of a few megabytes."""
    mount = required("mount")
    if os.geteuid() != 0:
        missing("root, which mounting a disk needs,")
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([mount, "-t", "tmpfs", "-o", f"size={megabytes}m,mode=700", "atoll-test", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run([required("umount"), "--lazy", str(folder)], check=True)


@contextmanager
def failing_disk(folder: Path) -> Iterator[Callable[[], None]]:
    """The folder is a disk of its own, which takes nothing any more once what is yielded was called."""
    image = folder.with_suffix(".image")
    folder.mkdir(parents=True, exist_ok=True)
    if os.geteuid() != 0:
        missing("root, which mounting a disk needs,")
    with image.open("wb") as file:
        file.truncate(DISK_BYTES)
    subprocess.run([required("mkfs.ext4"), "-q", str(image)], check=True)
    mounted = subprocess.run([required("mount"), "-o", "loop", str(image), str(folder)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no file can be mounted as a disk here: {mounted.stderr.strip()}")

    def fail() -> None:
        subprocess.run(
            [required("mount"), "-o", "remount,abort", str(folder)], capture_output=True
        )  # its answer varies

    try:
        yield fail
    finally:
        subprocess.run([required("umount"), "--lazy", str(folder)], check=True)


@contextmanager
def full(folder: Path, name: str = "ballast") -> Iterator[None]:
    """Inside the block not a byte is left on the folder's disk."""
    ballast = folder / name
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        for size in (1 << 20, 1 << 12, 1):
            with suppress(OSError):
                while True:
                    file.write(b"\0" * size)
    try:
        yield
    finally:
        ballast.unlink()


@pytest.fixture
def installation(tmp_path: Path) -> Iterator[Installation]:
    """A service that runs, whose home and runs are small disks."""
    there = Installation(tmp_path)
    with small_disk(there.home.path), small_disk(there.runs):
        there.up()
        yield there
        there.atoll("down")


@pytest.fixture
def failing_home(tmp_path: Path) -> Iterator[tuple[Installation, Callable[[], None]]]:
    """A service that runs, on a home whose disk can be made to fail."""
    there = Installation(tmp_path)
    with failing_disk(there.home.path) as fail:
        there.up()
        try:
            yield there, fail
        finally:
            there.atoll("down")


def found_of_disks(home: Home, runs: Path, patch: pytest.MonkeyPatch) -> CheckResult:
    """What ``atoll doctor`` finds. Whether Ray and JAX can be imported, which takes long, it is not to see."""
    patch.setattr(doctor, "PROBES", dict.fromkeys(doctor.PROBES, "print('not tried')"))
    (finding,) = (one for one in doctor.examine(home, runs, CONFIGS / "groups.yaml") if one.check == "disk")
    return finding


def submit(http: httpx.Client, installation: Installation, key: str = "", **changes: object) -> httpx.Response:
    headers = {"Idempotency-Key": key} if key else {}
    return http.post("/v1/jobs", json=installation.spec(islands=ISLANDS, **changes), headers=headers)


def test_a_full_home_refuses_changes_with_the_reason_and_tells_all_the_rest(installation: Installation) -> None:
    home = installation.home.path
    with installation.http() as http:
        job = submit(http, installation).json()["job"]
        with full(home):
            for number in range(3):
                refused = submit(http, installation, f"again-{number}")
                assert refused.status_code == 503, refused.text
                assert "disk is full" in refused.json()["detail"]
                assert str(home) in refused.json()["detail"], "which disk"
                assert http.post(f"/v1/jobs/{job}/islands/asia/kill").status_code == 503
                assert http.post("/v1/tokens", json={"name": "t", "role": "viewer"}).status_code == 503
            assert http.get("/readyz").status_code == 503, "it is not to be sent work"
            assert [http.get(path).status_code for path in ("/healthz", "/v1/jobs", "/v1/whoami", "/metrics")] == [
                200
            ] * 4
            assert [row["job"] for row in http.get("/v1/jobs").json()["jobs"]] == [job], "nothing refused was kept"
            assert "disk is full" in installation.atoll("up", code=1), "it is up, and nothing is gained by ending it"
            assert installation.home.running()
        wait_until(lambda: http.get("/readyz").status_code == 200)
        assert [submit(http, installation, f"again-{number}").status_code for number in range(3)] == [201] * 3
        assert len(http.get("/v1/jobs").json()["jobs"]) == 4
        assert http.post(f"/v1/jobs/{job}/islands/asia/kill").status_code == 202
    assert "Traceback" not in installation.home.log.read_text()
    with sqlite3.connect(home / "service.sqlite") as store:
        assert store.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_service_on_a_full_home_can_be_ended_and_a_new_home_there_is_refused(
    installation: Installation,
) -> None:
    home = installation.home
    with installation.http() as http:
        job = submit(http, installation).json()["job"]
    token = home.token()
    with full(home.path):
        assert "stopped" in installation.atoll("down")
        assert not home.running()
        with full(home.path, "more"):  # its end has made some room
            nested = Installation(home.path / "new")
            said = nested.atoll("up", "--runs", str(installation.runs), "--control", CONTROL, code=1)
            assert "No space left" in said
            assert not nested.home.path.exists() or not nested.home.running()
    installation.up()
    assert home.token() == token
    with installation.http() as http:
        assert [row["job"] for row in http.get("/v1/jobs").json()["jobs"]] == [job]


def test_a_service_on_a_home_that_became_read_only_answers_and_can_be_ended(
    failing_home: tuple[Installation, Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a disk becomes that failed."""
    there, fail = failing_home
    with there.http() as http:
        assert submit(http, there).status_code == 201
        fail()
        refused = submit(http, there, "once")
        assert refused.status_code == 503
        assert str(there.home.path) in refused.json()["detail"]
        assert http.get("/readyz").status_code == 503, "it is not to be sent work"
        assert [http.get(path).status_code for path in ("/healthz", "/v1/whoami", "/metrics")] == [200] * 3
    finding = found_of_disks(there.home, there.runs, monkeypatch)
    assert finding.state is State.WRONG
    assert finding.detail == f"{there.home.path} cannot be written: Read-only file system"
    assert "stopped" in there.atoll("down")
    assert not there.home.running()
    said = there.atoll("up", "--control", CONTROL, code=1)
    assert "Read-only file system" in said
    assert "Mount the disk writable" in said


def test_what_is_wrong_with_the_disk_under_rays_folder_is_said(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with failing_disk(disk) as fail:
        assert cluster.disk_shortage(disk) == ""
        with full(disk):
            assert (
                cluster.disk_shortage(disk)
                == f"the disk under {disk}, Ray's folder, is full, so no process can start: make room on it"
            )
        fail()
        assert "is read-only, so no process can start: mount it writable" in cluster.disk_shortage(disk)
    assert cluster.disk_shortage(tmp_path / "nowhere") == ""


def test_a_full_disk_of_runs_refuses_what_needs_room_and_says_which_disk(installation: Installation) -> None:
    with installation.http() as http:
        job = submit(http, installation).json()["job"]
        wait_until(lambda: http.get(f"/v1/jobs/{job}").json()["global_version"] > 2)
        with full(installation.runs):
            refused = submit(http, installation, "once")
            assert refused.status_code == 503
            assert "No space left" in refused.json()["detail"]
            assert str(installation.runs) in refused.json()["detail"]
            download = http.get(f"/v1/jobs/{job}/parameters")
            assert download.status_code == 503, download.text
            assert "No space left" in download.json()["detail"]
            assert str(installation.runs) in download.json()["detail"]
            wait_until(lambda: "No space left" in (http.get(f"/v1/jobs/{job}").json()["pause_reason"] or ""))
            assert http.get("/readyz").status_code == 200, "jobs that run are the service's to look after"
            leavings = [path.name for path in (installation.runs / job).rglob("*.draft")]
            assert leavings == [], "they would take the room that all wait for"
        wait_until(lambda: not http.get(f"/v1/jobs/{job}").json()["pause_reason"])
        assert http.get(f"/v1/jobs/{job}/parameters").status_code == 200
        again = submit(http, installation, "once")
        assert again.status_code == 201, "what failed for want of room is no answer to the same key"
        assert again.json()["state"] == "running"
        states = [row["state"] for row in http.get("/v1/jobs").json()["jobs"]]
        assert states == ["running", "failed", "running"]


def test_parameters_that_find_no_room_are_the_systems_error_and_leave_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk"):
        big = {"big": np.zeros(16 << 20, np.float32)}
        with pytest.raises(OSError, match="No space left") as told:
            write_parameters(tmp_path / "disk", shapes(big), [big], {"job": "j"})
        assert told.value.errno == 28
        assert list((tmp_path / "disk").iterdir()) == []


def test_a_store_that_another_process_locks_can_be_read_and_tells_why_it_takes_nothing(tmp_path: Path) -> None:
    installation = Installation(tmp_path)
    installation.up()
    try:
        with installation.http() as http:
            job = submit(http, installation).json()["job"]
            other = sqlite3.connect(installation.home.path / "service.sqlite", isolation_level=None)
            other.execute("BEGIN EXCLUSIVE")
            refused = submit(http, installation, "k")
            assert refused.status_code == 503
            assert "locked" in refused.json()["detail"]
            assert http.get("/v1/jobs").status_code == 200
            assert http.get("/readyz").status_code == 503
            other.execute("ROLLBACK")
            other.close()
            wait_until(lambda: http.get("/readyz").status_code == 200)
            assert submit(http, installation, "k").status_code == 201
            assert http.post(f"/v1/jobs/{job}/cancel").status_code == 202
    finally:
        installation.atoll("down")
