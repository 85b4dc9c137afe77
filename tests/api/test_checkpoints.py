"""Checkpoints by hand and over HTTP: one is asked for, they are listed, and a job is submitted that goes on from one."""

from __future__ import annotations

import io
import json
import socket
import tarfile
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.client import Client
from api.run.archive import archive_of, unpack
from api.schemas import Checkpoint
from orchestrator.errors import DataError, InfrastructureError
from orchestrator.specification.config import parse_job
from orchestrator.system.roots import AllowedRoots
from tests.api.installation import Installation
from tests.checkpoints.making import make
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def saved(service: Installation) -> tuple[str, Path]:
    """A job that has trained and was cancelled, and two checkpoints in its folder."""
    with service.http() as http:
        job = http.post("/v1/jobs", json=service.spec()).json()["job"]
        wait_until(lambda: http.get(f"/v1/jobs/{job}").json()["islands_training"] == 4)
        http.post(f"/v1/jobs/{job}/cancel")
        wait_until(lambda: http.get(f"/v1/jobs/{job}").json()["state"] == "cancelled")
    root = service.runs / job / "checkpoints"
    spec = parse_job(service.spec()).model_dump(mode="json")
    for number in (1, 2):
        make(root, number, spec=spec, job=job)
    return job, root


def refusal(http: httpx.Client, document: dict[str, Any]) -> str:
    answer = http.post("/v1/jobs", json=document)
    assert answer.status_code == 422, answer.text
    return json.dumps(answer.json()["errors"]) if "errors" in answer.json() else answer.text


def test_one_is_asked_for_while_the_job_trains_and_refused_while_it_does_not(
    http: httpx.Client, service: Installation
) -> None:
    job = http.post("/v1/jobs", json=service.spec()).json()["job"]
    wait_until(lambda: http.get(f"/v1/jobs/{job}").json()["islands_training"] == 4)
    assert "checkpoint 1 is being taken" in service.atoll("checkpoint", job)
    again = http.post(f"/v1/jobs/{job}/checkpoints")
    assert again.status_code == 202
    where = again.headers["Location"]
    refused = wait_until(lambda: (told := http.get(where).json())["state"] != "pending" and told)
    assert (refused["kind"], refused["state"]) == ("checkpoint", "refused")
    assert "is being taken" in refused["detail"]
    assert http.get(f"/v1/jobs/{job}/checkpoints").json() == {"checkpoints": []}
    assert "there are the checkpoints (none)" in service.atoll("rollback", job, "--to", "3", code=1)
    assert http.post(f"/v1/jobs/{job}/rollback", json={"checkpoint": 0}).status_code == 422
    http.post(f"/v1/jobs/{job}/cancel")
    wait_until(lambda: http.get(f"/v1/jobs/{job}").json()["state"] == "cancelled")
    assert http.post(f"/v1/jobs/{job}/checkpoints").status_code == 409


def test_those_of_a_job_are_listed_also_after_its_end(
    http: httpx.Client, service: Installation, saved: tuple[str, Path]
) -> None:
    job, root = saved
    told = http.get(f"/v1/jobs/{job}/checkpoints").json()["checkpoints"]
    assert [one["number"] for one in told] == [1, 2]
    assert told[1]["url"] == str(root / "000002")
    assert told[1]["islands"] == ["a", "b"]
    assert told[1]["bytes"] == sum(
        path.stat().st_size for path in (root / "000002").rglob("*.*") if path.name != "manifest.json"
    )
    assert json.loads(service.atoll("checkpoints", job, "--json")) == told
    assert "000002" in service.atoll("checkpoints", job)
    assert http.get("/v1/jobs/nobody/checkpoints").status_code == 404


def test_one_is_fetched_and_a_job_goes_on_from_what_was_fetched(
    http: httpx.Client, service: Installation, saved: tuple[str, Path], tmp_path: Path
) -> None:
    job, root = saved
    answer = http.get(f"/v1/jobs/{job}/checkpoints/1")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-tar")
    assert int(answer.headers["content-length"]) == len(answer.content)
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as packed:
        held = {member.name: packed.extractfile(member).read() for member in packed}  # type: ignore[union-attr]
    files = [path for path in (root / "000001").rglob("*") if path.is_file()]
    assert held == {str(path.relative_to(root / "000001")): path.read_bytes() for path in files}
    assert list(held)[-1] == "manifest.json"

    target = tmp_path / "fetched"
    assert str(target) in service.atoll("fetch", job, "--out", str(target)).replace("\n", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fetched"]
    resumed = json.loads(service.atoll("submit", service.spec_file(), "--resume", str(target), "--json"))
    assert (resumed["resumed_from"], resumed["resume_refused"]) == (str(target), [])
    http.post(f"/v1/jobs/{resumed['job']}/cancel")

    assert "already exists" in service.atoll("fetch", job, "--out", str(target), code=2)
    assert "existing ones: 1, 2" in service.atoll("fetch", job, "--checkpoint", "9", code=2).replace("\n", " ")
    assert http.get(f"/v1/jobs/{job}/checkpoints/0").status_code == 422


def test_an_archive_that_is_not_of_a_whole_checkpoint_is_refused_and_nothing_is_written_elsewhere(
    saved: tuple[str, Path], tmp_path: Path
) -> None:
    _, root = saved
    sound = archive_of([Checkpoint.model_construct(number=1, url=str(root / "000001"))], 1, AllowedRoots.only(root))
    content = b"".join(sound.chunks())
    assert len(content) == sound.byte_count
    flipped = content[:600] + bytes([content[600] ^ 1]) + content[601:]  # in the first file, behind its header of 512
    outside = io.BytesIO()
    with tarfile.open(fileobj=outside, mode="w") as packed:
        packed.addfile(tarfile.TarInfo("../elsewhere"), io.BytesIO())
    archive = tmp_path / "it.tar"
    for name, bad in {
        "flipped": flipped,
        "half": content[: len(content) // 2],
        "none": b"no archive",
        "outside": outside.getvalue(),
    }.items():
        archive.write_bytes(bad)
        with pytest.raises(DataError, match=r"it\.tar is not an archive of a sound checkpoint"):
            unpack(archive, tmp_path / "deep" / name)
    assert not (tmp_path / "deep" / "elsewhere").exists()
    assert {path.name for path in tmp_path.iterdir()} <= {"it.tar", "deep"}


def test_a_download_that_breaks_off_says_so(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def half() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nhalf")

        answering = threading.Thread(target=half)
        answering.start()
        with (
            Client(f"http://127.0.0.1:{server.getsockname()[1]}") as client,
            pytest.raises(InfrastructureError, match="was interrupted"),
        ):
            client.download_checkpoint("a-job", 1, tmp_path / "it.tar")
        answering.join()


def test_a_job_goes_on_from_another_by_its_name_and_a_damaged_checkpoint_is_passed_over_and_told(
    http: httpx.Client, service: Installation, saved: tuple[str, Path]
) -> None:
    job, root = saved
    file = service.spec_file()
    assert "--resume is empty. Name a job" in service.atoll("submit", file, "--resume", "", code=2)
    first = json.loads(service.atoll("submit", file, "--resume", job, "--json"))
    assert (first["resumed_from"], first["resume_refused"]) == (str(root / "000002"), [])
    http.post(f"/v1/jobs/{first['job']}/cancel")

    damaged = root / "000002" / "fragment-0001.parameters"
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-9] + bytes([content[-9] ^ 4]) + content[-8:])
    try:
        said = service.atoll("submit", file, "--resume", str(root / "000002"))
        assert f"resumes from {root / '000001'}" in said.replace("\n", "")
        assert "skipped:" in said
        assert "fragment-0001.parameters is damaged" in said.replace("\n", " ")
        http.post("/v1/jobs/latest/cancel")
        (root / "000001" / "manifest.json").unlink()
        assert "no intact checkpoint" in refusal(http, service.spec(resume={"checkpoint": job}))
    finally:
        damaged.write_bytes(content)
        make(root, 1, spec=parse_job(service.spec()).model_dump(mode="json"), job=job)


def test_what_cannot_be_gone_on_from_is_refused_with_the_reason(
    http: httpx.Client, service: Installation, saved: tuple[str, Path], tmp_path: Path
) -> None:
    job, _ = saved
    other = service.spec(resume={"checkpoint": job}, seed=7)
    assert "seed was 0 but is 7" in refusal(http, other)
    assert "is not a job of this service" in refusal(http, service.spec(resume={"checkpoint": "nobody"}))
    assert "It has no checkpoint" in refusal(http, service.spec(resume={"checkpoint": str(tmp_path)}))
    assert "not a supported protocol" in refusal(
        http, service.spec(resume={"checkpoint": "no-such-protocol://bucket/x"})
    )
    assert "resume.checkpoint" in service.atoll("submit", service.spec_file(), "--resume", "nobody", code=2)
